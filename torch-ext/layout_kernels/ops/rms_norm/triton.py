"""`rms_norm` on CUDA, in Triton: forward and backward.

Up to the widths of `_HELD` a program holds whole rows in registers, so that each tensor crosses the memory bus once;
narrow rows share a program. Wider rows are read twice, block by block, the second time mostly from the L2 cache.
"""

# Device functions: Triton reads no annotations but constexpr, names its constants in capitals, takes `else` after a
# return of another type only, and compiles what a constant excludes away.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803, ARG001, RET505, SIM102, C901

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...dispatch import register_kernel
from .. import triton_launch as host
from ..triton_parts import column_offsets, normalise, reciprocal_rms, row_offsets
from . import BACKWARD_CONTRACT, CONTRACT, reference
from .operator import result_dtype

_DOMAIN = "float32, bfloat16 and float16 in any mixture, any strides (rows that do not lie in three dimensions are "
_DOMAIN += "copied), up to 2^31 rows; float64 is handed to the reference"
_MODES = ("eager", "compile", "cudagraph")


class Tiles(NamedTuple):
    """How a launch divides its rows.

    Attributes:
        rows: at a time.
        columns: of a block.
        warps: of a program.
        held: whether a block is a whole row, in registers.
        sums_held: whether the backward's partial sums are in registers too.
    """

    rows: int
    columns: int
    warps: int
    held: bool = True
    sums_held: bool = True


# Elements of a tile: enough independent loads for each thread, few enough registers for several programs on a
# multiprocessor. `make check-cuda` shows what each costs, and that nothing spills.
_FORWARD_ELEMENTS = 2048
_BACKWARD_ELEMENTS = 1024
# The widest block that stays in registers, and the block of a loop over wider rows.
_HELD_FORWARD, _LOOP_FORWARD = 32768, 16384
_HELD_BACKWARD, _LOOP_BACKWARD = 16384, 8192
# A row of x from which on registers do not hold the backward's sums beside it.
_SUMS_HELD_BYTES = 32768


