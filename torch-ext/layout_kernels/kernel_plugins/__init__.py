"""Kernels by id on a model that is already loaded: one model and no other, with undo."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = [
    "BaseKernel",
    "DeviceType",
    "KernelPlugin",
    "Registry",
    "apply_default_kernels",
    "apply_kernel",
    "load_original_state_dict",
    "original_state_dict",
    "register_kernel",
    "scan_all_kernels",
    "undo",
]

_HOMES = {
    "BaseKernel": ".base",
    "DeviceType": ".base",
    "KernelPlugin": ".registry",
    "Registry": ".registry",
    "register_kernel": ".registry",
    "apply_default_kernels": ".interface",
    "apply_kernel": ".interface",
    "scan_all_kernels": ".registry",
    "load_original_state_dict": ".interface",
    "original_state_dict": ".interface",
    "undo": ".interface",
}


def __getattr__(name: str) -> Any:
    """A public name, from the module that defines it; importing this package loads no torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
