"""`linear` in plain PyTorch: what the operation means."""

from __future__ import annotations

import torch
from torch.nn import functional

from ...dispatch import EXECUTION_MODES, register_kernel
from . import CONTRACT


@register_kernel(
    name="reference.linear",
    contract=CONTRACT,
    device="any",
    execution_modes=EXECUTION_MODES,
    input_domain="all that the operation takes",
    solution="reference",
    priority=-1000,
)
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight^T + bias; see the operation."""
    return functional.linear(x, weight, bias).contiguous()
