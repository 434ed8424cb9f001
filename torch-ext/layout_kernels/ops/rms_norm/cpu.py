"""`rms_norm` on the CPU, by the native extension."""

from __future__ import annotations

import torch

from ...dispatch import register_kernel
from ..native import DTYPES, direct, operators
from . import BACKWARD_CONTRACT, CONTRACT, FLAVOURS, reference

_DOMAIN = "float32, bfloat16 and float16 in any mixture, any strides; float64 is handed to the reference"
_FLAVOUR = {name: code for code, name in enumerate(FLAVOURS)}
_forward = direct(operators.cpu_rms_norm)
_backward = direct(operators.cpu_rms_norm_backward)


@register_kernel(
    name="cpu.native.rms_norm",
    contract=CONTRACT,
    device="cpu",
    execution_modes=("eager", "compile"),
    input_domain=_DOMAIN,
    solution="native",
    priority=10,
)
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, flavour: str) -> torch.Tensor:
    """See the operation; float64 is handed to the reference."""
    if x.dtype not in DTYPES:
        return reference.rms_norm(x, weight, eps, flavour)
    return _forward(x, weight, eps, _FLAVOUR[flavour])


@register_kernel(
    name="cpu.native.rms_norm_backward",
    contract=BACKWARD_CONTRACT,
    device="cpu",
    execution_modes=("eager", "compile"),
    input_domain=_DOMAIN + ", and so is a gradient that has neither x's dtype nor float32",
    solution="native",
    priority=10,
)
def rms_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    flavour: str,
    need_x: bool,
    need_weight: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """See the operation. The sums over rows are made in blocks that depend on the shape alone, then in order."""
    if x.dtype not in DTYPES or grad.dtype not in (x.dtype, torch.float32):
        return reference.rms_norm_backward(grad, x, weight, eps, flavour, need_x, need_weight)
    sums = need_weight and weight is not None
    grad_x, grad_weight = _backward(grad, x, weight, eps, _FLAVOUR[flavour], need_x, sums)
    return grad_x if need_x else None, grad_weight.to(weight.dtype) if sums and weight is not None else None
