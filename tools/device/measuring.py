"""What is measured, as cases: norms by width, the MLP by rows. Each result is proven, then timed by the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from layout_kernels.benchmark.memory import flusher
from layout_kernels.benchmark.proof import check
from layout_kernels.benchmark.timers import Burst
from layout_kernels.benchmark.turns import medians
from layout_kernels.numerics.modes import ModePlugin
from layout_kernels.numerics.suite import FAILED, NOT_APPLICABLE, NOT_RUN, PASSED
from tools.device import contenders
from tools.device.contenders import OURS, LeftOutError, Norm

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
    status: str = NOT_RUN
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


@dataclass(frozen=True)
class Case:
    """A row to be filled: what makes its call, the exact result, and how far from it a right one may be."""

    row: Row
    make: Callable[[], Callable[[], Any]]
    exact: Any
    bound: float
    graph: bool = False

    def measure(self, device: str, deadline: float) -> Row:
        """The row with the difference and the time of a call, on a cold cache; or with the reason why not."""
        row = self.row
        if time.monotonic() > deadline:
            row.reason = "no time left"
            return row
        try:
            call = _graphed(self.make(), device) if self.graph else self.make()
            row.error = check(row.contender, call(), self.exact, self.bound)
            row.timing, row.status = _timing(call, device), PASSED
        except LeftOutError as error:
            row.reason, row.status = str(error), NOT_APPLICABLE
        except Exception as error:  # noqa: BLE001, a contender of others may fail in any way; the report says how
            row.reason, row.status = f"{type(error).__name__}: {error}".splitlines()[0][:200], FAILED
        return row


def _timing(call: Callable[[], Any], device: str) -> dict[str, Any]:
    if device != "cuda":
        return medians({"": Burst(call, 1)}, device, rounds=1, warmup=0).summary("")
    burst = Burst(call, 1, before=flusher(_FLUSHED_BYTES, device), waits=False)
    return medians({"": burst}, device, rounds=5, seconds=0.08, warmup=3).summary("")


def _graphed(call: Callable[[], Any], device: str) -> Callable[[], Any]:
    """The call as a CUDA graph; it returns what the graph writes to."""
    if device != "cuda":
        raise LeftOutError("needs a GPU")
    call()  # which compiles it, or says why it cannot be had
    captured = ModePlugin("cudagraph").prepare(call, device, 1)
    return lambda: (captured.run(), captured.outputs()[0])[1]


def _forward(function: Callable[..., Any], *tensors: torch.Tensor) -> Callable[[], Any]:
    return torch.no_grad()(partial(function, *tensors))


def _backward(norm: Norm, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Callable[[], Any]:
    if norm.gradients is not None:
        return partial(norm.gradients, grad, x, weight)
    inputs = x.detach().requires_grad_(), weight.detach().requires_grad_()
    return partial(torch.autograd.grad, norm.forward(*inputs), inputs, grad, retain_graph=True)


def norm_cases(plan: Plan) -> Iterator[Case]:
    """Forward, graphed forward and backward of every contender at every width, in bfloat16."""
    for width in plan.widths:
        make = torch.Generator().manual_seed(width)
        rows = max(1, plan.elements // width)
        shapes = (rows, width), (rows, width), (width,)
        grad, x, weight = (torch.randn(s, generator=make).to(plan.device, torch.bfloat16) for s in shapes)
        wide = x.float().requires_grad_(), weight.float().requires_grad_()
        exact = contenders.stock_norm(*wide)
        gradients = torch.autograd.grad(exact, wide, grad.float())
        for norm in contenders.norms(direct=plan.device != "cuda"):
            forward, backward = partial(_forward, norm.forward, x, weight), partial(_backward, norm, grad, x, weight)
            # bfloat16 rounds twice forward, and the weight's gradient sums a rounded factor: 2^-6 of the largest.
            for kind, made, wanted in (
                ("forward", forward, exact.detach()),
                ("graph", forward, exact.detach()),
                ("backward", backward, gradients),
            ):
                row = Row(kind, width, norm.name, 2 * x.numel() * (3 if kind == "backward" else 2))
                yield Case(row, made, wanted, 2**-6, kind == "graph")
        torch._dynamo.reset()


def mlp_cases(plan: Plan) -> Iterator[Case]:
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
            with torch.no_grad():
                exact = contenders.stock_mlp(*(t.float() for t in (x, weight, gate, up, down)))
            calls = {
                OURS: partial(_forward, contenders.our_mlp, x, weight, gate_up, down),
                "composed": partial(_forward, contenders.composed_mlp, x, weight, gate_up, down),
                "stock": partial(_forward, contenders.stock_mlp, x, weight, gate, up, down),
            }
            for contender, made in calls.items():
                for graph in (False, True) if plan.device == "cuda" else (False,):
                    row = Row(f"mlp {name}{' graph' if graph else ''}", count, contender, 2 * exact.shape[-1])
                    # Six roundings to bfloat16, each of half of 2^-8, amplified by a sum: 2^-5 of the largest.
                    yield Case(row, made, exact, 2**-5, graph)
