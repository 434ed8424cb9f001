"""`gated_activation` in plain PyTorch: what the operation means.

Equal bit for bit on the CPU to `act(gate) * up` of transformers' gated MLPs (source: `LlamaMLP`, and `ACT2FN` for the
activations, transformers 5.22.2), whose gate and up are tensors of their own.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from ...dispatch import EXECUTION_MODES, register_kernel
from ..arguments import compute_dtype
from . import BACKWARD_CONTRACT, CONTRACT


def activate(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """silu, gelu (exact, by erf), gelu_tanh or sigmoid of `gate`, rounded to its dtype."""
    if activation == "silu":
        return functional.silu(gate)
    if activation == "sigmoid":
        return torch.sigmoid(gate)
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def derivative(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """The derivative of `activate` at `gate`, from plain operators, so that it can be differentiated again."""
    if activation in ("silu", "sigmoid"):
        sigmoid = torch.sigmoid(gate)
        slope = sigmoid * (1 - sigmoid)
        return slope if activation == "sigmoid" else sigmoid + gate * slope
    if activation == "gelu":
        cdf = 0.5 * (1 + torch.erf(gate * math.sqrt(0.5)))
        return cdf + gate * torch.exp(-0.5 * gate * gate) * (1 / math.sqrt(2 * math.pi))
    cubic = 0.044715  # of the tanh approximation: torch.nn.functional.gelu
    tanh = torch.tanh(math.sqrt(2 / math.pi) * (gate + cubic * gate.pow(3)))
    inner = math.sqrt(2 / math.pi) * (1 + 3 * cubic * gate * gate)
    return 0.5 * (1 + tanh) + 0.5 * gate * (1 - tanh * tanh) * inner


@register_kernel(
    name="reference.gated_activation",
    contract=CONTRACT,
    device="any",
    execution_modes=EXECUTION_MODES,
    input_domain="all that the operation takes",
    solution="reference",
    priority=-1000,
)
def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up, rounded to the dtype after each of the two; the first half of the last dimension is the gate."""
    gate, up = gate_up.chunk(2, dim=-1)
    # Contiguous first: PyTorch's float32 silu gives other last bits on a strided tensor, and stock's is not strided.
    return (activate(gate.contiguous(), activation) * up).contiguous()


@register_kernel(
    name="reference.gated_activation_backward",
    contract=BACKWARD_CONTRACT,
    device="any",
    execution_modes=EXECUTION_MODES,
    input_domain="all that the operation takes",
    solution="reference",
    priority=-1000,
)
def gated_activation_backward(grad: torch.Tensor, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """[grad * up * act'(gate), grad * act(gate)]: gate_up's shape; the activation is rounded as in the forward."""
    compute = compute_dtype(gate_up.dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    grad = grad.to(compute)
    grad_gate = grad * up.to(compute) * derivative(gate.to(compute), activation)
    grad_up = grad * activate(gate, activation).to(compute)
    return torch.cat((grad_gate, grad_up), dim=-1).to(gate_up.dtype).contiguous()
