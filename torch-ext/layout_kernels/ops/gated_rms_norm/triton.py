"""`gated_rms_norm` on CUDA, in Triton: forward and backward. A program holds groups of rows in registers."""

# Device functions: Triton reads no annotations but constexpr, names its constants in capitals, and compiles what a
# constant excludes away.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803, C901

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...dispatch import register_kernel
from .. import triton_launch as host
from ..rms_norm.triton import reduce_partials
from ..triton_parts import activate, column_offsets, reciprocal_rms, row_offsets, slope
from . import BACKWARD_CONTRACT, CONTRACT, reference
from .operator import result_dtype

_DOMAIN = "float32, bfloat16 and float16 in any mixture, any strides (rows that do not lie in three dimensions are "
_DOMAIN += (
    "copied), up to 2^31 rows; handed to the reference: float64, and groups of more than 16384 elements (backward "
)
_DOMAIN += "8192, with a float32 tensor 4096)"
_MODES = ("eager", "compile", "cudagraph")
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Tiles(NamedTuple):
    """A program's rows at a time, its columns (a whole group) and warps."""

    rows: int
    columns: int
    warps: int


# Elements of a tile, as in rms_norm: 8 to 16 a thread, of each of two or three tensors; and the
# widest group that stays in registers, backward by the bytes of an element of the widest tensor.
_FORWARD_ELEMENTS = 2048
_BACKWARD_ELEMENTS = 1024
WIDEST_FORWARD = 16384
WIDEST_BACKWARD = {2: 8192, 4: 4096}


