"""Parameters whose rows lie one after the other in memory, and the one matrix that all of their rows are.

Parallel products (gate and up) read one input; as one product of all rows they read it once and start once. A compiler
cannot make that of two parameters, since it may not move them. Here the parameters keep their identity, shapes and
values, and only their memory changes: each becomes a tensor with a storage of its own inside one block, so that
whatever saves, shares or updates them in place sees ordinary parameters. (Views of one storage would not do:
`safetensors.torch.save_model` refuses tensors that cover a part of a storage.)

Whoever assigns other memory to a parameter (`.to(...)`, `param.data = ...`) takes it out of its block. Nothing here
trusts a record: `rows_of` compares addresses, shapes and strides at each call.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

_PLAIN = (torch.nn.Parameter, torch.Tensor)
_KEEPER = "_layout_kernels_block"


@dataclass(frozen=True)
class _Block:
    """All rows, and the address and shape of each part."""

    rows: torch.Tensor
    dtype: torch.dtype
    device: torch.device
    parts: tuple[tuple[int, torch.Size], ...]


# By the address of the first part. A block is held as long as the storage of that part, so that nobody holds memory
# which its parameters have left.
_blocks: dict[int, _Block] = {}


class _Keeper:
    """An attribute of a storage's Python object, which torch keeps exactly as long as the storage itself."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __del__(self) -> None:
        _blocks.pop(self.address, None)


def rows_of(*parts: torch.Tensor) -> torch.Tensor | None:
    """The matrix (or vector) of all rows of `parts`, in their memory; None where they do not lie one after the other.

    It requires no gradient; `joined` gives one that does.
    """
    block = _blocks.get(parts[0].data_ptr())
    if block is None or len(block.parts) != len(parts):
        return None
    rows, dtype = block.rows, block.dtype
    for part, (address, shape) in zip(parts, block.parts):  # noqa: B905 as long as each other
        if part.data_ptr() != address or part.shape != shape or part.dtype is not dtype or not part.is_contiguous():
            return None
    return rows if parts[0].device == block.device else None


def address(part: torch.Tensor) -> int:
    """Where a plain tensor's memory begins; 0 where it has none, or is no plain tensor."""
    is_plain = type(part) in _PLAIN and part.layout is torch.strided and torch._C._has_storage(part)
    return part.data_ptr() if is_plain else 0


def _holders(part: torch.Tensor) -> tuple[int, int]:
    in_python = sys.getrefcount(part.untyped_storage())
    return torch._C._storage_Use_Count(part.untyped_storage()._cdata), in_python


_ALONE = _holders(torch.empty(1))


def is_held_elsewhere(part: torch.Tensor) -> bool:
    """Whether anything beside `part` holds its storage: another tensor, an array, an autograd graph.

    Source: torch 2.13, ``torch/csrc/StorageMethods.cpp``; the count includes the storage's Python object, which may be
    held in its turn.
    """
    return _holders(part) != _ALONE


def is_held_as_a_storage(part: torch.Tensor) -> bool:
    """Whether a Python variable holds `part`'s storage, as `untyped_storage()` and `storage()` give it."""
    return _holders(part)[1] != _ALONE[1]


def why_not_lay(*parts: torch.Tensor) -> str:
    """Why the memory of `parts` must stay as it is; empty where it may be laid out anew, if nobody else holds it."""
    first = parts[0]
    if len({id(part) for part in parts}) < len(parts):
        return "a weight is there twice"
    for part in parts:
        if type(part) not in _PLAIN:
            return f"a weight is a {type(part).__name__} (quantised or sharded)"
        if part.layout is not torch.strided or not part.dim():
            return f"a weight is {part.layout} with {part.dim()} dimensions"
        if hasattr(part, "_fsdp_flattened"):
            return "its weights are parts of a flat parameter (sharded)"
        if part.is_meta:
            return "its weights are not in memory (offloaded, or not loaded yet)"
        if part.is_inference():
            return "its weights were made in inference mode"
        if part.is_cpu and part.is_shared():
            return "its weights are shared with other processes"
        if (part.dtype, part.device, part.shape[1:]) != (first.dtype, first.device, first.shape[1:]):
            return "its weights differ in dtype, device or width"
        if not part.numel():
            return "a weight is empty"
    return ""


