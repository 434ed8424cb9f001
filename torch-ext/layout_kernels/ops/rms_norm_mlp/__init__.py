"""`rms_norm_mlp`: a norm and the gated MLP behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .operator import check_arguments as check_arguments
    from .operator import rms_norm_mlp as rms_norm_mlp


def __getattr__(name: str) -> Any:
    """What needs torch: `rms_norm_mlp`, `check_arguments`."""
    if name in ("rms_norm_mlp", "check_arguments"):
        from . import operator

        return getattr(operator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
