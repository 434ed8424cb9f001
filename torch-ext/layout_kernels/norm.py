"""How a norm with one of our layers runs: as our operation, else as its own class does."""

from __future__ import annotations

from typing import Any

import torch

from .ops.rms_norm import rms_norm
from .ops.rms_norm.operator import direct, fits
from .plain import TENSORS, is_for_operators, parameter

_is_compiling = torch.compiler.is_compiling


def run(norm: Any, x: torch.Tensor, eps: float, flavour: str) -> torch.Tensor:
    """`rms_norm` of the last dimension, with the norm's own weight.

    What the operation does not take (integers, a weight that broadcasts, a sharded one) goes to the stock forward.
    """
    weight = parameter(norm, "weight")
    if not _is_compiling() and (result := direct(x, weight, eps, flavour)) is not None:
        return result
    stock = _stock_forward(type(norm))
    if stock is None or (
        is_for_operators(x) and (weight is None or type(weight) in TENSORS) and fits(x, weight, float(eps), flavour)
    ):
        return rms_norm(x, weight, eps, flavour)
    return stock(norm, x)


def _stock_forward(cls: Any) -> Any:
    """Of the stock class behind ``cls``; None for a layout, which is none."""
    adoption = getattr(cls, "_layout_kernels", None)
    return adoption.original.forward if adoption is not None else None if hasattr(cls, "is_layout") else cls.forward
