"""Which implementation of an operation runs on a device. Knows no operation by name, and loads no torch."""

from __future__ import annotations

from .contract import (
    EXECUTION_MODES,
    BackendModule,
    KernelSpec,
    OpContract,
    Operation,
    PreparedKernel,
)
from .registry import KernelRegistry, register_kernel
from .runtime import initialize

__all__ = [
    "BackendModule",
    "EXECUTION_MODES",
    "KernelRegistry",
    "KernelSpec",
    "OpContract",
    "Operation",
    "PreparedKernel",
    "initialize",
    "register_kernel",
]
