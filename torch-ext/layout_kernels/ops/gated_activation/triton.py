"""`gated_activation` on CUDA, in Triton: forward and backward, one pass over the elements."""

# Device functions: Triton reads no annotations but constexpr, and names its constants in capitals.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...dispatch import register_kernel
from .. import triton_launch as host
from ..triton_parts import activate, column_offsets, row_offsets, slope
from . import BACKWARD_CONTRACT, CONTRACT, reference

_DOMAIN = "float32, bfloat16 and float16, any strides (rows that do not lie in three dimensions are copied), up to "
_DOMAIN += "2^31 rows; float64 is handed to the reference"
_MODES = ("eager", "compile", "cudagraph")

# Elements of a tile of the result, and its widest block: 8 elements a thread, from each of two or three tensors.
_TILE, _COLUMNS, _WARPS = 1024, 1024, 4


def tiles(size: int) -> tuple[int, int]:
    """Rows and columns of a program's tile of the result, for rows of `size` elements."""
    columns = min(_COLUMNS, host.power_of_two(size))
    return _TILE // columns, columns


@triton.jit
def forward(
    gate_up_ptr, out_ptr, rows, size, middle, inner, across,
    stride_outer, stride_middle, stride_inner, stride_column,
    ACTIVATION: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of the result, [ROWS, COLUMNS]; `across` tiles lie side by side."""
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < size)[None, :]
    start = row_offsets(row, middle, inner, stride_outer, stride_middle, stride_inner)[:, None]
    gate_tile = gate_up_ptr + start + column_offsets(column, stride_column, UNIT)[None, :]
    up_tile = gate_up_ptr + start + column_offsets(size + column, stride_column, UNIT)[None, :]
    gate = tl.load(gate_tile, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_tile, mask=mask, other=0.0).to(tl.float32)
    dtype = gate_up_ptr.dtype.element_ty
    out = activate(gate, ACTIVATION).to(dtype).to(tl.float32) * up
    tl.store(out_ptr + row.to(tl.int64)[:, None] * size + column[None, :], out.to(dtype), mask=mask)


@triton.jit
def backward(
    grad_ptr, gate_up_ptr, out_ptr, rows, size, middle, inner, across,
    grad_middle_size, grad_inner_size, grad_outer, grad_middle, grad_inner, grad_column,
    stride_outer, stride_middle, stride_inner, stride_column,
    ACTIVATION: tl.constexpr, GRAD_UNIT: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of both halves of the gradient, [ROWS, COLUMNS] each; the activation is made anew."""
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < size)[None, :]
    start = row_offsets(row, middle, inner, stride_outer, stride_middle, stride_inner)[:, None]
    gate_tile = gate_up_ptr + start + column_offsets(column, stride_column, UNIT)[None, :]
    up_tile = gate_up_ptr + start + column_offsets(size + column, stride_column, UNIT)[None, :]
    grad_start = row_offsets(row, grad_middle_size, grad_inner_size, grad_outer, grad_middle, grad_inner)[:, None]
    grad_tile = grad_ptr + grad_start + column_offsets(column, grad_column, GRAD_UNIT)[None, :]
    gate = tl.load(gate_tile, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_tile, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_tile, mask=mask, other=0.0).to(tl.float32)
    dtype = gate_up_ptr.dtype.element_ty
    grad_gate = grad * up * slope(gate, ACTIVATION)
    grad_up = grad * activate(gate, ACTIVATION).to(dtype).to(tl.float32)
    out = out_ptr + row.to(tl.int64)[:, None] * (2 * size) + column[None, :]
    tl.store(out, grad_gate.to(dtype), mask=mask)
    tl.store(out + size, grad_up.to(dtype), mask=mask)


@register_kernel(
    name="cuda.triton.gated_activation",
    contract=CONTRACT,
    device="cuda",
    execution_modes=_MODES,
    input_domain=_DOMAIN,
    solution="triton",
    priority=10,
)
def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """See the operation. Reads gate_up once and writes the result once."""
    if gate_up.dtype not in host.DTYPES:
        return reference.gated_activation(gate_up, activation)
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    lines = host.rows_of(gate_up)
    rows, columns = tiles(size)
    across = host.blocks(size, columns)
    host.launch(
        forward, (host.grid_of(host.blocks(lines.number, rows) * across),), gate_up.device,
        lines.tensors[0], out, lines.number, size, lines.middle, lines.inner, across, *lines.strides[0],
        ACTIVATION=activation, UNIT=lines.strides[0].column == 1, ROWS=rows, COLUMNS=columns, num_warps=_WARPS,
    )  # fmt: skip
    return out


@register_kernel(
    name="cuda.triton.gated_activation_backward",
    contract=BACKWARD_CONTRACT,
    device="cuda",
    execution_modes=_MODES,
    input_domain=_DOMAIN + ", and so is a float64 gradient",
    solution="triton",
    priority=10,
)
def gated_activation_backward(grad: torch.Tensor, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """See the operation. Reads both tensors once and writes the gradient once."""
    if gate_up.dtype not in host.DTYPES or grad.dtype not in host.DTYPES:
        return reference.gated_activation_backward(grad, gate_up, activation)
    out = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    size = gate_up.shape[-1] // 2
    lines, grads = host.rows_of(gate_up), host.rows_of(grad)
    rows, columns = tiles(size)
    across = host.blocks(size, columns)
    host.launch(
        backward, (host.grid_of(host.blocks(lines.number, rows) * across),), gate_up.device,
        grads.tensors[0], lines.tensors[0], out, lines.number, size, lines.middle, lines.inner, across,
        grads.middle, grads.inner, *grads.strides[0], *lines.strides[0],
        ACTIVATION=activation, GRAD_UNIT=grads.strides[0].column == 1, UNIT=lines.strides[0].column == 1,
        ROWS=rows, COLUMNS=columns, num_warps=_WARPS,
    )  # fmt: skip
    return out
