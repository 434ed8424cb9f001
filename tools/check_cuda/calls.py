"""The calls that are checked: each operation at each width where its kernels or their configuration change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# A width of each power of two that has a configuration of its own, widths between, and those of loops.
WIDTHS = (1, 100, 128, 256, 576, 1024, 2048, 3584, 4096, 5120, 8192, 12288, 16384, 20000, 32768, 65536, 262144)
GATED_WIDTHS = (64, 128, 1024, 2048, 4096, 8192, 16384)
ACTIVATION_SIZES = (37, 128, 1024, 14336)
MLPS = ((576, 1536), (1024, 3072), (4096, 14336))
# Up to here nothing may spill and every tensor crosses the bus once.
STRICT_WIDTH = 16384

Make = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Call:
    """A call of an implementation.

    Attributes:
        name: of the operation, with what is special about the call.
        dtype: of its tensors, a key of `DTYPES`.
        width: of its rows.
        run: makes the tensors with a function `make(*shape)` and returns them by name, and what they give.
    """

    name: str
    dtype: str
    width: int
    run: Callable[[Make, int], tuple[dict[str, torch.Tensor], Callable[[], Any]]]


def calls() -> Iterator[Call]:
    """All of them."""
    for dtype in ("bf16", "fp32"):
        for width in WIDTHS:
            yield from _norms(dtype, width, "cast_then_scale")
        for width in GATED_WIDTHS:
            yield from _gated(dtype, width)
        for size in ACTIVATION_SIZES:
            for activation in ("silu", "gelu", "gelu_tanh"):
                yield from _activations(dtype, size, activation)
    for flavour in ("scale_then_cast", "one_plus_scale"):
        for width in (100, 4096):
            yield from _norms("bf16", width, flavour)
    yield from _norms("fp16", 4096, "cast_then_scale")
    for width, size in MLPS:
        for dtype in ("bf16", "fp16"):
            yield from _mlp(dtype, width, size, "cast_then_scale")
            yield from _mlp(dtype, width, size, "none")


def _norms(dtype: str, width: int, flavour: str) -> Iterator[Call]:
    from layout_kernels.ops.rms_norm import triton as kernels

    def forward(make: Make, rows: int) -> tuple[dict[str, torch.Tensor], Callable[[], Any]]:
        x, weight = make(rows, width), make(width)
        return {"x": x}, lambda: kernels.rms_norm(x, weight, 1e-6, flavour)

    def backward(need_x: bool, need_weight: bool) -> Callable[[Make, int], Any]:
        def run(make: Make, rows: int) -> tuple[dict[str, torch.Tensor], Callable[[], Any]]:
            grad, x, weight = make(rows, width), make(rows, width), make(width)
            call = (grad, x, weight, 1e-6, flavour, need_x, need_weight)
            return {"grad": grad, "x": x}, lambda: kernels.rms_norm_backward(*call)

        return run

    yield Call(f"rms_norm {flavour}", dtype, width, forward)
    yield Call(f"rms_norm_backward {flavour}", dtype, width, backward(True, True))
    yield Call(f"rms_norm_backward {flavour}, x only", dtype, width, backward(True, False))


def _gated(dtype: str, width: int) -> Iterator[Call]:
    from layout_kernels.ops.gated_rms_norm import triton as kernels

    widest = kernels.WIDEST_BACKWARD[DTYPES[dtype].itemsize]
    for order in ("gate_then_norm", "norm_then_gate"):
        settings = 1e-6, "cast_then_scale", order, None, "silu"

        def forward(
            make: Make, rows: int, settings: tuple[Any, ...] = settings
        ) -> tuple[dict[str, torch.Tensor], Callable[[], Any]]:
            x, gate, weight = make(rows, width), make(rows, width), make(width)
            return {"x": x, "gate": gate}, lambda: kernels.gated_rms_norm(x, gate, weight, *settings)

        def backward(
            make: Make, rows: int, settings: tuple[Any, ...] = settings
        ) -> tuple[dict[str, torch.Tensor], Callable[[], Any]]:
            grad, x, gate, weight = make(rows, width), make(rows, width), make(rows, width), make(width)
            call = (grad, x, gate, weight, *settings, True, True, True)
            return {"grad": grad, "x": x, "gate": gate}, lambda: kernels.gated_rms_norm_backward(*call)

        yield Call(f"gated_rms_norm {order}", dtype, width, forward)
        if width <= widest:
            yield Call(f"gated_rms_norm_backward {order}", dtype, width, backward)


def _activations(dtype: str, size: int, activation: str) -> Iterator[Call]:
    from layout_kernels.ops.gated_activation import triton as kernels

    def forward(make: Make, rows: int) -> tuple[dict[str, torch.Tensor], Callable[[], Any]]:
        gate_up = make(rows, 2 * size)
        return {"gate_up": gate_up}, lambda: kernels.gated_activation(gate_up, activation)

    def backward(make: Make, rows: int) -> tuple[dict[str, torch.Tensor], Callable[[], Any]]:
        grad, gate_up = make(rows, size), make(rows, 2 * size)
        return {"grad": grad, "gate_up": gate_up}, lambda: kernels.gated_activation_backward(grad, gate_up, activation)

    yield Call(f"gated_activation {activation}", dtype, size, forward)
    yield Call(f"gated_activation_backward {activation}", dtype, size, backward)


def _mlp(dtype: str, width: int, size: int, flavour: str) -> Iterator[Call]:
    from layout_kernels.ops.rms_norm_mlp import triton as kernels

    def forward(make: Make, rows: int) -> tuple[dict[str, torch.Tensor], Callable[[], Any]]:
        x, weight = make(min(rows, kernels.FEW_ROWS), width), None if flavour == "none" else make(width)
        gate_up, down = make(2 * size, width), make(1, size)
        settings = 1e-6, flavour, "silu", None, None
        return {"gate_up": gate_up}, lambda: kernels.rms_norm_mlp(x, weight, gate_up, down, *settings)

    alone = " alone" if flavour == "none" else ""
    yield Call(f"rms_norm_mlp{alone}, few rows, size {size}", dtype, width, forward)
