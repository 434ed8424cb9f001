"""`gated_activation` on the CPU, by the native extension."""

from __future__ import annotations

import torch

from ...dispatch import register_kernel
from ..native import DTYPES, operators
from . import ACTIVATIONS, BACKWARD_CONTRACT, CONTRACT, reference

_DOMAIN = "float32, bfloat16 and float16, any strides; float64 is handed to the reference"
_ACTIVATION = {name: code for code, name in enumerate(ACTIVATIONS)}
_forward = operators.cpu_gated_activation.default
_backward = operators.cpu_gated_activation_backward.default


@register_kernel(
    name="cpu.native.gated_activation",
    contract=CONTRACT,
    device="cpu",
    execution_modes=("eager", "compile"),
    input_domain=_DOMAIN,
    solution="native",
    priority=10,
)
def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """See the operation; float64 is handed to the reference."""
    if gate_up.dtype not in DTYPES:
        return reference.gated_activation(gate_up, activation)
    return _forward(gate_up, _ACTIVATION[activation])


@register_kernel(
    name="cpu.native.gated_activation_backward",
    contract=BACKWARD_CONTRACT,
    device="cpu",
    execution_modes=("eager", "compile"),
    input_domain=_DOMAIN + ", and so is a gradient of another dtype than gate_up",
    solution="native",
    priority=10,
)
def gated_activation_backward(grad: torch.Tensor, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """See the operation."""
    if gate_up.dtype not in DTYPES or grad.dtype is not gate_up.dtype:
        return reference.gated_activation_backward(grad, gate_up, activation)
    return _backward(grad, gate_up, _ACTIVATION[activation])
