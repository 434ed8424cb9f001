"""Checks each contender's result and then times it: norms by width, the MLP by rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from layout_kernels.benchmark.memory import flusher
from layout_kernels.benchmark.proof import WrongResultError, check
from layout_kernels.benchmark.timers import Burst
from layout_kernels.benchmark.turns import medians
from layout_kernels.numerics.modes import ModePlugin
from tools.device import contenders
from tools.device.contenders import OURS, Norm

# Written before each call: no cache of a GPU holds it, and the host enqueues the call meanwhile.
_FLUSHED_BYTES = 2**30


@dataclass(frozen=True)
class Plan:
    """What is measured: on a GPU all of it, interpreted a little of it."""

    device: str
    widths: tuple[int, ...]
    elements: int
    mlps: tuple[tuple[str, int, int], ...]
    rows: tuple[int, ...]


FULL = Plan(
    "cuda",
    (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
    2**26,
    (("Llama-8B", 4096, 14336), ("Qwen3-0.6B", 1024, 3072)),
    (1, 2, 4, 8, 16, 64, 256, 1024, 4096, 8192),
)
SMALL = Plan("cpu", (256, 1024), 2**12, (("small", 64, 96),), (1, 8, 16))


@dataclass
class Row:
    """One measurement. `problem` is a width or a number of rows; `least_bytes` what must cross the bus."""

    kind: str
    problem: int
    contender: str
    least_bytes: int = 0
    error: float | None = None
    reason: str = ""
    timing: dict[str, Any] | None = None

    @property
    def seconds(self) -> float | None:
        """The median of one call."""
        return self.timing["median"] if self.timing else None

    @property
    def rate(self) -> float | None:
        """Least bytes a second."""
        return self.least_bytes / self.seconds if self.seconds else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "seconds": self.seconds, "bytes_per_second": self.rate}


def _timed(row: Row, device: str, call: Callable[[], Any], expected: Any, bound: float) -> Row:
    """The row with the difference and the median of a call, on a cold cache, that is proven first."""
    try:
        row.error = check(row.contender, call(), expected, bound)
        if device == "cuda":
            burst = Burst(call, 1, before=flusher(_FLUSHED_BYTES, device), waits=False)
            found = medians({"": burst}, device, rounds=5, seconds=0.08, warmup=3)
        else:
            found = medians({"": Burst(call, 1)}, device, rounds=1, warmup=0)
        row.timing = found.summary("")
    except Exception as error:  # noqa: BLE001, a contender of others may fail in any way; the report says how
        row.reason = _why(error)
    return row


def _why(error: Exception) -> str:
    name = "" if isinstance(error, WrongResultError) else f"{type(error).__name__}: "
    return f"{name}{error}".splitlines()[0][:200]


def _backward_of(norm: Norm, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Callable[[], Any]:
    if norm.gradients is not None:
        return lambda: norm.gradients(grad, x, weight)  # type: ignore[misc]
    if norm.forward is None:
        raise ValueError(f"{norm.name}: {norm.missing}")
    inputs = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = norm.forward(*inputs)
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


def norm_rows(plan: Plan, deadline: float) -> Iterator[Row]:
    """Forward, graphed forward and backward of every contender at every width, in bfloat16."""
    for width in plan.widths:
        make = torch.Generator().manual_seed(width)
        shapes = (max(1, plan.elements // width), width), (max(1, plan.elements // width), width), (width,)
        grad, x, weight = (torch.randn(s, generator=make).to(plan.device, torch.bfloat16) for s in shapes)
        wide = x.float().requires_grad_(), weight.float().requires_grad_()
        exact = contenders.stock_norm(*wide)
        expected = exact.detach(), torch.autograd.grad(exact, wide, grad.float())
        for norm in contenders.norms(direct=plan.device != "cuda"):
            for kind in ("forward", "graph", "backward"):
                row = Row(kind, width, norm.name, least_bytes=2 * x.numel() * (3 if kind == "backward" else 2))
                row.reason = _obstacle(plan, norm, kind, deadline)
                yield row if row.reason else _norm_row(plan, row, norm, (grad, x, weight), expected)
        torch._dynamo.reset()


def _obstacle(plan: Plan, norm: Norm, kind: str, deadline: float) -> str:
    if norm.forward is None:
        return norm.missing
    if kind == "graph" and plan.device != "cuda":
        return "needs a GPU"
    return "no time left" if time.monotonic() > deadline else ""


def _norm_row(plan: Plan, row: Row, norm: Norm, tensors: tuple[Any, ...], expected: tuple[Any, Any]) -> Row:
    grad, x, weight = tensors
    backward = row.kind == "backward"
    try:
        call = _backward_of(norm, grad, x, weight) if backward else _forward_of(norm, x, weight, row.kind == "graph")
    except Exception as error:  # noqa: BLE001, a contender of others may fail in any way; the report says how
        row.reason = _why(error)
        return row
    # bfloat16 rounds twice forward, and the weight's gradient sums a rounded factor: 2^-6 of the largest.
    return _timed(row, plan.device, call, expected[backward], 2**-6)


def _forward_of(norm: Norm, x: torch.Tensor, weight: torch.Tensor, graph: bool) -> Callable[[], Any]:
    forward = norm.forward
    if forward is None:
        raise ValueError(f"{norm.name}: {norm.missing}")

    def call() -> torch.Tensor:
        with torch.no_grad():
            return forward(x, weight)

    return _graphed(call) if graph else call


def _graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a CUDA graph; it returns what the graph writes to."""
    captured = ModePlugin("cudagraph").prepare(call, "cuda", 1)
    return lambda: (captured.run(), captured.outputs()[0])[1]


