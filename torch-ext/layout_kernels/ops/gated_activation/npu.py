"""`gated_activation` on Ascend NPUs, by torch_npu's operators.

`npu_swiglu` activates the first half; `npu_geglu` the second, unless told otherwise. Both compute in float32 and round
once, after the product, which is nearer to the exact result than the operation's two roundings.
"""

from __future__ import annotations

import torch
import torch_npu

from ...dispatch import register_kernel
from ...dispatch.custom_ops import register_custom_op
from ..ascend import MAX_DIM, takes
from . import BACKWARD_CONTRACT, CONTRACT, reference
from .operator import check_arguments

_DOMAIN = (
    "float32, bfloat16 and float16, up to 8 dimensions; empty tensors, silu of a strided tensor, float64, and all on "
    "Atlas products before A2 and on Ascend 310, are handed to the reference"
)
_APPROXIMATE = {"gelu": 0, "gelu_tanh": 1}
_ALIGNMENT = 64


def _fits(gate_up: torch.Tensor, activation: str) -> bool:
    # A strided tensor would have to be copied first, and then nothing is won over two plain operators.
    return (
        takes(gate_up)
        and gate_up.numel() > 0
        and gate_up.dim() <= MAX_DIM
        and (activation != "silu" or gate_up.is_contiguous())
    )


@register_kernel(
    name="npu.torch_npu.gated_activation",
    contract=CONTRACT,
    device="npu",
    execution_modes=("eager", "compile", "aclgraph"),
    input_domain=_DOMAIN,
    solution="torch_npu",
    priority=10,
)
def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """See the operation."""
    if not _fits(gate_up, activation):
        return reference.gated_activation(gate_up, activation)
    if activation == "silu":
        return torch_npu.npu_swiglu(gate_up, -1)
    return torch_npu.npu_geglu(gate_up, -1, _APPROXIMATE[activation], True)[0]


@register_kernel(
    name="npu.torch_npu.gated_activation_backward",
    contract=BACKWARD_CONTRACT,
    device="npu",
    execution_modes=("eager", "compile", "aclgraph"),
    input_domain=_DOMAIN + ", and so are a gradient of another dtype than gate_up, and silu of halves whose rows are "
    "no multiple of 64 bytes",
    solution="torch_npu",
    priority=10,
)
def gated_activation_backward(grad: torch.Tensor, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """See the operation."""
    if not _fits(gate_up, activation) or grad.dtype is not gate_up.dtype:
        return reference.gated_activation_backward(grad, gate_up, activation)
    if activation == "silu":
        if gate_up.shape[-1] // 2 * gate_up.element_size() % _ALIGNMENT:
            return reference.gated_activation_backward(grad, gate_up, activation)
        return torch_npu.npu_swiglu_backward(grad.contiguous(), gate_up, -1)
    approximate = _APPROXIMATE[activation]
    _, activated = torch_npu.npu_geglu(gate_up, -1, approximate, True)
    return torch_npu.npu_geglu_grad(grad, gate_up, activated, -1, approximate, True)


def _fake(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    check_arguments(gate_up, activation)
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


register_custom_op(
    "npu_gated_activation", gated_activation, mutates_args=(), dispatch_key="PrivateUse1", fake_impl=_fake
)
