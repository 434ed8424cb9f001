"""`rms_norm_mlp` on CUDA: the norm and the activation in Triton around cuBLAS's products; for few rows the norm, if
there is one, both products and the activation in one Triton kernel, since then all the time goes into reading the
weights once."""

# Device functions: Triton reads no annotations but constexpr, and names its constants in capitals.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from ...dispatch import register_kernel
from .. import triton_launch as host
from ..gated_activation.triton import gated_activation
from ..rms_norm.operator import result_dtype
from ..rms_norm.triton import rms_norm, scaled
from ..triton_parts import activate, column_offsets, reciprocal_rms, row_offsets
from . import CONTRACT

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Up to so many rows one kernel normalises, multiplies and activates: they are one side of a tensor core's product.
FEW_ROWS = 8
# A program's outputs, by the number of all: each multiprocessor gets several programs. And its step along the width.
_WIDE, _WIDE_OUTPUTS, _OUTPUTS, _DEPTH = 8192, 32, 16, 128


@triton.jit
def rows_rstd(
    x_rows, there, width, stride_column, eps, UNIT: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """1 / rms of each row of x, [ROWS, 1]."""
    squares = tl.zeros([ROWS, DEPTH], tl.float32)
    for begin in range(0, width, DEPTH):
        column = begin + tl.arange(0, DEPTH)
        mask = there[:, None] & (column < width)[None, :]
        x = tl.load(x_rows + column_offsets(column, stride_column, UNIT)[None, :], mask=mask, other=0.0)
        squares += x.to(tl.float32) * x.to(tl.float32)
    rstd, _ = reciprocal_rms(tl.sum(squares, axis=1), width, eps)
    return rstd[:, None]


@triton.jit
def normed_gate_up(
    x_ptr, norm_weight_ptr, gate_up_ptr, bias_ptr, out_ptr, rows, width, size, middle, inner,
    stride_outer, stride_middle, stride_inner, stride_column, stride_norm_weight, stride_gate_up, stride_bias, eps,
    FLAVOUR: tl.constexpr, ACTIVATION: tl.constexpr, NORMED: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """[OUTPUTS] elements of act(gate) * up for all rows. Each program makes 1 / rms anew: x is small and cached."""
    row = tl.arange(0, ROWS)
    there = row < rows
    x_rows = x_ptr + row_offsets(row, middle, inner, stride_outer, stride_middle, stride_inner)[:, None]
    if FLAVOUR != "none":
        rstd = rows_rstd(x_rows, there, width, stride_column, eps, UNIT, ROWS, DEPTH)

    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = output < size
    gate_rows = gate_up_ptr + output.to(tl.int64)[:, None] * stride_gate_up
    up_rows = gate_up_ptr + (size + output).to(tl.int64)[:, None] * stride_gate_up
    gate = tl.zeros([OUTPUTS, ROWS], tl.float32)
    up = tl.zeros([OUTPUTS, ROWS], tl.float32)
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    for begin in range(0, width, DEPTH):
        column = begin + tl.arange(0, DEPTH)
        inside = column < width
        mask = there[:, None] & inside[None, :]
        x = tl.load(x_rows + column_offsets(column, stride_column, UNIT)[None, :], mask=mask, other=0.0)
        normed = x
        if FLAVOUR != "none":
            normed = tl.where(mask, x.to(tl.float32) * rstd, 0.0)
            if norm_weight_ptr is not None:
                place = column.to(tl.int64) * stride_norm_weight
                scale = tl.load(norm_weight_ptr + place, mask=inside, other=0.0).to(tl.float32)
                normed = scaled(normed, scale[None, :], x_ptr.dtype.element_ty, FLAVOUR)
        normed = tl.trans(normed.to(NORMED).to(dtype))
        weights = known[:, None] & inside[None, :]
        gate = tl.dot(tl.load(gate_rows + column[None, :], mask=weights, other=0.0), normed, gate)
        up = tl.dot(tl.load(up_rows + column[None, :], mask=weights, other=0.0), normed, up)
    if bias_ptr is not None:
        place = output.to(tl.int64) * stride_bias
        gate += tl.load(bias_ptr + place, mask=known, other=0.0).to(tl.float32)[:, None]
        place = (size + output).to(tl.int64) * stride_bias
        up += tl.load(bias_ptr + place, mask=known, other=0.0).to(tl.float32)[:, None]
    active = activate(gate.to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
    out = out_ptr + row.to(tl.int64)[None, :] * size + output[:, None]
    tl.store(out, (active * up.to(dtype).to(tl.float32)).to(dtype), mask=known[:, None] & there[None, :])


def _is_few(x: torch.Tensor, gate_up: torch.Tensor) -> bool:
    rows = x.numel() // x.shape[-1]
    return (
        0 < rows <= FEW_ROWS
        and x.dtype in host.DTYPES
        and gate_up.dtype in (torch.bfloat16, torch.float16)
        and gate_up.stride(1) == 1
    )


def _normed_gate_up(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    gate_up: torch.Tensor,
    eps: float,
    flavour: str,
    activation: str,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    width, size = x.shape[-1], gate_up.shape[0] // 2
    out = torch.empty((*x.shape[:-1], size), dtype=gate_up.dtype, device=x.device)
    normed = result_dtype(x.dtype, None if norm_weight is None else norm_weight.dtype, flavour)
    lines = host.rows_of(x)
    outputs = _WIDE_OUTPUTS if size >= _WIDE else _OUTPUTS
    host.launch(
        normed_gate_up, (host.blocks(size, outputs),), x.device,
        lines.tensors[0], norm_weight, gate_up, bias, out, lines.number, width, size, lines.middle, lines.inner,
        *lines.strides[0], 0 if norm_weight is None else norm_weight.stride(0), gate_up.stride(0),
        0 if bias is None else bias.stride(0), eps,
        FLAVOUR=flavour, ACTIVATION=activation, NORMED=_DTYPES[normed], UNIT=lines.strides[0].column == 1,
        ROWS=FEW_ROWS, OUTPUTS=outputs, DEPTH=_DEPTH, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


@register_kernel(
    name="cuda.triton.rms_norm_mlp",
    contract=CONTRACT,
    device="cuda",
    execution_modes=("eager", "compile", "cudagraph"),
    input_domain="all that the operation takes: up to 8 rows with bfloat16 or float16 projections whose rows lie in "
    "one piece in two launches; the rest composed of rms_norm, gated_activation and PyTorch's products",
    solution="triton",
    priority=10,
)
def rms_norm_mlp(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    eps: float,
    flavour: str,
    activation: str,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> torch.Tensor:
    """See the operation. gate and up are one product of double width."""
    if _is_few(x, gate_up):
        product = _normed_gate_up(x, norm_weight, gate_up, eps, flavour, activation, gate_up_bias)
    else:
        normed = (x if flavour == "none" else rms_norm(x, norm_weight, eps, flavour)).to(gate_up.dtype)
        product = gated_activation(functional.linear(normed, gate_up, gate_up_bias), activation)
    return functional.linear(product, down, down_bias).contiguous()