def lay(*parts: torch.Tensor, even_if_held: bool = False) -> bool:
    """Lay the rows of `parts` one after the other; the parameters stay the same objects with the same values.

    Never called in a forward. One copy of the parts is made at a time.

    Args:
        parts: the parameters.
        even_if_held: also where something else holds their memory, which then keeps what it has: the caller has made
            sure that nobody goes by that memory.

    Returns:
        Whether they lie so now; `why_not_lay` says why not.
    """
    reason = why_not_lay(*parts)
    if not reason and rows_of(*parts) is not None:
        return True
    reason = reason or ("" if even_if_held or not any(map(is_held_elsewhere, parts)) else "held")
    _let_go(parts[0])
    if reason:
        return False
    divide(_joined_copy(parts), *parts)
    return True


@torch.inference_mode(False)  # what is made in it can never be trained
@torch.no_grad()
def _joined_copy(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.detach() for part in parts])


def _let_go(first: torch.Tensor) -> None:
    """Forget a block whose first storage has got other memory (it is shared with processes now)."""
    if type(first) in _PLAIN and first.layout is torch.strided:
        vars(first.untyped_storage()).pop(_KEEPER, None)


@torch.inference_mode(False)
def divide(rows: torch.Tensor, *parts: torch.Tensor) -> None:
    """Make `parts` the rows of `rows`, which nobody else may hold: their data is in its memory afterwards.

    The sizes of the parts say how many rows each gets.
    """
    found, at = [], 0
    for part in parts:
        piece = rows[at : at + len(part)]
        at += len(part)
        # Through a capsule: torch.from_dlpack asks for a name of the device that an NPU has not.
        part.data = from_dlpack(to_dlpack(piece))
        found.append((piece.data_ptr(), piece.shape))
    storage: Any = parts[0].untyped_storage()
    setattr(storage, _KEEPER, _Keeper(storage.data_ptr()))
    _blocks[storage.data_ptr()] = _Block(rows, rows.dtype, rows.device, tuple(found))


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, *parts):  # type: ignore[no-untyped-def]
        ctx.sizes = [len(part) for part in parts]
        ctx.set_materialize_grads(False)
        rows, seen = rows.detach(), None if x is None else x.view_as(x)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(*parts)  # changed in place before the backward: an error, as with separate products
        idle = [] if seen is None or ctx.needs_input_grad[0] else [seen]
        ctx.mark_non_differentiable(*idle, *([] if any(ctx.needs_input_grad[2:]) else [rows]))
        return seen, rows

    @staticmethod
    def backward(ctx, grad_x, grad):  # type: ignore[no-untyped-def]
        sizes, _ = ctx.sizes, ctx.saved_tensors
        # Each a gradient of its own, that can be freed, resized and changed without the others.
        grads = [None] * len(sizes) if grad is None else [part.clone() for part in grad.split(sizes)]
        return grad_x, None, *(g if need else None for g, need in zip(grads, ctx.needs_input_grad[2:], strict=True))


def joined(
    x: torch.Tensor | None, rows: torch.Tensor, *parts: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """`x` and `rows` for their product: the gradient of `rows` is that of the `parts` that it consists of.

    `x` goes through so that parts which change in place before its gradient is made are an error, as they are where
    they are multiplied one by one.
    """
    return _Joined.apply(x, rows, *parts)


def gathered(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The matrix of all rows of `parts`: their memory where they lie one after the other, else a copy."""
    rows = rows_of(*parts)
    return torch.cat(list(parts)) if rows is None else rows
