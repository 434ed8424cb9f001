"""Triton's interpreter with the conversions and products of a GPU.

The interpreter (Triton 3.6 to 3.9) cuts bfloat16 off where a GPU rounds to nearest even, and multiplies the bits of
bfloat16 where a GPU multiplies its values. With both mended, the tolerances of `layout_kernels.numerics` hold as they
are. It also counts, for each tensor, the elements that kernels load and store.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def is_on() -> bool:
    """Whether this process interprets Triton's kernels; it must be said before triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _to_float32(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(values: Any) -> Any:
    made = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return made.view(torch.int16).numpy().view(np.uint16).reshape(values.shape)


def repair() -> None:
    """Mend the interpreter of this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    if getattr(interpreter, "_mended", False):
        return
    original, builder = interpreter._convert_float, interpreter.InterpreterBuilder

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return _to_bfloat16(values.view(np.float32) if values.dtype == np.uint32 else values)
        if source == tl.bfloat16 and target == tl.float32:
            return _to_float32(values).view(np.uint32)
        return original(values, source, target, rounding)

    def dot(_self: Any, a: Any, b: Any, total: Any, *_rest: Any) -> Any:
        values = [_to_float32(side.data) if side.dtype.scalar == tl.bfloat16 else side.data for side in (a, b)]
        made = np.matmul(*values, dtype=total.data.dtype) + total.data
        return interpreter.TensorHandle(made, total.dtype.scalar)

    def fma(_self: Any, a: Any, b: Any, c: Any) -> Any:
        wide = a.data.astype(np.float64) * b.data.astype(np.float64) + c.data.astype(np.float64)
        return interpreter.TensorHandle(wide.astype(c.data.dtype), c.dtype.scalar)

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # A number of the interpreter is an array of one element, which NumPy 2.4 does not take for an index.
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._convert_float = convert
    interpreter._patch_lang_tensor = patch_with_index
    builder.create_dot = dot
    builder.create_fma = fma
    interpreter._mended = True


class Traffic:
    """How many bytes kernels loaded and stored: of each named tensor, and in all."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._ranges = {
            name: (tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
            for name, tensor in tensors.items()
        }
        self.loaded = dict.fromkeys(tensors, 0)
        self.stored = dict.fromkeys(tensors, 0)
        self.all_loaded = 0
        self.all_stored = 0

    def count(self, into: dict[str, int], pointers: Any, mask: Any) -> int:
        """Add what a load or store touches to its tensors; the bytes of all of it."""
        size = pointers.get_element_ty().primitive_bitwidth // 8
        touched = pointers.data[np.broadcast_to(mask, pointers.data.shape)].astype(np.uint64)
        for name, (start, length) in self._ranges.items():
            into[name] += int(((touched >= start) & (touched < start + length)).sum()) * size
        return touched.size * size


@contextmanager
def counting(traffic: Traffic) -> Iterator[None]:
    """Count the loads and stores of the kernels that run inside; an atomic addition counts as a store."""
    from triton.runtime.interpreter import InterpreterBuilder

    names = ("create_masked_load", "create_masked_store", "create_atomic_rmw")
    load, store, add = (getattr(InterpreterBuilder, name) for name in names)

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        traffic.all_loaded += traffic.count(traffic.loaded, pointers, mask.data)
        return load(self, pointers, mask, *rest)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.all_stored += traffic.count(traffic.stored, pointers, mask.data)
        return store(self, pointers, value, mask, *rest)

    def counted_add(self: Any, kind: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.all_stored += traffic.count(traffic.stored, pointers, mask.data)
        return add(self, kind, pointers, value, mask, *rest)

    for name, function in zip(names, (counted_load, counted_store, counted_add), strict=True):
        setattr(InterpreterBuilder, name, function)
    try:
        yield
    finally:
        for name, function in zip(names, (load, store, add), strict=True):
            setattr(InterpreterBuilder, name, function)