def forward_tiles(group: int) -> Tiles:
    """The tiles of the forward for groups of `group` elements."""
    columns = host.power_of_two(group)
    rows = max(1, _FORWARD_ELEMENTS // columns)
    return Tiles(rows, columns, min(16, max(4, rows * columns // 256)))


def backward_tiles(group: int) -> Tiles:
    """The tiles of the backward."""
    columns = host.power_of_two(group)
    rows = max(1, _BACKWARD_ELEMENTS // columns)
    # Six values of each element are alive at once: 8 warps leave 255 registers to a thread.
    return Tiles(rows, columns, 8 if columns == 8192 else min(16, max(4, rows * columns // 256)))


@triton.jit
def _scaled(
    normalised, scale, HAS_WEIGHT: tl.constexpr, FLAVOUR: tl.constexpr, DTYPE: tl.constexpr, WIDER: tl.constexpr
):
    """The scaled norm in float32: rounded to x's dtype before the scale, and to the wider of both dtypes after it."""
    if FLAVOUR == "cast_then_scale":
        normalised = normalised.to(DTYPE).to(tl.float32)
    if HAS_WEIGHT:
        normalised *= scale
        if FLAVOUR == "cast_then_scale":
            normalised = normalised.to(WIDER).to(tl.float32)
    return normalised


@triton.jit
def forward(
    x_ptr, gate_ptr, weight_ptr, out_ptr, rows, width, group_size, groups, middle, inner,
    x_outer, x_middle, x_inner, x_column, gate_outer, gate_middle, gate_inner, gate_column, stride_weight, eps,
    FLAVOUR: tl.constexpr, GATE_FIRST: tl.constexpr, ACTIVATION: tl.constexpr, WIDER: tl.constexpr,
    X_UNIT: tl.constexpr, GATE_UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of one group of several rows, [ROWS, COLUMNS]."""
    row = tl.program_id(0) // groups * ROWS + tl.arange(0, ROWS)
    inside = tl.arange(0, COLUMNS) < group_size
    column = tl.program_id(0) % groups * group_size + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & inside[None, :]
    x_tile = x_ptr + row_offsets(row, middle, inner, x_outer, x_middle, x_inner)[:, None]
    x_tile += column_offsets(column, x_column, X_UNIT)[None, :]
    gate_tile = gate_ptr + row_offsets(row, middle, inner, gate_outer, gate_middle, gate_inner)[:, None]
    gate_tile += column_offsets(column, gate_column, GATE_UNIT)[None, :]
    x = tl.load(x_tile, mask=mask, other=0.0).to(tl.float32)
    opened = activate(tl.load(gate_tile, mask=mask, other=0.0).to(tl.float32), ACTIVATION)
    if GATE_FIRST:
        x *= opened
    rstd, _ = reciprocal_rms(tl.sum(x * x, axis=1), group_size, eps)
    scale = x  # read where there is a weight only
    if weight_ptr is not None:
        scale = tl.load(weight_ptr + column.to(tl.int64) * stride_weight, mask=inside, other=0.0).to(tl.float32)[
            None, :
        ]
    out = _scaled(x * rstd[:, None], scale, weight_ptr is not None, FLAVOUR, x_ptr.dtype.element_ty, WIDER)
    if not GATE_FIRST:
        out *= opened
    out_tile = out_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out_tile, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward(
    grad_ptr, x_ptr, gate_ptr, weight_ptr, grad_x_ptr, grad_gate_ptr, partial_ptr,
    rows, width, group_size, groups, middle, inner,
    grad_outer, grad_middle, grad_inner, grad_column, x_outer, x_middle, x_inner, x_column,
    gate_outer, gate_middle, gate_inner, gate_column, stride_weight, eps,
    FLAVOUR: tl.constexpr, GATE_FIRST: tl.constexpr, ACTIVATION: tl.constexpr, WIDER: tl.constexpr,
    GRAD_UNIT: tl.constexpr, X_UNIT: tl.constexpr, GATE_UNIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One group of every n-th tile of rows, n programs for each group; a line of partial sums for each of the n."""
    group, slot = tl.program_id(0) % groups, tl.program_id(0) // groups
    inside = tl.arange(0, COLUMNS) < group_size
    column = group * group_size + tl.arange(0, COLUMNS)
    if partial_ptr is not None:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(slot, tl.cdiv(rows, ROWS), tl.num_programs(0) // groups):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        grad_tile = grad_ptr + row_offsets(row, middle, inner, grad_outer, grad_middle, grad_inner)[:, None]
        x_tile = x_ptr + row_offsets(row, middle, inner, x_outer, x_middle, x_inner)[:, None]
        gate_tile = gate_ptr + row_offsets(row, middle, inner, gate_outer, gate_middle, gate_inner)[:, None]
        grad = tl.load(grad_tile + column_offsets(column, grad_column, GRAD_UNIT)[None, :], mask=mask, other=0.0)
        x = tl.load(x_tile + column_offsets(column, x_column, X_UNIT)[None, :], mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_tile + column_offsets(column, gate_column, GATE_UNIT)[None, :], mask=mask, other=0.0)
        grad, gate = grad.to(tl.float32), gate.to(tl.float32)
        opened = activate(gate, ACTIVATION)
        normalised = x * opened if GATE_FIRST else x
        rstd, _ = reciprocal_rms(tl.sum(normalised * normalised, axis=1), group_size, eps)
        rstd = rstd[:, None]
        # Where rstd is infinite, a masked element would be NaN and spoil the sums.
        normalised = tl.where(mask, normalised * rstd, 0.0)
        out = row.to(tl.int64)[:, None] * width + column[None, :]
        scale = x  # read where there is a weight only
        if weight_ptr is not None:
            scale = tl.load(weight_ptr + column.to(tl.int64) * stride_weight, mask=inside, other=0.0)
            scale = scale.to(tl.float32)[None, :]
        if not GATE_FIRST:
            if grad_gate_ptr is not None:
                dtype: tl.constexpr = x_ptr.dtype.element_ty
                scaled = _scaled(normalised, scale, weight_ptr is not None, FLAVOUR, dtype, WIDER)
                grad_gate = grad * scaled * slope(gate, ACTIVATION)
                tl.store(grad_gate_ptr + out, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=mask)
            grad *= opened
        if partial_ptr is not None:
            if FLAVOUR == "cast_then_scale":
                total += grad * normalised.to(x_ptr.dtype.element_ty).to(tl.float32)
            else:
                total += grad * normalised
        if weight_ptr is not None:
            grad *= scale
        share = tl.sum(grad * normalised, axis=1)[:, None] / group_size
        grad = rstd * (grad - normalised * share)
        if GATE_FIRST:
            if grad_gate_ptr is not None:
                grad_gate = grad * x * slope(gate, ACTIVATION)
                tl.store(grad_gate_ptr + out, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=mask)
            grad *= opened
        if grad_x_ptr is not None:
            tl.store(grad_x_ptr + out, grad.to(grad_x_ptr.dtype.element_ty), mask=mask)
    if partial_ptr is not None:
        line = partial_ptr + slot.to(tl.int64) * width
        tl.store(line + column, tl.sum(total, axis=0), mask=inside)


def _wider(x: torch.Tensor, weight: torch.Tensor | None) -> tl.dtype:
    return _DTYPES[x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)]


@register_kernel(
    name="cuda.triton.gated_rms_norm",
    contract=CONTRACT,
    device="cuda",
    execution_modes=_MODES,
    input_domain=_DOMAIN,
    solution="triton",
    priority=10,
)
def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    flavour: str,
    order: str,
    group_size: int | None,
    activation: str,
) -> torch.Tensor:
    """See the operation. Reads x and the gate once and writes the result once."""
    width = x.shape[-1]
    size = group_size or width
    if x.dtype not in host.DTYPES or size > WIDEST_FORWARD:
        return reference.gated_rms_norm(x, gate, weight, eps, flavour, order, group_size, activation)
    dtype = result_dtype(x.dtype, None if weight is None else weight.dtype, flavour, order)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    lines, tiles, groups = host.rows_of(x, gate), forward_tiles(size), width // size
    host.launch(
        forward, (host.grid_of(host.blocks(lines.number, tiles.rows) * groups),), x.device,
        *lines.tensors, weight, out, lines.number, width, size, groups, lines.middle, lines.inner,
        *lines.strides[0], *lines.strides[1], 0 if weight is None else weight.stride(0), eps,
        FLAVOUR=flavour, GATE_FIRST=order == "gate_then_norm", ACTIVATION=activation, WIDER=_wider(x, weight),
        X_UNIT=lines.strides[0].column == 1, GATE_UNIT=lines.strides[1].column == 1,
        ROWS=tiles.rows, COLUMNS=tiles.columns, num_warps=tiles.warps,
    )  # fmt: skip
    return out


@register_kernel(
    name="cuda.triton.gated_rms_norm_backward",
    contract=BACKWARD_CONTRACT,
    device="cuda",
    execution_modes=_MODES,
    input_domain=_DOMAIN,
    solution="triton",
    priority=10,
)
def gated_rms_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    flavour: str,
    order: str,
    group_size: int | None,
    activation: str,
    need_x: bool,
    need_gate: bool,
    need_weight: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """See the operation. The sums over rows are made in an order that depends on the shape and the number of
    multiprocessors alone."""
    width = x.shape[-1]
    size = group_size or width
    itemsize = max(tensor.element_size() for tensor in (grad, x, gate))
    if x.dtype not in host.DTYPES or grad.dtype not in host.DTYPES or size > WIDEST_BACKWARD[itemsize]:
        return reference.gated_rms_norm_backward(
            grad, x, gate, weight, eps, flavour, order, group_size, activation, need_x, need_gate, need_weight
        )
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_x else None
    grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=x.device) if need_gate else None
    sums = weight if need_weight else None
    grad_weight = None if sums is None else torch.empty(sums.shape, dtype=sums.dtype, device=x.device)
    if x.numel() == 0:
        return grad_x, grad_gate, None if grad_weight is None else grad_weight.zero_()
    if grad_x is None and grad_gate is None and grad_weight is None:
        return None, None, None
    lines, groups = host.rows_of(grad, x, gate), width // size
    tiles = backward_tiles(size)
    programs = host.blocks(lines.number, tiles.rows)
    partial = None
    if grad_weight is not None:
        together = host.processors(x.device) * max(1, min(4, 16 // tiles.warps))
        programs = min(programs, max(1, together // groups))
        partial = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    host.launch(
        backward, (host.grid_of(programs * groups),), x.device,
        *lines.tensors, weight, grad_x, grad_gate, partial,
        lines.number, width, size, groups, lines.middle, lines.inner,
        *lines.strides[0], *lines.strides[1], *lines.strides[2], 0 if weight is None else weight.stride(0), eps,
        FLAVOUR=flavour, GATE_FIRST=order == "gate_then_norm", ACTIVATION=activation, WIDER=_wider(x, weight),
        GRAD_UNIT=lines.strides[0].column == 1, X_UNIT=lines.strides[1].column == 1,
        GATE_UNIT=lines.strides[2].column == 1, ROWS=tiles.rows, COLUMNS=tiles.columns,
        num_warps=tiles.warps, **(host.register_limit(tiles.warps) if tiles.warps > 8 else {}),
    )  # fmt: skip
    if partial is not None and grad_weight is not None:
        reduce_partials(partial, grad_weight)
    return grad_x, grad_gate, grad_weight
