"""`rms_norm`: root mean square norm over the last dimension, in three flavours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .operator import check_arguments as check_arguments
    from .operator import result_dtype as result_dtype
    from .operator import rms_norm as rms_norm

FLAVOURS = ("cast_then_scale", "scale_then_cast", "one_plus_scale")


def __getattr__(name: str) -> Any:
    """What needs torch: `rms_norm`, `check_arguments`, `result_dtype`."""
    if name in ("rms_norm", "check_arguments", "result_dtype"):
        from . import operator

        return getattr(operator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
