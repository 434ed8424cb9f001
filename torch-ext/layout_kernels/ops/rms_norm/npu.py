"""`rms_norm` on Ascend NPUs, by torch_npu's operators.

`npu_rms_norm` computes x / rms(x) * gamma in float32 and rounds once (source: CANN's ops-nn, rms_norm.h). In half
precision `cast_then_scale` asks for a second rounding before the product; leaving it out stays within the operation's
tolerance, as the result is nearer to the exact one. gamma must be there and have x's dtype, so an unscaled norm gets
ones, and mixed dtypes are widened, or scaled afterwards where the flavour rounds first.
"""

from __future__ import annotations

import torch
import torch_npu

from ...dispatch import register_kernel
from ...dispatch.custom_ops import register_custom_op
from ..ascend import as_rows, has_gemma_rms_norm, takes
from . import BACKWARD_CONTRACT, CONTRACT, reference
from .operator import check_arguments, result_dtype

_DOMAIN = (
    "float32, bfloat16 and float16 in any mixture, any strides, empty too; float64, and all on Atlas products before "
    "A2 and on Ascend 310, are handed to the reference"
)
_norm = torch_npu.npu_rms_norm
_norm_backward = torch_npu.npu_rms_norm_backward
# torch_npu 2.1 has no such operator.
_gemma_norm = getattr(torch_npu, "npu_gemma_rms_norm", None)


@register_kernel(
    name="npu.torch_npu.rms_norm",
    contract=CONTRACT,
    device="npu",
    execution_modes=("eager", "compile", "aclgraph"),
    input_domain=_DOMAIN,
    solution="torch_npu",
    priority=10,
)
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, flavour: str) -> torch.Tensor:
    """See the operation."""
    if not takes(x, weight):
        return reference.rms_norm(x, weight, eps, flavour)
    rows = as_rows(x)
    if weight is None:
        out = _norm(rows, rows.new_ones(rows.shape[-1]), eps)[0]
    elif flavour == "one_plus_scale":
        out = _one_plus_scale(rows, weight, eps)
    elif weight.dtype is x.dtype or x.dtype is torch.float32:
        out = _norm(rows, weight.to(x.dtype), eps)[0]
    elif flavour == "cast_then_scale":
        out = weight * _norm(rows, rows.new_ones(rows.shape[-1]), eps)[0]
    else:
        out = _norm(rows.float(), weight.float(), eps)[0].to(x.dtype)
    return out.reshape(x.shape)


def _one_plus_scale(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The vendor's Gemma norm where it takes the tensors; it adds the one in float32, as the flavour asks."""
    if (
        _gemma_norm is not None
        and weight.dtype is rows.dtype
        and rows.is_contiguous()
        and weight.is_contiguous()
        and rows.numel() > 0
        and has_gemma_rms_norm(rows.device)
    ):
        return _gemma_norm(rows, weight, eps)[0]
    return _norm(rows.float(), 1.0 + weight.float(), eps)[0].to(rows.dtype)


@register_kernel(
    name="npu.torch_npu.rms_norm_backward",
    contract=BACKWARD_CONTRACT,
    device="npu",
    execution_modes=("eager", "compile", "aclgraph"),
    input_domain=_DOMAIN + ", and so are empty tensors",
    solution="torch_npu",
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
    """See the operation. The vendor's operator reads 1 / rms(x), which its forward gives, and makes both gradients.

    Its gradient of gamma is float32 whatever the dtypes are, and is rounded here to the weight's.
    """
    if not takes(grad, x, weight) or x.numel() == 0:
        return reference.rms_norm_backward(grad, x, weight, eps, flavour, need_x, need_weight)
    scale = weight if weight is not None else x.new_ones(x.shape[-1])
    if flavour == "one_plus_scale" and weight is not None:
        scale = 1.0 + weight.float()
    dtype = x.dtype if grad.dtype is x.dtype and scale.dtype is x.dtype else torch.float32
    rows, scale = as_rows(x).to(dtype), scale.to(dtype)
    _, rstd = _norm(rows, scale, eps)
    grad_x, grad_scale = _norm_backward(as_rows(grad).to(dtype), rows, scale, rstd)
    return (
        grad_x.to(x.dtype).reshape(x.shape) if need_x else None,
        grad_scale.to(weight.dtype) if need_weight and weight is not None else None,
    )


def _fake(x: torch.Tensor, weight: torch.Tensor | None, eps: float, flavour: str) -> torch.Tensor:
    check_arguments(x, weight, eps, flavour)
    dtype = result_dtype(x.dtype, None if weight is None else weight.dtype, flavour)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


register_custom_op("npu_rms_norm", rms_norm, mutates_args=(), dispatch_key="PrivateUse1", fake_impl=_fake)
