"""RMSNorm and gated-MLP kernels for transformers models on CUDA, Ascend NPU and CPU, and their weight layouts.

Importing this package loads neither torch nor a device's SDK; each name is loaded when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = [
    "initialize",
    "register_kernel",
    "rms_norm",
    "gated_activation",
    "rms_norm_mlp",
    "gated_rms_norm",
    "linear",
    "prepare_rms_norm",
    "prepare_gated_activation",
    "prepare_rms_norm_mlp",
    "prepare_gated_rms_norm",
    "prepare_linear",
    "BasePlugin",
    "kernel_loading",
    "plan",
    "report",
    "apply_kernel",
    "apply_default_kernels",
    "undo",
    "verify",
    "kernel_plugins",
    "layers",
    "numerics",
    "benchmark",
]

_HOMES = {
    "initialize": ".dispatch",
    "register_kernel": ".dispatch",
    "rms_norm": ".ops.rms_norm",
    "gated_activation": ".ops.gated_activation",
    "rms_norm_mlp": ".ops.rms_norm_mlp",
    "gated_rms_norm": ".ops.gated_rms_norm",
    "linear": ".ops.linear",
    "prepare_rms_norm": ".ops.rms_norm",
    "prepare_gated_activation": ".ops.gated_activation",
    "prepare_rms_norm_mlp": ".ops.rms_norm_mlp",
    "prepare_gated_rms_norm": ".ops.gated_rms_norm",
    "prepare_linear": ".ops.linear",
    "BasePlugin": ".plugin",
    "kernel_loading": ".models.loading",
    "plan": ".models.plan",
    "report": ".models.report",
    "apply_kernel": ".kernel_plugins.interface",
    "apply_default_kernels": ".kernel_plugins.interface",
    "undo": ".kernel_plugins.interface",
    "verify": ".verification",
}
_SUBMODULES = ("layers", "kernel_plugins", "numerics", "benchmark")


def __getattr__(name: str) -> Any:
    """A public name, from the module that defines it."""
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name], __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
