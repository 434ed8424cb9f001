"""`rms_norm_mlp` in plain PyTorch: what the operation means.

Equal bit for bit on the CPU to a transformers norm followed by a gated MLP (source: `LlamaMLP`, transformers 5.22.2),
and with the flavour "none" to the MLP alone.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ...dispatch import EXECUTION_MODES, register_kernel
from ..gated_activation.reference import activate
from ..rms_norm.reference import rms_norm
from . import CONTRACT


@register_kernel(
    name="reference.rms_norm_mlp",
    contract=CONTRACT,
    device="any",
    execution_modes=EXECUTION_MODES,
    input_domain="all that the operation takes",
    solution="reference",
    priority=-1000,
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
    """down(act(gate(h)) * up(h)) with h = rms_norm(x), or x itself; see the operation."""
    normed = (x if flavour == "none" else rms_norm(x, norm_weight, eps, flavour)).to(gate_up.dtype)
    gate_weight, up_weight = gate_up.chunk(2, dim=0)
    gate_bias, up_bias = (None, None) if gate_up_bias is None else gate_up_bias.chunk(2, dim=0)
    # Two products, as stock makes: one of double width may round otherwise.
    gate = functional.linear(normed, gate_weight, gate_bias)
    up = functional.linear(normed, up_weight, up_bias)
    return functional.linear(activate(gate, activation) * up, down, down_bias).contiguous()
