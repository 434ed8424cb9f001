"""`linear` on the CPU, by the native extension."""

from __future__ import annotations

import torch
from torch.nn import functional

from ...dispatch import register_kernel
from ..native import direct, operators
from ..products import has_rows, is_ours, is_vector
from . import CONTRACT

_product = direct(operators.cpu_linear)


@register_kernel(
    name="cpu.native.linear",
    contract=CONTRACT,
    device="cpu",
    execution_modes=("eager", "compile"),
    input_domain="all that the operation takes: what is faster here (products.py: dtype, rows, processor); the rest "
    "is handed to PyTorch's product",
    solution="native",
    priority=10,
)
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See the operation. In bf16, processors with bf16 instructions take subnormal factors and products for 0."""
    if is_ours(x.numel() // weight.shape[1], x.dtype) and has_rows(weight) and is_vector(bias):
        return _product(x, weight, bias)
    return functional.linear(x, weight, bias).contiguous()
