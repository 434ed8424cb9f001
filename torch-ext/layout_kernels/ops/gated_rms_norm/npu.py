"""`gated_rms_norm` on Ascend NPUs: the norm by torch_npu's operator, the gate by PyTorch's.

The backward is the reference's: torch_npu's reads one gamma for a row, and groups have several.
"""

from __future__ import annotations

import torch
import torch_npu

from ...dispatch import register_kernel
from ...dispatch.custom_ops import register_custom_op
from ..ascend import takes
from ..gated_activation.reference import activate
from . import CONTRACT, reference
from .operator import check_arguments, result_dtype


@register_kernel(
    name="npu.torch_npu.gated_rms_norm",
    contract=CONTRACT,
    device="npu",
    execution_modes=("eager", "compile", "aclgraph"),
    input_domain="float32, bfloat16 and float16 in any mixture, any strides, empty too; float64, and all on Atlas "
    "products before A2 and on Ascend 310, are handed to the reference",
    solution="torch_npu",
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
    """See the operation. All is float32 until the flavour rounds."""
    if not takes(x, gate, weight):
        return reference.gated_rms_norm(x, gate, weight, eps, flavour, order, group_size, activation)
    opened = activate(gate.float(), activation)
    gate_first = order == "gate_then_norm"
    rows = x.float() * opened if gate_first else x.float()
    out = _normalised(rows, weight if flavour == "scale_then_cast" else None, eps, group_size)
    if flavour == "cast_then_scale":
        out = out.to(x.dtype)
        out = out if weight is None else weight * out
    if not gate_first:
        out = out * opened
    keeps_dtype = flavour == "cast_then_scale" and gate_first
    return (out if keeps_dtype else out.to(x.dtype)).contiguous()


def _normalised(rows: torch.Tensor, weight: torch.Tensor | None, eps: float, group_size: int | None) -> torch.Tensor:
    """The norm of float32 rows in groups, times the weight, float32. A single group is scaled at once."""
    width = rows.shape[-1]
    size = group_size or width
    at_once = weight is not None and size == width
    gamma = weight.float() if weight is not None and at_once else rows.new_ones(size)
    out = torch_npu.npu_rms_norm(rows.reshape(-1, size), gamma, eps)[0].reshape(rows.shape)
    return out if weight is None or at_once else out * weight


def _fake(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    flavour: str,
    order: str,
    group_size: int | None,
    activation: str,
) -> torch.Tensor:
    check_arguments(x, gate, weight, eps, flavour, order, group_size, activation)
    dtype = result_dtype(x.dtype, None if weight is None else weight.dtype, flavour, order)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


register_custom_op("npu_gated_rms_norm", gated_rms_norm, mutates_args=(), dispatch_key="PrivateUse1", fake_impl=_fake)
