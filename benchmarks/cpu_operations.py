"""The CPU benchmark's rows of rms_norm, forward and backward, and of rms_norm_mlp with a profile where not met."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import layout_kernels
from benchmarks.cpu_row import EQUAL, MET, NEAR, Row, bound, geometric_mean
from layout_kernels.benchmark.limits import READ, Limit, Limits
from layout_kernels.benchmark.proof import WrongResultError, right_ones
from layout_kernels.benchmark.timers import processor_clock, seconds_of
from layout_kernels.benchmark.turns import shortest

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHAPES = ((1, 576), (128, 576), (4096, 1024), (4096, 4096), (16384, 128))
QUICK_SHAPES = ((1, 576), (4096, 1024))
LARGEST = "4096x4096"
MLPS = ((576, 1536), (1024, 3072), (2048, 8192))
# Rows of x, and the speed over stock that the fused MLP must have.
TARGETS = {1: 2.5, 4: 3.0, 8: 3.0, 32: 4.0, 128: 5.0, 512: 5.0}
Calls = dict[str, Callable[[], Any]]


def measured(case: str, calls: Calls, seconds: float) -> dict[str, float]:
    """The shortest time of each call whose result is stock's, in microseconds.

    Raises:
        WrongResultError: ours is wrong.
    """
    right, once = right_ones(case, calls, ours="ours", unchecked=("clone", READ))
    return {name: time * 1e6 for name, time in shortest(right, once, seconds).items()}


def compiled(function: Any, *, dynamic: bool) -> Any:
    """torch.compile of stock, made anew: nothing that was compiled for another shape or thread count is taken."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    inductor_config.fx_graph_cache = False
    functorch_config.enable_autograd_cache = False
    # A backward is timed more than once.
    functorch_config.donated_buffer = False
    torch._dynamo.reset()
    return torch.compile(function, dynamic=dynamic)


def norm_rows(machine: str, options: argparse.Namespace, names: list[str]) -> Iterator[Row]:
    """Every shape in every dtype, the backward, and the geometric mean in bf16."""
    for name in names:
        forward = []
        for shape, x in _inputs(DTYPES[name], options.quick).items():
            forward.append(_forward_row(Row.of(machine, f"rms_norm {shape}", name), options, x))
            yield forward[-1]
        if name == "bf16":
            yield geometric_mean(forward)
        yield _backward_row(Row.of(machine, "rms_norm backward 4096x1024", name), options, DTYPES[name])


def _inputs(dtype: torch.dtype, quick: bool) -> dict[str, torch.Tensor]:
    shapes = QUICK_SHAPES if quick else SHAPES
    inputs = {f"{rows}x{width}": torch.randn(rows, width).to(dtype) for rows, width in shapes}
    # What q_norm sees: heads of a product that also holds keys and values.
    product = torch.randn(1, 512, 15 * 64).to(dtype)
    return inputs | {"q_norm view 512x9x64": product[..., : 9 * 64].view(1, 512, 9, 64)}


def _stock_norm(width: int, dtype: torch.dtype) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(width).to(dtype)
    torch.nn.init.normal_(norm.weight, 1.0, 0.1)
    return norm


def _norms(stock: LlamaRMSNorm, options: argparse.Namespace) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    weight, eps = stock.weight, stock.variance_epsilon
    found = {
        "stock": stock,
        "ours": lambda x: layout_kernels.rms_norm(x, weight, eps),
        "F": lambda x: functional.rms_norm(x, x.shape[-1:], weight, eps),
    }
    return found | {"compile": compiled(stock, dynamic=False)} if options.compile else found


def _forward_row(row: Row, options: argparse.Namespace, x: torch.Tensor) -> Row:
    with torch.inference_mode():
        calls: Calls = {
            name: partial(norm, x) for name, norm in _norms(_stock_norm(x.shape[-1], x.dtype), options).items()
        }
        if options.compile:
            calls["compile"]()
        try:
            found = measured(f"{row.case} {row.dtype}", calls | {"clone": x.clone}, options.seconds)
        except WrongResultError as error:
            return replace(row, target="best of the others", failure=str(error))
    return forward_row(row, found, x.nbytes)


