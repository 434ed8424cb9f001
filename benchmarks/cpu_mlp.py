"""The benchmark's rows of rms_norm_mlp, with a profile of each that does not meet its target."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import layout_kernels
from benchmarks.cpu_norms import DTYPES
from benchmarks.cpu_row import EQUAL, MET, NEAR, Row
from benchmarks.cpu_timing import Calls, Limit, Limits, WrongResultError, clock, compiled, measured, shortest

SIZES = ((576, 1536), (1024, 3072), (2048, 8192))
ROWS = (1, 4, 8, 32, 128, 512)
# Speed over stock that the fused MLP must have, by rows.
TARGETS = {1: 2.5, 4: 3.0, 8: 3.0, 32: 4.0, 128: 5.0, 512: 5.0}


@dataclass(frozen=True)
class Layer:
    """Stock's norm and MLP, with the packed weight that ours takes and stock compiled, or None."""

    norm: Any
    mlp: Any
    gate_up: torch.Tensor
    fast: Callable[[torch.Tensor], torch.Tensor] | None

    def calls(self, x: torch.Tensor) -> Calls:
        """Ours and the others on one input."""
        norm, mlp, eps = self.norm, self.mlp, self.norm.variance_epsilon
        gate, up, down = (part.weight for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        gate_up, fast = self.gate_up, self.fast

        def composed() -> torch.Tensor:
            h = functional.rms_norm(x, x.shape[-1:], norm.weight, eps)
            product = functional.silu(functional.linear(h, gate)) * functional.linear(h, up)
            return functional.linear(product, down)

        calls: Calls = {
            "ours": lambda: layout_kernels.rms_norm_mlp(x, norm.weight, gate_up, down, eps),
            "stock": lambda: mlp(norm(x)),
            "F": composed,
        }
        return calls if fast is None else {**calls, "compile": lambda: fast(x)}

    def parts(self, x: torch.Tensor) -> Calls:
        """The steps of ours, each as an operation of its own."""
        weight, down = self.norm.weight, self.mlp.down_proj.weight
        normed = layout_kernels.rms_norm(x, weight, self.norm.variance_epsilon)
        both = layout_kernels.linear(normed, self.gate_up)
        product = layout_kernels.gated_activation(both)
        return {
            "norm": lambda: layout_kernels.rms_norm(x, weight, self.norm.variance_epsilon),
            "gate_up": lambda: layout_kernels.linear(normed, self.gate_up),
            "activation": lambda: layout_kernels.gated_activation(both),
            "down": lambda: layout_kernels.linear(product, down),
        }


def mlp_rows(
    machine: str, options: argparse.Namespace, names: list[str], has_bf16: bool, limits: Limits
) -> Iterator[Row]:
    """Every size and number of rows in every dtype."""
    for name in names:
        for hidden, size in SIZES[:1] if options.quick else SIZES:
            layer = _layer(hidden, size, DTYPES[name], options.compile)
            for rows in (1, 32) if options.quick else ROWS:
                x = torch.randn(rows, hidden).to(DTYPES[name])
                case = f"rms_norm_mlp {hidden}/{size} rows {rows}"
                what = {"machine": machine, "threads": torch.get_num_threads(), "case": case, "dtype": name}
                # Where PyTorch has an instruction for the dtype, as on every machine in fp32, only "never slower".
                wanted = 1.0 if name == "fp32" or (has_bf16 and name == "bf16") else TARGETS[rows]
                with torch.inference_mode():
                    yield _row(what, options.seconds, layer, x, wanted, limits)


def _layer(hidden: int, size: int, dtype: torch.dtype, compile_stock: bool) -> Layer:
    mlp = LlamaMLP(LlamaConfig(hidden_size=hidden, intermediate_size=size)).to(dtype)
    norm = LlamaRMSNorm(hidden).to(dtype)
    torch.nn.init.normal_(norm.weight, 1.0, 0.1)
    gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).detach()
    if not compile_stock:
        return Layer(norm, mlp, gate_up, None)
    fast = compiled(lambda x: mlp(norm(x)), dynamic=True)
    with torch.inference_mode():
        for rows in (4, 1):  # one row is always compiled on its own
            fast(torch.randn(rows, hidden).to(dtype))
    return Layer(norm, mlp, gate_up, fast)


def _row(what: dict[str, Any], seconds: float, layer: Layer, x: torch.Tensor, wanted: float, limits: Limits) -> Row:
    case = f"{what['case']} {what['dtype']}"
    try:
        weights = layer.gate_up.nbytes + layer.mlp.down_proj.weight.nbytes
        found, limit = limits.around(lambda read: measured(case, layer.calls(x) | read, seconds), weights)
    except WrongResultError as error:
        return Row(**what, target=f"{wanted:g} stock", wanted=wanted, failure=str(error))
    size, hidden = layer.mlp.gate_proj.weight.shape
    row = row_of(what, found, (x.shape[0], hidden, size, x.element_size()), wanted, limit)
    return row if row.verdict == MET else replace(row, profile=_profile(layer, x, limit, seconds / 2))


def row_of(
    what: dict[str, Any], found: dict[str, float], sizes: tuple[int, int, int, int], wanted: float, limit: Limit
) -> Row:
    """The row of an MLP's times; `sizes` are rows, width, intermediate size and bytes of an element."""
    rows, hidden, size, element = sizes
    bound = limit.of(3 * hidden * size * element, 2 * 3 * hidden * size * rows)
    required = found["stock"] / (wanted if wanted > 1 else EQUAL)
    target = f"{wanted:g} stock"
    if wanted > 1 and (rows == 1 or rows >= 128):
        # One row reads the weights at the memory's speed, many multiply at that of fp32 products.
        name, asked = "read bandwidth", 3 * hidden * size * element / limit.bandwidth
        if rows > 1:
            name, asked = "fp32 rate", 2 * 3 * hidden * size * rows / limit.rate
        required, target = min(required, asked / NEAR), f"{target}, {NEAR} of {name}"
    times: dict[str, Any] = {"stock": found["stock"], "functional": found.get("F"), "compiled": found.get("compile")}
    return Row(**what, **times, ours=found["ours"], required=required, target=target, wanted=wanted, **bound)


def _profile(layer: Layer, x: torch.Tensor, limit: Limit, seconds: float) -> str:
    now, once, calls = clock(), {}, layer.parts(x)
    for name, call in calls.items():
        start = now()
        call()
        once[name] = max(now() - start, 1e-7)
    size, hidden = layer.mlp.gate_proj.weight.shape
    return profile_of(shortest(calls, once, seconds), (x.shape[0], hidden, size, x.element_size()), limit)


def profile_of(parts: dict[str, float], sizes: tuple[int, int, int, int], limit: Limit) -> str:
    """Each part's time, its rate and the share of the measured limit; `sizes` as in `row_of`."""
    rows, hidden, size, element = sizes
    work = {  # bytes and operations
        "norm": (2 * rows * hidden * element, 0),
        "gate_up": (2 * hidden * size * element, 2 * 2 * hidden * size * rows),
        "activation": (3 * rows * size * element, 0),
        "down": (hidden * size * element, 2 * hidden * size * rows),
    }
    texts = []
    for name, time in parts.items():
        bound = limit.of(*work[name])
        unit = "GB/s" if bound["limit"] == "bytes" else "GFLOP/s"
        rate, share = bound["work"] / time / 1e3, bound["limit_us"] / time
        texts.append(f"{name} {time:.1f} us at {rate:.1f} {unit} ({share:.2f} of {bound['limit']})")
    return "; ".join(texts)
