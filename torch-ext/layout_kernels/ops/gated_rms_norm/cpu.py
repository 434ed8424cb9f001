"""`gated_rms_norm` on the CPU, by the native extension."""

from __future__ import annotations

import torch

from ...dispatch import register_kernel
from ..native import DTYPES, operators
from . import ACTIVATIONS, BACKWARD_CONTRACT, CONTRACT, FLAVOURS, ORDERS, reference

_DOMAIN = "float32, bfloat16 and float16 in any mixture, any strides; float64 is handed to the reference"
_FLAVOUR = {name: code for code, name in enumerate(FLAVOURS)}
_ORDER = {name: code for code, name in enumerate(ORDERS)}
_ACTIVATION = {name: code for code, name in enumerate(ACTIVATIONS)}
_forward = operators.cpu_gated_rms_norm.default
_backward = operators.cpu_gated_rms_norm_backward.default


@register_kernel(
    name="cpu.native.gated_rms_norm",
    contract=CONTRACT,
    device="cpu",
    execution_modes=("eager", "compile"),
    input_domain=_DOMAIN,
    solution="native",
    priority=10,
)
def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    flavour: str,
    order: str,
    group_size: int | None,
    activation: str,
) -> torch.Tensor:
    """See the operation; float64 is handed to the reference."""
    if x.dtype not in DTYPES:
        return reference.gated_rms_norm(x, gate, weight, eps, flavour, order, group_size, activation)
    return _forward(
        x, gate, weight, eps, _FLAVOUR[flavour], _ORDER[order], group_size or x.shape[-1], _ACTIVATION[activation]
    )


@register_kernel(
    name="cpu.native.gated_rms_norm_backward",
    contract=BACKWARD_CONTRACT,
    device="cpu",
    execution_modes=("eager", "compile"),
    input_domain=_DOMAIN + ", and so is a gradient of another dtype than the result",
    solution="native",
    priority=10,
)
def gated_rms_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    flavour: str,
    order: str,
    group_size: int | None,
    activation: str,
    need_x: bool,
    need_gate: bool,
    need_weight: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """See the operation. The sums over rows are made in blocks that depend on the shape alone, then in order."""
    promoted = weight is not None and flavour == "cast_then_scale" and order == "gate_then_norm"
    result = torch.promote_types(x.dtype, weight.dtype) if promoted and weight is not None else x.dtype
    if x.dtype not in DTYPES or grad.dtype is not result:
        return reference.gated_rms_norm_backward(
            grad, x, gate, weight, eps, flavour, order, group_size, activation, need_x, need_gate, need_weight
        )
    sums = need_weight and weight is not None
    size = group_size or x.shape[-1]
    grad_x, grad_gate, grad_weight = _backward(
        grad, x, gate, weight, eps, _FLAVOUR[flavour], _ORDER[order], size, _ACTIVATION[activation], sums
    )
    return (
        grad_x if need_x else None,
        grad_gate if need_gate else None,
        grad_weight.to(weight.dtype) if sums and weight is not None else None,
    )
