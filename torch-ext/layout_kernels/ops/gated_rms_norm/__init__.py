"""`gated_rms_norm`: root mean square norm with a gate, in groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .operator import check_arguments as check_arguments
    from .operator import gated_rms_norm as gated_rms_norm

ACTIVATIONS = ("silu", "sigmoid")
FLAVOURS = ("cast_then_scale", "scale_then_cast")
ORDERS = ("gate_then_norm", "norm_then_gate")


def __getattr__(name: str) -> Any:
    """What needs torch: `gated_rms_norm`, `check_arguments`."""
    if name in ("gated_rms_norm", "check_arguments"):
        from . import operator

        return getattr(operator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
