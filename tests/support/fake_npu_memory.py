"""Tensors of a simulated `npu` device: a real storage, sizes and strides, whose bytes lie in a twin on the CPU.

A device tensor is a plain `torch.Tensor`. Its storage carries the CPU storage that holds the bytes as `storage.host`,
so views share memory, strides are real, and a tensor without its bytes cannot arise unnoticed.
"""

from __future__ import annotations

from typing import Any

import torch

DEVICE = "npu"
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_set = torch.ops.aten.set_.source_Storage_storage_offset


class Memory:
    """What is allocated on the device, in bytes; storages are counted until the last tensor on them is gone."""

    def __init__(self) -> None:
        self.allocated = 0
        self.peak = 0
        self.live: dict[int, int] = {}

    def track(self, storage: torch.UntypedStorage) -> None:
        # An attribute of the storage's Python object, which torch keeps exactly as long as the C++ storage.
        storage.owner = _Allocation(self, storage.data_ptr(), storage.nbytes())  # type: ignore[attr-defined]

    def holds(self, address: int, size: int) -> bool:
        """Whether a range of addresses lies in one allocation, as that of a tensor that came through DLPack does."""
        return any(start <= address and address + size <= start + length for start, length in self.live.items())


class _Allocation:
    def __init__(self, memory: Memory, address: int, size: int) -> None:
        self.memory, self.address, self.size = memory, address, size
        memory.live[address] = size
        memory.allocated += size
        memory.peak = max(memory.peak, memory.allocated)

    def __del__(self) -> None:
        self.memory.allocated -= self.size
        self.memory.live.pop(self.address, None)


MEMORY = Memory()


def is_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE


def host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same bytes, of the same sizes and strides."""
    storage: Any = tensor.untyped_storage()
    if not hasattr(storage, "host") and MEMORY.holds(storage.data_ptr(), storage.nbytes()):
        cpu = torch.device("cpu")
        storage.host = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), cpu, storage.nbytes())
    if not hasattr(storage, "host"):
        raise RuntimeError("a simulated npu tensor has no bytes: an operator made it outside the simulation")
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(storage.host, tensor.storage_offset(), tensor.size(), tensor.stride())


def _device_storage(bytes_: torch.UntypedStorage) -> torch.UntypedStorage:
    address = bytes_.data_ptr() if bytes_.nbytes() else 0
    storage: Any = torch._C._construct_storage_from_data_pointer(address, torch.device(DEVICE, 0), bytes_.nbytes())
    storage.host = bytes_
    MEMORY.track(storage)
    return storage


def to_device(tensor: torch.Tensor, known: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """A device tensor over the bytes of a CPU tensor, in the storage of `known` where it is one of theirs."""
    bytes_ = tensor.untyped_storage()
    storage = known.get(bytes_._cdata)
    if storage is None:
        storage = known[bytes_._cdata] = _device_storage(bytes_)
    fresh = torch._C._acc.create_empty_tensor((0,), tensor.dtype)
    return describe(fresh, tensor, storage)


def describe(target: torch.Tensor, like: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Let a device tensor have the storage, offset, sizes and strides of a CPU tensor."""
    return _set.redispatch(_CPU, target, storage, like.storage_offset(), like.size(), like.stride())


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What an operator that resizes or transposes in place changes."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes(), tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride())