def forward_row(row: Row, found: dict[str, float], nbytes: int) -> Row:
    """The row of a norm's times: not behind the best of the others, at the largest shape 1.5 copies at most."""
    required = min(time for key, time in found.items() if key not in ("ours", "clone")) / EQUAL
    target = "best of the others"
    if row.case.endswith(LARGEST):
        required, target = min(required, 1.5 * found["clone"]), f"{target}, 1.5 clone"
    return row.timed(found, required, target, limit="x.clone()", limit_us=found["clone"], work=2 * nbytes)


def _backward_row(row: Row, options: argparse.Namespace, dtype: torch.dtype) -> Row:
    x, grad = (torch.randn(4096, 1024).to(dtype) for _ in range(2))
    stock = _stock_norm(1024, dtype)
    inputs = x.requires_grad_(), stock.weight
    calls: Calls = {
        name: partial(torch.autograd.grad, norm(x), inputs, grad, retain_graph=True)
        for name, norm in _norms(stock, options).items()
    }
    if options.compile:
        calls["compile"]()
    row = replace(row, wanted=2.0)
    try:
        found = measured(f"{row.case} {row.dtype}", calls | {"clone": x.detach().clone}, options.seconds)
    except WrongResultError as error:
        return replace(row, target="2 stock", failure=str(error))
    # Two tensors are read and one is written, where a copy reads one and writes one.
    limit = {"limit": "x.clone()", "limit_us": 1.5 * found["clone"], "work": 3 * x.nbytes}
    return row.timed(found, found["stock"] / 2, "2 stock", **limit)


@dataclass(frozen=True)
class Layer:
    """Stock's norm and MLP, with the packed weight that ours takes and stock compiled, or None."""

    norm: Any
    mlp: Any
    gate_up: torch.Tensor
    fast: Callable[[torch.Tensor], torch.Tensor] | None

    def calls(self, x: torch.Tensor) -> Calls:
        """Stock, ours and the others on one input."""
        norm, mlp, eps = self.norm, self.mlp, self.norm.variance_epsilon
        gate, up, down = (part.weight for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))

        def composed() -> torch.Tensor:
            h = functional.rms_norm(x, x.shape[-1:], norm.weight, eps)
            product = functional.silu(functional.linear(h, gate)) * functional.linear(h, up)
            return functional.linear(product, down)

        calls: Calls = {
            "stock": lambda: mlp(norm(x)),
            "ours": lambda: layout_kernels.rms_norm_mlp(x, norm.weight, self.gate_up, down, eps),
            "F": composed,
        }
        return calls if self.fast is None else {**calls, "compile": partial(self.fast, x)}

    def parts(self, x: torch.Tensor) -> Calls:
        """The steps of ours, each as an operation of its own."""
        normed = layout_kernels.rms_norm(x, self.norm.weight, self.norm.variance_epsilon)
        both = layout_kernels.linear(normed, self.gate_up)
        product = layout_kernels.gated_activation(both)
        return {
            "norm": lambda: layout_kernels.rms_norm(x, self.norm.weight, self.norm.variance_epsilon),
            "gate_up": lambda: layout_kernels.linear(normed, self.gate_up),
            "activation": lambda: layout_kernels.gated_activation(both),
            "down": lambda: layout_kernels.linear(product, self.mlp.down_proj.weight),
        }


def mlp_rows(
    machine: str, options: argparse.Namespace, names: list[str], has_bf16: bool, limits: Limits
) -> Iterator[Row]:
    """Every size and number of rows in every dtype."""
    for name in names:
        for hidden, size in MLPS[:1] if options.quick else MLPS:
            layer = _layer(hidden, size, DTYPES[name], options.compile)
            for rows in (1, 32) if options.quick else TARGETS:
                x = torch.randn(rows, hidden).to(DTYPES[name])
                # Where PyTorch has an instruction for the dtype, as on every machine in fp32, only "never slower".
                wanted = 1.0 if name == "fp32" or (has_bf16 and name == "bf16") else TARGETS[rows]
                row = replace(Row.of(machine, f"rms_norm_mlp {hidden}/{size} rows {rows}", name), wanted=wanted)
                with torch.inference_mode():
                    yield _mlp_row(row, options.seconds, layer, x, limits)


