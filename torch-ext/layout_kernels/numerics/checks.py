"""What holds for a result of any operation: its structure, and that it neither wrote to nor shares what it was given.

Nothing here knows an operation; a suite adds its own judgement of the values.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .suite import FAILED, PASSED

if TYPE_CHECKING:
    import torch

# What a result may be made of besides tensors.
_PLAIN = (type(None), bool, int, float, complex, str)
_STRUCTURE = "tensors, tuples, lists, mappings, numbers, text and None"


def tensors_in(value: Any, place: str = "result") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a nested structure of tuples, lists and mappings, each with the name of its place."""
    import torch

    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{place}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{place}[{index}]")


def on_cpu(value: Any) -> Any:
    """The same structure with every tensor on the CPU."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: on_cpu(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [on_cpu(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def structure_difference(result: Any, expected: Any, device: str, place: str = "result") -> str | None:
    """Where two results differ in structure, shape, dtype or device type, or None. Reads no values.

    Args:
        result: what is judged.
        expected: the same structure with tensors of the right shapes and dtypes, on any device (also meta).
        device: the device type on which the result's tensors must be.
        place: how messages call it.
    """
    import torch

    if isinstance(expected, torch.Tensor):
        if not isinstance(result, torch.Tensor):
            return f"{place} is {type(result).__name__}; it must be a tensor"
        given = (tuple(result.shape), result.dtype, result.device.type)
        wanted = (tuple(expected.shape), expected.dtype, device)
        if given != wanted:
            return f"{place} is {given[0]} {given[1]} on {given[2]}; it must be {wanted[0]} {wanted[1]} on {wanted[2]}"
        return None
    if isinstance(expected, Mapping):
        if not isinstance(result, Mapping) or list(result) != list(expected):
            given_keys = list(result) if isinstance(result, Mapping) else type(result).__name__
            return f"{place} is {given_keys}; it must be a mapping with {list(expected)}"
        items = [(f"{place}[{key!r}]", result[key], expected[key]) for key in expected]
    elif isinstance(expected, (tuple, list)):
        if type(result) is not type(expected) or len(result) != len(expected):
            size = f" of {len(result)}" if isinstance(result, (tuple, list)) else ""
            return f"{place} is {type(result).__name__}{size}; it must be {type(expected).__name__} of {len(expected)}"
        items = [(f"{place}[{i}]", one, other) for i, (one, other) in enumerate(zip(result, expected, strict=True))]
    elif not isinstance(expected, _PLAIN):
        return f"{place} is {type(result).__name__}; what is not made of {_STRUCTURE} cannot be looked into"
    else:
        return None if type(result) is type(expected) else f"{place} is {result!r}; it must be {expected!r}"
    differences = (structure_difference(one, other, device, where) for where, one, other in items)
    return next((difference for difference in differences if difference is not None), None)


def whole_memory(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory that a tensor is a view of, as one row of its elements."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((elements,), (1,), 0)


def moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """The tensor on a device, with its strides, its offset and the memory around it."""
    memory = whole_memory(tensor).to(device)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    # As bytes: a NaN does not equal itself, and -0.0 is not 0.0.
    return torch.equal(one.contiguous().cpu().view(torch.uint8), other.contiguous().cpu().view(torch.uint8))


def have_same_bits(one: Any, other: Any) -> bool:
    """Whether two results hold the same bits in the same structure; what else they hold must be equal."""
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
            return False
        return _same_bits(one.reshape(-1), other.reshape(-1))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return list(one) == list(other) and all(have_same_bits(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)) and type(one) is type(other):
        return len(one) == len(other) and all(map(have_same_bits, one, other))
    return type(one) is type(other) and bool(one == other)


def digest(result: Any) -> str:
    """A text that is equal for results of equal bits and strides."""

    found = hashlib.blake2b()
    for name, tensor in tensors_in(result):
        found.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}{tensor.stride()}".encode())
        whole = tensor.detach().contiguous().cpu()
        found.update(ctypes.string_at(whole.data_ptr(), whole.nbytes) if whole.nbytes else b"")  # without numpy
    return found.hexdigest()


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr(), tensor.untyped_storage().nbytes()


class Snapshot:
    """The memory of some inputs, gaps included, at one time."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        self._inputs = inputs
        self._before = {name: whole_memory(tensor).clone() for name, tensor in inputs.items()}
        self._places = {name: _place(tensor) for name, tensor in inputs.items()}

    def mutated(self, allowed: Collection[str] = ()) -> str | None:
        """Which input has been written to since, or None."""
        for name, tensor in self._inputs.items():
            if _place(tensor) != self._places[name]:
                return f"{name} has another shape, dtype or place in memory than before"
            if name not in allowed and not _same_bits(whole_memory(tensor), self._before[name]):
                return f"{name} was written to; the contract says that only {', '.join(allowed) or 'nothing'} is"
        return None


def shared_memory(result: Any, others: Any, what: str) -> str | None:
    """Which tensor of a result lies in the memory of one of the others, or None."""
    owners = [(*_addresses(tensor), name) for name, tensor in tensors_in(others, what)]
    for name, tensor in tensors_in(result):
        first, end = _addresses(tensor)
        for start, stop, owner in owners:
            if max(first, start) < min(end, stop):
                return f"{name} shares memory with {owner}; the contract says that a result has memory of its own"
    return None


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the memory that a tensor is a view of begins and ends: two storages may be parts of one memory."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def failed(reason: str) -> dict[str, Any]:
    """A validation that did not pass."""
    return {"status": FAILED, "reason": reason}


def validate_call(
    function: Callable[[], Any],
    *,
    inputs: Mapping[str, torch.Tensor],
    mutates: Sequence[str],
    aliases_inputs: bool,
    device: str,
    expected: Any,
    judge: Callable[[Any], str | None],
) -> dict[str, Any]:
    """Call a function once and judge its result: memory, then structure, then values.

    Args:
        function: what is judged; the snapshot of the inputs is taken before it is called.
        inputs: the tensors that it was given, by name.
        mutates: names of those that it may write to.
        aliases_inputs: whether its result may share their memory.
        device: the device type of the result.
        expected: see `structure_difference`.
        judge: given the result on the CPU, says why its values do not pass, or None.
    """
    before = Snapshot(inputs)
    result = function()
    reason = before.mutated(mutates)
    if reason is None and not aliases_inputs:
        reason = shared_memory(result, dict(inputs), "inputs")
    if reason is None:
        reason = structure_difference(result, expected, device)
    if reason is None:
        reason = judge(on_cpu(result))
    return {"status": PASSED} if reason is None else failed(reason)
