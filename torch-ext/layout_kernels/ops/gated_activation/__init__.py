"""`gated_activation`: act(gate) * up of a packed tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .operator import check_arguments as check_arguments
    from .operator import gated_activation as gated_activation

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def __getattr__(name: str) -> Any:
    """What needs torch: `gated_activation`, `check_arguments`."""
    if name in ("gated_activation", "check_arguments"):
        from . import operator

        return getattr(operator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
