"""`rms_norm_mlp` on Ascend NPUs: the norm and the activation by torch_npu's operators, the products by PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional

from ...dispatch import register_kernel
from ...dispatch.custom_ops import register_custom_op
from ..gated_activation.npu import gated_activation
from ..rms_norm.npu import rms_norm
from . import CONTRACT
from .operator import check_arguments


@register_kernel(
    name="npu.torch_npu.rms_norm_mlp",
    contract=CONTRACT,
    device="npu",
    execution_modes=("eager", "compile", "aclgraph"),
    input_domain="all that the operation takes; what rms_norm and gated_activation hand to the reference, here too",
    solution="torch_npu",
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
    """See the operation. Gate and up are one product, which gives the packed tensor that the activation reads."""
    normed = (x if flavour == "none" else rms_norm(x, norm_weight, eps, flavour)).to(gate_up.dtype)
    product = gated_activation(functional.linear(normed, gate_up, gate_up_bias), activation)
    return functional.linear(product, down, down_bias).contiguous()


def _fake(
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
    check_arguments(x, norm_weight, gate_up, down, eps, flavour, activation, gate_up_bias, down_bias)
    return torch.empty((*x.shape[:-1], down.shape[0]), dtype=gate_up.dtype, device=x.device)


register_custom_op("npu_rms_norm_mlp", rms_norm_mlp, mutates_args=(), dispatch_key="PrivateUse1", fake_impl=_fake)
