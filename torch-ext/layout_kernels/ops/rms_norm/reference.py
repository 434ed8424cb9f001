"""`rms_norm` in plain PyTorch: what the operation means.

Equal to transformers' classes bit for bit on the CPU in float32, bfloat16 and float16; float64, which transformers
computes in float32, is computed in float64 here. Sources, in transformers 5.22.2: `LlamaRMSNorm` for cast_then_scale,
`Olmo2RMSNorm` and `Gemma3nRMSNorm` for scale_then_cast, `GemmaRMSNorm` for one_plus_scale.
"""

from __future__ import annotations

import torch

from ...dispatch import EXECUTION_MODES, register_kernel
from ..arguments import compute_dtype
from . import BACKWARD_CONTRACT, CONTRACT


def _normalised(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows over their root mean square, and its reciprocal [..., 1], in the dtype of the computation."""
    rows = x.to(compute_dtype(x.dtype))
    rstd = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)
    return rows * rstd, rstd


@register_kernel(
    name="reference.rms_norm",
    contract=CONTRACT,
    device="any",
    execution_modes=EXECUTION_MODES,
    input_domain="all that the operation takes",
    solution="reference",
    priority=-1000,
)
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, flavour: str) -> torch.Tensor:
    """n = x / sqrt(mean(x^2) + eps), then the flavour's scale and rounding; see the operation."""
    normalised, _ = _normalised(x, eps)
    if weight is None:
        out = normalised.to(x.dtype)
    elif flavour == "cast_then_scale":
        out = weight * normalised.to(x.dtype)
    elif flavour == "scale_then_cast":
        out = (weight * normalised).to(x.dtype)
    else:
        out = (normalised * (1.0 + weight.to(normalised.dtype))).to(x.dtype)
    return out.contiguous()


@register_kernel(
    name="reference.rms_norm_backward",
    contract=BACKWARD_CONTRACT,
    device="any",
    execution_modes=EXECUTION_MODES,
    input_domain="all that the operation takes",
    solution="reference",
    priority=-1000,
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
    """Gradients of x and weight, or None where not needed.

    With g the gradient times the scale: dx = rstd * (g - n * mean(g * n)), dweight = sum over rows of grad * n, where
    cast_then_scale multiplies by n as rounded to the dtype of x. Sums are made in the dtype of the computation.
    """
    normalised, rstd = _normalised(x, eps)
    grad = grad.to(normalised.dtype)
    grad_x = grad_weight = None
    if need_weight and weight is not None:
        factor = normalised.to(x.dtype) if flavour == "cast_then_scale" else normalised
        width = x.shape[-1]
        grad_weight = (grad * factor).reshape(-1, width).sum(0).to(weight.dtype)
    if need_x:
        if weight is not None:
            scale = weight.to(normalised.dtype)
            grad = grad * (1.0 + scale if flavour == "one_plus_scale" else scale)
        grad_x = rstd * (grad - normalised * (grad * normalised).mean(-1, keepdim=True))
        grad_x = grad_x.to(x.dtype).contiguous()
    return grad_x, grad_weight
