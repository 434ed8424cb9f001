"""`rms_norm_mlp` on the CPU, by the native extension."""

from __future__ import annotations

import torch
from torch.nn import functional

from ...dispatch import register_kernel
from ..gated_activation import ACTIVATIONS
from ..gated_activation.cpu import gated_activation
from ..gated_activation.reference import activate
from ..native import HALVES, direct, operators
from ..products import has_rows, is_ours, is_vector
from ..rms_norm.cpu import rms_norm
from . import CONTRACT, FLAVOURS

# The codes of torch_binding.cpp: those of the norm, then "none".
_FLAVOUR = {name: code for code, name in enumerate(FLAVOURS)}
_ACTIVATION = {name: code for code, name in enumerate(ACTIVATIONS)}
_fused = direct(operators.cpu_rms_norm_mlp)


@register_kernel(
    name="cpu.native.rms_norm_mlp",
    contract=CONTRACT,
    device="cpu",
    execution_modes=("eager", "compile"),
    input_domain="all that the operation takes: in one call where that is faster (products.py: dtype, rows and "
    "processor); the rest composed of the native norm and activation and PyTorch's products",
    solution="native",
    priority=10,
)
def rms_norm_mlp(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    eps: float,
    flavour: str,
    activation: str,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> torch.Tensor:
    """See the operation."""
    dtype = x.dtype
    if (
        dtype is gate_up.dtype
        and is_ours(x.numel() // gate_up.shape[1], dtype)
        and (norm_weight is None or norm_weight.dtype is dtype or flavour != "cast_then_scale")
        and has_rows(gate_up)
        and has_rows(down)
        and is_vector(gate_up_bias)
        and is_vector(down_bias)
    ):
        return _fused(
            x, norm_weight, gate_up, down, eps, _FLAVOUR[flavour], _ACTIVATION[activation], gate_up_bias, down_bias
        )
    normed = (x if flavour == "none" else rms_norm(x, norm_weight, eps, flavour)).to(gate_up.dtype)
    if gate_up.dtype in HALVES:
        product = gated_activation(functional.linear(normed, gate_up, gate_up_bias), activation)
    else:
        # In full precision one product of double width is slower than two, by up to a sixth with few rows.
        gate_weight, up_weight = gate_up.chunk(2, dim=0)
        gate_bias, up_bias = (None, None) if gate_up_bias is None else gate_up_bias.chunk(2, dim=0)
        gate = functional.linear(normed, gate_weight, gate_bias)
        product = activate(gate, activation).mul_(functional.linear(normed, up_weight, up_bias))
    return functional.linear(product, down, down_bias).contiguous()
