"""Tensors on the simulated device with the strides that they have on the CPU, and back."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.fake_npu_memory import host, is_device, to_device


def send(values: Any) -> Any:
    """The same values on the device, in memory as on the CPU: strides, offset and gaps."""
    if isinstance(values, torch.Tensor):
        return to_device(values, {})
    if isinstance(values, (tuple, list)):
        return type(values)(send(value) for value in values)
    return values


def fetch(values: Any) -> Any:
    """The same values on the CPU, with the strides that they have on the device."""
    if is_device(values):
        return host(values)
    if isinstance(values, (tuple, list)):
        return type(values)(fetch(value) for value in values)
    return values


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Standard normal values on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
