"""The host side that the Triton implementations share: rows in memory, devices, launches. Triton is not named here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Row numbers are 32 bits wide in the kernels (offsets are 64); a last tile may reach beyond the last row.
MAX_ROWS = 2**31 - 2**16
_ROW_DIMENSIONS = 3


class Strides(NamedTuple):
    """The distances, in elements, of a tensor's rows along the three row dimensions, and along a row."""

    outer: int
    middle: int
    inner: int
    column: int


class Rows(NamedTuple):
    """Rows of several tensors of one shape, numbered by three dimensions that are common to all of them.

    Attributes:
        number: of rows.
        middle: size of the second dimension.
        inner: size of the third; row r is (r // inner // middle, r // inner % middle, r % inner).
        tensors: what to read; a tensor whose rows do not lie in three dimensions was copied.
        strides: of each tensor.
    """

    number: int
    middle: int
    inner: int
    tensors: tuple[torch.Tensor, ...]
    strides: tuple[Strides, ...]


def rows_of(*tensors: torch.Tensor) -> Rows:
    """The rows of tensors of one shape [..., width], without a copy where at most three dimensions are needed.

    Raises:
        ValueError: more rows than a launch can number.
    """
    shape = tensors[0].shape
    count = tensors[0].numel() // shape[-1]
    if count > MAX_ROWS:
        raise ValueError(f"{count} rows were given; this implementation takes up to {MAX_ROWS}: split the call")
    if all(tensor.is_contiguous() for tensor in tensors):
        return Rows(count, 1, 1, tensors, (Strides(shape[-1], 0, 0, 1),) * len(tensors))
    sizes, steps = _merged(shape[:-1], [tensor.stride()[:-1] for tensor in tensors])
    if len(sizes) > _ROW_DIMENSIONS:
        return rows_of(*(tensor.contiguous() for tensor in tensors))
    padding = _ROW_DIMENSIONS - len(sizes)
    sizes = (*sizes, *(1,) * padding)
    strides = []
    for step, tensor in zip(steps, tensors, strict=True):
        outer, middle, inner = (*step, *(0,) * padding)
        strides.append(Strides(outer, middle, inner, tensor.stride(-1) if shape[-1] > 1 else 1))
    return Rows(count, sizes[1], sizes[2], tensors, tuple(strides))


def _merged(
    sizes: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Sizes and each tensor's strides after merging every dimension that is a continuation of the one before it."""
    kept: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for dimension, size in enumerate(sizes):
        if size == 1:
            continue
        if kept and all(done[-1] == step[dimension] * size for done, step in zip(steps, strides, strict=True)):
            kept[-1] *= size
            for done, step in zip(steps, strides, strict=True):
                done[-1] = step[dimension]
        else:
            kept.append(size)
            for done, step in zip(steps, strides, strict=True):
                done.append(step[dimension])
    return tuple(kept), tuple(tuple(step) for step in steps)


def processors(device: torch.device) -> int:
    """The multiprocessors of a device; a small number where kernels are interpreted on the CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def register_limit(warps: int) -> dict[str, int]:
    """The option that lets a thread have 128 registers, for up to 16 warps, which share 65,536.

    Left to itself the assembler spills a few registers of some backwards to fit one more program on a multiprocessor.
    Only NVIDIA's compiler knows the option.
    """
    return {"maxnreg": 128} if warps <= 16 and torch.version.hip is None else {}


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **options: Any) -> None:
    """Launch a Triton kernel on the tensors' device, whichever is current, and on that device's current stream.

    Raises:
        RuntimeError: the kernel had to be compiled or loaded while a CUDA graph was being captured, and that failed.
    """
    try:
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                kernel[grid](*args, **options)
        else:
            kernel[grid](*args, **options)
    except Exception as error:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a Triton kernel could not be launched while a CUDA graph is captured; call the operation once with "
                "the same shapes and dtypes before the capture, so that it is compiled and loaded"
            ) from error
        raise


def power_of_two(number: int) -> int:
    """The least power of two that is not below `number`, and not below 16."""
    return max(16, 1 << (number - 1).bit_length())


def blocks(number: int, size: int) -> int:
    """How many blocks of `size` hold `number`."""
    return -(-number // size)


def grid_of(programs: int) -> int:
    """The number of programs of a launch in one dimension, which holds 2^31 - 1.

    Raises:
        ValueError: more than that.
    """
    if programs >= 2**31:
        raise ValueError(f"{programs} programs would be needed; a launch takes up to {2**31 - 1}: split the call")
    return programs