def _layer(hidden: int, size: int, dtype: torch.dtype, compile_stock: bool) -> Layer:
    mlp = LlamaMLP(LlamaConfig(hidden_size=hidden, intermediate_size=size)).to(dtype)
    norm = _stock_norm(hidden, dtype)
    gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).detach()
    if not compile_stock:
        return Layer(norm, mlp, gate_up, None)
    fast = compiled(lambda x: mlp(norm(x)), dynamic=True)
    with torch.inference_mode():
        for rows in (4, 1):  # one row is always compiled on its own
            fast(torch.randn(rows, hidden).to(dtype))
    return Layer(norm, mlp, gate_up, fast)


def _mlp_row(row: Row, seconds: float, layer: Layer, x: torch.Tensor, limits: Limits) -> Row:
    case, weights = f"{row.case} {row.dtype}", layer.gate_up.nbytes + layer.mlp.down_proj.weight.nbytes
    size, hidden = layer.mlp.gate_proj.weight.shape
    sizes = x.shape[0], hidden, size, x.element_size()
    try:
        found, limit = limits.around(lambda read: measured(case, {**layer.calls(x), **read}, seconds), weights)
    except WrongResultError as error:
        return replace(row, target=f"{row.wanted:g} stock", failure=str(error))
    row = mlp_row(row, found, sizes, limit)
    if row.verdict == MET:
        return row
    parts, now = layer.parts(x), processor_clock()
    once = {name: max(1e-7, seconds_of(part, now)) for name, part in parts.items()}
    return replace(row, profile=profile_of(shortest(parts, once, seconds / 2), sizes, limit))


def mlp_row(row: Row, found: dict[str, float], sizes: tuple[int, int, int, int], limit: Limit) -> Row:
    """The row of an MLP's times; `sizes` are rows, width, intermediate size and bytes of an element."""
    rows, hidden, size, element = sizes
    nbytes, operations, wanted = 3 * hidden * size * element, 2 * 3 * hidden * size * rows, row.wanted or 1.0
    required, target = found["stock"] / (wanted if wanted > 1 else EQUAL), f"{wanted:g} stock"
    if wanted > 1 and (rows == 1 or rows >= 128):
        # One row reads the weights at the memory's speed, many multiply at that of fp32 products.
        name, asked = "read bandwidth", nbytes / limit.bandwidth
        if rows > 1:
            name, asked = "fp32 rate", operations / limit.rate
        required, target = min(required, asked * 1e6 / NEAR), f"{target}, {NEAR} of {name}"
    return row.timed(found, required, target, **bound(limit, nbytes, operations))


def profile_of(parts: dict[str, float], sizes: tuple[int, int, int, int], limit: Limit) -> str:
    """Each part's time, from seconds, its rate and the share of the measured limit; `sizes` as in `mlp_row`."""
    rows, hidden, size, element = sizes
    work = {  # bytes and operations
        "norm": (2 * rows * hidden * element, 0),
        "gate_up": (2 * hidden * size * element, 2 * 2 * hidden * size * rows),
        "activation": (3 * rows * size * element, 0),
        "down": (hidden * size * element, 2 * hidden * size * rows),
    }
    texts = []
    for name, time in parts.items():
        what, least, amount = limit.of(*work[name])
        rate = f"{amount / time / 1e9:.1f} {'GB/s' if what == 'bytes' else 'GFLOP/s'}"
        texts.append(f"{name} {time * 1e6:.1f} us at {rate} ({least / time:.2f} of {what})")
    return "; ".join(texts)