def forward_tiles(width: int) -> Tiles:
    """The tiles of the forward."""
    columns = host.power_of_two(width)
    if columns > _HELD_FORWARD:
        return Tiles(1, _LOOP_FORWARD, 32, held=False)
    rows = max(1, _FORWARD_ELEMENTS // columns)
    return Tiles(rows, columns, _warps(rows * columns, 16 if columns <= 16384 else 32))


def backward_tiles(width: int, itemsize: int) -> Tiles:
    """The tiles of the backward; `itemsize`: of an element of x or of the gradient, the larger."""
    columns = host.power_of_two(width)
    if columns > _HELD_BACKWARD:
        return Tiles(1, _LOOP_BACKWARD, 16, held=False)
    if columns * itemsize > _SUMS_HELD_BYTES:
        return Tiles(1, columns, 32, sums_held=False)
    rows = max(1, _BACKWARD_ELEMENTS // columns)
    return Tiles(rows, columns, _warps(rows * columns, 16))


def _warps(elements: int, most: int) -> int:
    # 16 elements a thread: 32 bytes of half precision, two loads of 16 bytes.
    return min(most, max(4, elements // 512))


@triton.jit
def scaled(normalised, scale, dtype: tl.constexpr, FLAVOUR: tl.constexpr):
    """The flavour's scale, in float32; `cast_then_scale` rounds to the dtype of x before it."""
    if FLAVOUR == "cast_then_scale":
        return normalised.to(dtype).to(tl.float32) * scale
    elif FLAVOUR == "scale_then_cast":
        return normalised * scale
    else:
        return normalised * (1.0 + scale)


@triton.jit
def forward_held(
    x_ptr, weight_ptr, out_ptr, rows, width, middle, inner,
    stride_outer, stride_middle, stride_inner, stride_column, stride_weight, eps,
    FLAVOUR: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of whole rows, [ROWS, COLUMNS]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    start = row_offsets(row, middle, inner, stride_outer, stride_middle, stride_inner)
    raw = tl.load(x_ptr + start[:, None] + column_offsets(column, stride_column, UNIT)[None, :], mask=mask, other=0.0)
    x = raw.to(tl.float32)
    rstd, low = reciprocal_rms(tl.sum(x * x, axis=1), width, eps)
    # From the raw tile again: in half precision that holds half the registers until here.
    normalised = normalise(raw.to(tl.float32), rstd[:, None], low[:, None], x_ptr.dtype.element_ty)
    if weight_ptr is not None:
        place = column.to(tl.int64) * stride_weight
        scale = tl.load(weight_ptr + place, mask=column < width, other=0.0).to(tl.float32)
        normalised = scaled(normalised, scale[None, :], x_ptr.dtype.element_ty, FLAVOUR)
    out = out_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out, normalised.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def forward_looped(
    x_ptr, weight_ptr, out_ptr, rows, width, middle, inner,
    stride_outer, stride_middle, stride_inner, stride_column, stride_weight, eps,
    FLAVOUR: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One row, [COLUMNS] at a time, twice: the sum of squares, then the result."""
    row = tl.program_id(0)
    x_row = x_ptr + row_offsets(row, middle, inner, stride_outer, stride_middle, stride_inner)
    squares = tl.zeros([COLUMNS], tl.float32)
    for begin in range(0, width, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        x = tl.load(
            x_row + column_offsets(column, stride_column, UNIT),
            mask=column < width,
            other=0.0,
            eviction_policy="evict_last",
        ).to(tl.float32)
        squares += x * x
    rstd, low = reciprocal_rms(tl.sum(squares, axis=0), width, eps)
    out_row = out_ptr + row.to(tl.int64) * width
    for begin in range(0, width, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        mask = column < width
        x = tl.load(
            x_row + column_offsets(column, stride_column, UNIT), mask=mask, other=0.0, eviction_policy="evict_first"
        )
        normalised = normalise(x.to(tl.float32), rstd, low, x_ptr.dtype.element_ty)
        if weight_ptr is not None:
            scale = tl.load(weight_ptr + column.to(tl.int64) * stride_weight, mask=mask, other=0.0).to(tl.float32)
            normalised = scaled(normalised, scale, x_ptr.dtype.element_ty, FLAVOUR)
        tl.store(out_row + column, normalised.to(out_ptr.dtype.element_ty), mask=mask)


@register_kernel(
    name="cuda.triton.rms_norm",
    contract=CONTRACT,
    device="cuda",
    execution_modes=_MODES,
    input_domain=_DOMAIN,
    solution="triton",
    priority=10,
)
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, flavour: str) -> torch.Tensor:
    """See the operation. Reads x once and writes the result once up to the widths held in registers."""
    if x.dtype not in host.DTYPES:
        return reference.rms_norm(x, weight, eps, flavour)
    dtype = result_dtype(x.dtype, None if weight is None else weight.dtype, flavour)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    width = x.shape[-1]
    lines = host.rows_of(x)
    tiles = forward_tiles(width)
    host.launch(
        forward_held if tiles.held else forward_looped,
        (host.blocks(lines.number, tiles.rows),),
        x.device,
        lines.tensors[0], weight, out, lines.number, width, lines.middle, lines.inner,
        *lines.strides[0], 0 if weight is None else weight.stride(0), eps,
        FLAVOUR=flavour, UNIT=lines.strides[0].column == 1, ROWS=tiles.rows, COLUMNS=tiles.columns,
        num_warps=tiles.warps,
    )  # fmt: skip
    return out


@triton.jit
def _scale(weight_ptr, column, mask, stride_weight, FLAVOUR: tl.constexpr):
    """What the gradient of the result is multiplied by, in float32."""
    scale = tl.load(weight_ptr + column.to(tl.int64) * stride_weight, mask=mask, other=0.0).to(tl.float32)
    if FLAVOUR == "one_plus_scale":
        scale += 1.0
    return scale


@triton.jit
def backward_held(
    grad_ptr, x_ptr, weight_ptr, grad_x_ptr, partial_ptr, rows, width, middle, inner,
    grad_outer, grad_middle, grad_inner, grad_column,
    x_outer, x_middle, x_inner, x_column, stride_weight, eps,
    FLAVOUR: tl.constexpr, GRAD_UNIT: tl.constexpr, X_UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    HOLD_SCALE: tl.constexpr, SUMS_HELD: tl.constexpr,
):  # fmt: skip
    """Every n-th tile of whole rows, n being the number of programs; a line of partial sums for each program.

    HOLD_SCALE keeps the scale in registers, SUMS_HELD the partial sums; where a row leaves no room for these, the
    program adds to its line in memory, which stays in the L2 cache.
    """
    column = tl.arange(0, COLUMNS)
    inside = column < width
    if HOLD_SCALE:
        scale = _scale(weight_ptr, column, inside, stride_weight, FLAVOUR)
    if partial_ptr is not None:
        line = partial_ptr + tl.program_id(0).to(tl.int64) * width + column
        if SUMS_HELD:
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
        else:
            tl.store(line, tl.zeros([COLUMNS], tl.float32), mask=inside)
            tl.debug_barrier()  # zeros before sums, whichever threads they belong to
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = inside[None, :]
        if ROWS > 1:
            mask &= (row < rows)[:, None]
        x_tile = x_ptr + row_offsets(row, middle, inner, x_outer, x_middle, x_inner)[:, None]
        x_tile += column_offsets(column, x_column, X_UNIT)[None, :]
        grad_tile = grad_ptr + row_offsets(row, middle, inner, grad_outer, grad_middle, grad_inner)[:, None]
        grad_tile += column_offsets(column, grad_column, GRAD_UNIT)[None, :]
        x = tl.load(x_tile, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_tile, mask=mask, other=0.0).to(tl.float32)
        rstd, _ = reciprocal_rms(tl.sum(x * x, axis=1), width, eps)
        rstd = rstd[:, None]
        # Where rstd is infinite, a masked element would be NaN and spoil the sums.
        normalised = tl.where(mask, x * rstd, 0.0)
        if partial_ptr is not None:
            if FLAVOUR == "cast_then_scale":
                added = grad * normalised.to(x_ptr.dtype.element_ty).to(tl.float32)
            else:
                added = grad * normalised
            if SUMS_HELD:
                total += added
            else:
                # Only this program adds to its line, and each thread row after row: the order is fixed.
                tl.atomic_add(line, tl.sum(added, axis=0), mask=inside, sem="relaxed")
        if grad_x_ptr is not None:
            if HOLD_SCALE:
                grad *= scale[None, :]
            elif weight_ptr is not None:
                grad *= _scale(weight_ptr, column, inside, stride_weight, FLAVOUR)[None, :]
            share = tl.sum(grad * normalised, axis=1)[:, None] / width
            grad_x = rstd * (grad - normalised * share)
            out = grad_x_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
            tl.store(out, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
    if partial_ptr is not None:
        if SUMS_HELD:
            tl.store(line, tl.sum(total, axis=0), mask=inside)


@triton.jit
def backward_looped(
    grad_ptr, x_ptr, weight_ptr, grad_x_ptr, rstd_ptr, rows, width, middle, inner,
    grad_outer, grad_middle, grad_inner, grad_column,
    x_outer, x_middle, x_inner, x_column, stride_weight, eps,
    FLAVOUR: tl.constexpr, GRAD_UNIT: tl.constexpr, X_UNIT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One row, [COLUMNS] at a time, twice: its two sums, then the gradient of x. Keeps 1 / rms for the weight's."""
    row = tl.program_id(0)
    x_row = x_ptr + row_offsets(row, middle, inner, x_outer, x_middle, x_inner)
    grad_row = grad_ptr + row_offsets(row, middle, inner, grad_outer, grad_middle, grad_inner)
    squares = tl.zeros([COLUMNS], tl.float32)
    products = tl.zeros([COLUMNS], tl.float32)
    for begin in range(0, width, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        mask = column < width
        x = tl.load(
            x_row + column_offsets(column, x_column, X_UNIT), mask=mask, other=0.0, eviction_policy="evict_last"
        )
        x = x.to(tl.float32)
        squares += x * x
        if grad_x_ptr is not None:
            grad = tl.load(
                grad_row + column_offsets(column, grad_column, GRAD_UNIT),
                mask=mask,
                other=0.0,
                eviction_policy="evict_last",
            ).to(tl.float32)
            if weight_ptr is not None:
                grad *= _scale(weight_ptr, column, mask, stride_weight, FLAVOUR)
            products += grad * x
    rstd, _ = reciprocal_rms(tl.sum(squares, axis=0), width, eps)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd)
    if grad_x_ptr is not None:
        share = tl.sum(products, axis=0) * rstd / width
        out_row = grad_x_ptr + row.to(tl.int64) * width
        for begin in range(0, width, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            mask = column < width
            x = tl.load(x_row + column_offsets(column, x_column, X_UNIT), mask=mask, other=0.0).to(tl.float32)
            grad = tl.load(grad_row + column_offsets(column, grad_column, GRAD_UNIT), mask=mask, other=0.0).to(
                tl.float32
            )
            if weight_ptr is not None:
                grad *= _scale(weight_ptr, column, mask, stride_weight, FLAVOUR)
            grad_x = rstd * (grad - x * rstd * share)
            tl.store(out_row + column, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def weight_partials(
    grad_ptr, x_ptr, rstd_ptr, partial_ptr, rows, width, middle, inner,
    grad_outer, grad_middle, grad_inner, grad_column, x_outer, x_middle, x_inner, x_column,
    FLAVOUR: tl.constexpr, GRAD_UNIT: tl.constexpr, X_UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A block of columns of every n-th tile of rows, for wide rows whose 1 / rms is known."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        x_start = row_offsets(row, middle, inner, x_outer, x_middle, x_inner)[:, None]
        grad_start = row_offsets(row, middle, inner, grad_outer, grad_middle, grad_inner)[:, None]
        x = tl.load(x_ptr + x_start + column_offsets(column, x_column, X_UNIT)[None, :], mask=mask, other=0.0)
        grad = tl.load(
            grad_ptr + grad_start + column_offsets(column, grad_column, GRAD_UNIT)[None, :], mask=mask, other=0.0
        )
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        normalised = tl.where(mask, x.to(tl.float32) * rstd[:, None], 0.0)
        if FLAVOUR == "cast_then_scale":
            normalised = normalised.to(x_ptr.dtype.element_ty).to(tl.float32)
        total += grad.to(tl.float32) * normalised
    line = partial_ptr + tl.program_id(0).to(tl.int64) * width
    tl.store(line + column, tl.sum(total, axis=0), mask=inside)


@triton.jit
def sum_partials(
    partial_ptr, out_ptr, lines, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Column sums of [lines, width] in an order that depends on the shape alone."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, lines, ROWS):
        line = begin + tl.arange(0, ROWS)
        mask = (line < lines)[:, None] & (column < width)[None, :]
        total += tl.load(partial_ptr + line.to(tl.int64)[:, None] * width + column[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + column, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=column < width)


def reduce_partials(partial: torch.Tensor, out: torch.Tensor) -> None:
    """Write the column sums of `partial`, [lines, width] in float32, to `out`, [width]."""
    lines, width = partial.shape
    rows, columns = (8, 256) if width >= 32768 else (32, 64) if width >= 4096 else (32, 16)
    host.launch(
        sum_partials, (host.blocks(width, columns),), out.device,
        partial, out, lines, width, ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip


def backward_programs(rows: int, tiles: Tiles, device: torch.device) -> int:
    """How many programs share the rows: as many as run at once, so each leaves one line of partial sums."""
    together = max(1, min(4, 16 // tiles.warps))
    return min(host.blocks(rows, tiles.rows), host.processors(device) * together)


@register_kernel(
    name="cuda.triton.rms_norm_backward",
    contract=BACKWARD_CONTRACT,
    device="cuda",
    execution_modes=_MODES,
    input_domain=_DOMAIN,
    solution="triton",
    priority=10,
)
def rms_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    flavour: str,
    need_x: bool,
    need_weight: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """See the operation. 1 / rms is made anew in float32 from the x that is read in any case; the sums over rows are
    made in an order that depends on the shape and the number of multiprocessors alone."""
    if x.dtype not in host.DTYPES or grad.dtype not in host.DTYPES:
        return reference.rms_norm_backward(grad, x, weight, eps, flavour, need_x, need_weight)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_x else None
    grad_weight = (
        torch.empty_like(weight, memory_format=torch.contiguous_format) if need_weight and weight is not None else None
    )
    if x.numel() == 0:
        return grad_x, None if grad_weight is None else grad_weight.zero_()
    if grad_x is not None or grad_weight is not None:
        lines = host.rows_of(grad, x)
        tiles = backward_tiles(x.shape[-1], max(x.element_size(), grad.element_size()))
        run = _backward_held if tiles.held else _backward_looped
        run(lines, weight, eps, flavour, grad_x, grad_weight, tiles)
    return grad_x, grad_weight


def _backward_held(
    lines: host.Rows,
    weight: torch.Tensor | None,
    eps: float,
    flavour: str,
    grad_x: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
    tiles: Tiles,
) -> None:
    device, width = lines.tensors[1].device, lines.tensors[1].shape[-1]
    grid = host.blocks(lines.number, tiles.rows)
    partial = None
    if grad_weight is not None:
        grid = backward_programs(lines.number, tiles, device)
        partial = torch.empty((grid, width), dtype=torch.float32, device=device)
    host.launch(
        backward_held, (grid,), device,
        *lines.tensors, weight, grad_x, partial, lines.number, width, lines.middle, lines.inner,
        *lines.strides[0], *lines.strides[1], 0 if weight is None else weight.stride(0), eps,
        FLAVOUR=flavour, GRAD_UNIT=lines.strides[0].column == 1, X_UNIT=lines.strides[1].column == 1,
        ROWS=tiles.rows, COLUMNS=tiles.columns,
        HOLD_SCALE=weight is not None and tiles.columns <= 4096, SUMS_HELD=tiles.sums_held,
        num_warps=tiles.warps, **host.register_limit(tiles.warps),
    )  # fmt: skip
    if partial is not None and grad_weight is not None:
        reduce_partials(partial, grad_weight)


def _backward_looped(
    lines: host.Rows,
    weight: torch.Tensor | None,
    eps: float,
    flavour: str,
    grad_x: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
    tiles: Tiles,
) -> None:
    device, width = lines.tensors[1].device, lines.tensors[1].shape[-1]
    units = {"GRAD_UNIT": lines.strides[0].column == 1, "X_UNIT": lines.strides[1].column == 1}
    strides = (*lines.strides[0], *lines.strides[1])
    sizes = (lines.number, width, lines.middle, lines.inner)
    rstd = None if grad_weight is None else torch.empty(lines.number, dtype=torch.float32, device=device)
    host.launch(
        backward_looped, (lines.number,), device,
        *lines.tensors, weight, grad_x, rstd, *sizes, *strides, 0 if weight is None else weight.stride(0), eps,
        FLAVOUR=flavour, **units, COLUMNS=tiles.columns, num_warps=tiles.warps,
    )  # fmt: skip
    if grad_weight is None:
        return
    columns = 1024
    across = host.blocks(width, columns)
    grid = min(host.blocks(lines.number, 4), max(1, 4 * host.processors(device) // across))
    partial = torch.empty((grid, width), dtype=torch.float32, device=device)
    host.launch(
        weight_partials, (grid, across), device, *lines.tensors, rstd, partial, *sizes, *strides,
        FLAVOUR=flavour, **units, ROWS=4, COLUMNS=columns, num_warps=8,
    )  # fmt: skip
    reduce_partials(partial, grad_weight)
