"""`gated_rms_norm` in plain PyTorch: what the operation means.

Equal bit for bit on the CPU to transformers' classes (5.22.2): `MambaRMSNormGated` of mamba2 and bamba
(gate_then_norm), `Zamba2RMSNormGated` (the same in groups), `Qwen3NextRMSNormGated` (norm_then_gate),
`FalconH1RMSNormGated` (both, in groups, scale_then_cast) and `KimiLinearRMSNormGated` (norm_then_gate,
scale_then_cast, sigmoid).
"""

from __future__ import annotations

import torch

from ...dispatch import EXECUTION_MODES, register_kernel
from ..arguments import compute_dtype
from ..gated_activation.reference import activate, derivative
from . import BACKWARD_CONTRACT, CONTRACT


def _normalised(rows: torch.Tensor, eps: float, group_size: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Each group of each row over its root mean square, and its reciprocal; both [..., groups, group_size or 1]."""
    groups = rows.unflatten(-1, (-1, group_size or rows.shape[-1]))
    rstd = torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    return groups * rstd, rstd


def _through_norm(grad: torch.Tensor, normalised: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """What a gradient of the normalised groups is before them; [..., width]."""
    grad = grad.unflatten(-1, normalised.shape[-2:])
    return (rstd * (grad - normalised * (grad * normalised).mean(-1, keepdim=True))).flatten(-2)


def _scaled(normalised: torch.Tensor, weight: torch.Tensor | None, flavour: str, dtype: torch.dtype) -> torch.Tensor:
    """The scale; cast_then_scale rounds to `dtype` first."""
    if flavour == "cast_then_scale":
        normalised = normalised.to(dtype)
    return normalised if weight is None else weight * normalised


@register_kernel(
    name="reference.gated_rms_norm",
    contract=CONTRACT,
    device="any",
    execution_modes=EXECUTION_MODES,
    input_domain="all that the operation takes",
    solution="reference",
    priority=-1000,
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
    """The norm of x in groups and act(gate), which is multiplied in before or after; see the operation."""
    rows = x.to(compute_dtype(x.dtype))
    opened = activate(gate.to(rows.dtype).contiguous(), activation)
    if order == "gate_then_norm":
        rows = rows * opened
    out = _scaled(_normalised(rows, eps, group_size)[0].flatten(-2), weight, flavour, x.dtype)
    if order == "norm_then_gate":
        out = (out * opened).to(x.dtype)
    elif flavour == "scale_then_cast":
        out = out.to(x.dtype)
    return out.contiguous()


@register_kernel(
    name="reference.gated_rms_norm_backward",
    contract=BACKWARD_CONTRACT,
    device="any",
    execution_modes=EXECUTION_MODES,
    input_domain="all that the operation takes",
    solution="reference",
    priority=-1000,
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
    """Gradients of x, gate and weight, or None where not needed; sums are made in the dtype of the computation.

    norm_then_gate, out = s * a with s the scaled norm: dgate = grad * s * act'(gate), and grad * a goes into the norm.
    gate_then_norm, the norm of u = x * a: its gradient du gives dx = du * a and dgate = du * x * act'(gate).
    """
    compute = compute_dtype(x.dtype)
    grad, rows, gate_rows = grad.to(compute), x.to(compute), gate.to(compute)
    opened, slope = activate(gate_rows, activation), derivative(gate_rows, activation)
    gate_first = order == "gate_then_norm"
    normalised, rstd = _normalised(rows * opened if gate_first else rows, eps, group_size)
    flat = normalised.flatten(-2)
    grad_x = grad_gate = grad_weight = None
    if not gate_first:
        if need_gate:
            grad_gate = grad * _scaled(flat, weight, flavour, x.dtype).to(compute) * slope
        grad = grad * opened
    if need_weight and weight is not None:
        factor = flat.to(x.dtype) if flavour == "cast_then_scale" else flat
        grad_weight = (grad * factor).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    inner = _through_norm(grad if weight is None else grad * weight.to(compute), normalised, rstd)
    if gate_first and need_gate:
        grad_gate = inner * rows * slope
    if need_x:
        grad_x = (inner * opened if gate_first else inner).to(x.dtype).contiguous()
    return grad_x, None if grad_gate is None else grad_gate.to(gate.dtype).contiguous(), grad_weight
