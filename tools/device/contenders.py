"""What is compared: our kernels, stock transformers, PyTorch's norm, torch.compile, and Liger where it is installed.

Each contender is a function of a problem's tensors. One that cannot be had says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from layout_kernels.ops.gated_activation import triton as activation_kernels
from layout_kernels.ops.rms_norm import triton as norm_kernels
from layout_kernels.ops.rms_norm_mlp import triton as mlp_kernels

EPS = 1e-6
OURS = "layout-kernels"
Function = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Norm:
    """A norm by name: its forward, and its gradients from (grad, x, weight); `missing` says why it cannot be had."""

    name: str
    forward: Function | None
    gradients: Callable[..., tuple[torch.Tensor, ...]] | None = None
    missing: str = ""


def stock_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What transformers' LlamaRMSNorm computes, when transformers is not installed."""
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _transformers_norm() -> tuple[Function, str]:
    try:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm
    except ImportError:
        return stock_norm, "stock (LlamaRMSNorm's steps)"

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        module = LlamaRMSNorm(x.shape[-1], EPS)
        # The weight itself, not a parameter made of it: its gradient is asked for.
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    return forward, "stock (transformers)"


def _ours(direct: bool) -> Norm:
    """Through the public operator, or calling the kernels, which is how they run interpreted."""

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if direct:
            return norm_kernels.rms_norm(x, weight, EPS, "cast_then_scale")
        from layout_kernels import rms_norm

        return rms_norm(x, weight, EPS)

    def gradients(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[Any, ...]:
        return norm_kernels.rms_norm_backward(grad, x, weight, EPS, "cast_then_scale", True, True)

    return Norm(OURS, forward, gradients if direct else None)


def _liger() -> Norm:
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    except ImportError as error:
        return Norm("Liger", None, missing=f"not installed ({error.name})")
    return Norm("Liger", lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False))


def norms(direct: bool) -> list[Norm]:
    """Ours first, then what it is compared with."""
    stock, name = _transformers_norm()
    own = Norm("F.rms_norm", lambda x, weight: functional.rms_norm(x, (x.shape[-1],), weight, EPS))
    if direct:
        return [_ours(direct), Norm(name, stock), own, Norm("torch.compile", None, missing="not while interpreting")]
    return [_ours(direct), Norm(name, stock), own, Norm("torch.compile", torch.compile(stock_norm)), _liger()]


def stock_mlp(x: torch.Tensor, weight: torch.Tensor, gate: Any, up: Any, down: Any) -> torch.Tensor:
    """LlamaRMSNorm and LlamaMLP, as stock calls them: three products."""
    h = stock_norm(x, weight)
    return functional.linear(functional.silu(functional.linear(h, gate)) * functional.linear(h, up), down)


def our_mlp(x: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """`rms_norm_mlp` as it is selected."""
    return mlp_kernels.rms_norm_mlp(x, weight, gate_up, down, EPS, "cast_then_scale", "silu", None, None)


def composed_mlp(x: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The same without the kernel for few rows: what that kernel has to beat."""
    h = norm_kernels.rms_norm(x, weight, EPS, "cast_then_scale")
    product = activation_kernels.gated_activation(functional.linear(h, gate_up), "silu")
    return functional.linear(product, down)