def mlp_rows(plan: Plan, deadline: float) -> Iterator[Row]:
    """The norm and MLP of models, stock beside ours with and without the kernel for few rows; as graphs on a GPU."""
    for name, width, size in plan.mlps:
        make = torch.Generator().manual_seed(width)
        weight = torch.randn(width, generator=make).to(plan.device, torch.bfloat16)
        gate_up = (torch.randn(2 * size, width, generator=make) / width**0.5).to(plan.device, torch.bfloat16)
        down = (torch.randn(width, size, generator=make) / size**0.5).to(plan.device, torch.bfloat16)
        # In stock they are tensors of their own, which a product of their memory also is.
        gate, up = (part.contiguous() for part in gate_up.chunk(2))
        for count in plan.rows:
            x = torch.randn(count, width, generator=make).to(plan.device, torch.bfloat16)
            exact = contenders.stock_mlp(*(t.float() for t in (x, weight, gate, up, down)))
            ours = x, weight, gate_up, down
            calls = {
                OURS: partial(contenders.our_mlp, *ours),
                "composed": partial(contenders.composed_mlp, *ours),
                "stock": partial(contenders.stock_mlp, x, weight, gate, up, down),
            }
            for contender, call in calls.items():
                yield from _mlp_pair(plan, Row(f"mlp {name}", count, contender), call, exact, deadline)


def _mlp_pair(plan: Plan, row: Row, call: Callable[[], Any], exact: torch.Tensor, deadline: float) -> Iterator[Row]:
    row.least_bytes = 2 * exact.shape[-1]
    if time.monotonic() > deadline:
        row.reason = "no time left"
        yield row
        return
    with torch.no_grad():
        # Six roundings to bfloat16 on the way, each of half of 2^-8, amplified by a sum: 2^-5 of the largest.
        yield _timed(row, plan.device, call, exact, 2**-5)
        if plan.device == "cuda" and row.seconds is not None:
            again = Row(row.kind + " graph", row.problem, row.contender, least_bytes=row.least_bytes)
            yield _timed(again, plan.device, _graphed(call), exact, 2**-5)
