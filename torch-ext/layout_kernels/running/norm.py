"""How a norm with one of our layers runs: as our operation, else as its own class does."""

from __future__ import annotations

from typing import Any

import torch

from ..ops.rms_norm import rms_norm
from ..ops.rms_norm.operator import direct, fits
from ..recognition import norms
from .plain import TENSORS, is_for_operators, parameter

_is_compiling = torch.compiler.is_compiling


def run(norm: Any, x: torch.Tensor, flavour: str) -> torch.Tensor:
    """`rms_norm` of the last dimension, with the norm's own weight and epsilon.

    Raises:
        ValueError: `kernels` has bound the layer to a loaded model's norm (``set_use_kernels``) that computes
            something else.
    """
    cls = type(norm)
    adoption = getattr(cls, "_layout_kernels", None)
    if adoption is not None:
        if adoption.original.forward is not adoption.forward:
            return adoption.original.forward(norm, x)  # its class was patched since
        return compute(norm, x, getattr(norm, adoption.eps_name), flavour)
    if hasattr(cls, "is_layout") or not hasattr(cls, "kernel_layer_name"):
        return compute(norm, x, norm.variance_epsilon, flavour)
    found, eps_name = norms.norm_class_flavour(norm)
    if found != flavour:
        raise ValueError(
            f"{cls.__name__} computes {found} ({norms.DESCRIPTIONS[found]}), the layer that was bound to it "
            f"{flavour} ({norms.DESCRIPTIONS[flavour]}). In a loaded model name the layer RMSNorm, which computes "
            'what the class does, or call apply_kernel("cpu_fused_rmsnorm", model=model)'
        )
    return compute(norm, x, getattr(norm, eps_name), flavour)


def compute(norm: Any, x: torch.Tensor, eps: Any, flavour: str) -> torch.Tensor:
    """`rms_norm` with this epsilon.

    What the operation does not take (integers, a weight that broadcasts or is sharded or was taken away, an epsilon
    that is a tensor) goes to the stock forward: its result, or its error.
    """
    weight = parameter(norm, "weight")
    if weight is not None and not _is_compiling() and (result := direct(x, weight, eps, flavour)) is not None:
        return result
    cls: Any = type(norm)
    stock = _stock_forward(cls)
    if stock is None or (type(eps) in (float, int) and _is_taken(cls, x, weight, float(eps), flavour)):
        return rms_norm(x, weight, eps, flavour)
    return stock(norm, x)


def _is_taken(cls: Any, x: torch.Tensor, weight: torch.Tensor | None, eps: float, flavour: str) -> bool:
    if weight is None and hasattr(cls, "_layout_kernels") and "weight" not in cls._layout_kernels.lacks:
        return False  # it had one
    return is_for_operators(x) and (weight is None or type(weight) in TENSORS) and fits(x, weight, eps, flavour)


def _stock_forward(cls: Any) -> Any:
    """Of the stock class behind ``cls``; None for a layout, which is none."""
    adoption = getattr(cls, "_layout_kernels", None)
    return adoption.original.forward if adoption is not None else None if hasattr(cls, "is_layout") else cls.forward
