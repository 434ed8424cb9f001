"""How a norm with one of our layers runs: as our operation, else as its own class does."""

from __future__ import annotations

from typing import Any

import torch

from ..ops.rms_norm import rms_norm
from ..ops.rms_norm.operator import direct, fits
from ..recognition import norms
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


def eps_of(norm: Any, flavour: str) -> Any:
    """The norm's epsilon, where its class computes ``flavour``.

    Raises:
        ValueError: `kernels` has bound the layer to a loaded model's norm (``set_use_kernels``) that computes
            something else.
    """
    cls = type(norm)
    adoption = getattr(cls, "_layout_kernels", None)
    if adoption is not None:
        return getattr(norm, adoption.eps_name)
    if hasattr(cls, "is_layout") or not hasattr(cls, "kernel_layer_name"):
        return norm.variance_epsilon
    found, eps_name = norms.norm_class_flavour(norm)
    if found != flavour:
        raise ValueError(
            f"{cls.__name__} computes {found} ({norms.DESCRIPTIONS[found]}), the layer that was bound to it "
            f"{flavour} ({norms.DESCRIPTIONS[flavour]}). In a loaded model name the layer RMSNorm, which computes "
            'what the class does, or call apply_kernel("cpu_fused_rmsnorm", model=model)'
        )
    return getattr(norm, eps_name)


def _stock_forward(cls: Any) -> Any:
    """Of the stock class behind ``cls``; None for a layout, which is none."""
    adoption = getattr(cls, "_layout_kernels", None)
    return adoption.original.forward if adoption is not None else None if hasattr(cls, "is_layout") else cls.forward
