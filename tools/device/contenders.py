"""What is compared: our kernels, stock transformers, PyTorch's norm, torch.compile, and Liger where it is installed.

Each contender is a function of a problem's tensors. One that cannot be had raises `LeftOutError`, which says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.nn import functional

from layout_kernels.ops.gated_activation import triton as activation_kernels
from layout_kernels.ops.rms_norm import triton as norm_kernels
from layout_kernels.ops.rms_norm_mlp import triton as mlp_kernels

EPS = 1e-6
OURS = "layout-kernels"
Function = Callable[..., torch.Tensor]


class LeftOutError(RuntimeError):
    """Why something is not measured here."""


@dataclass(frozen=True)
class Norm:
    """A norm by name: its forward, and its gradients from (grad, x, weight) where autograd is not asked for them."""

    name: str
    forward: Function
    gradients: Callable[..., tuple[torch.Tensor, ...]] | None = None


def stock_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What transformers' LlamaRMSNorm computes, when transformers is not installed."""
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _transformers_norm() -> Norm:
    try:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm
    except ImportError:
        return Norm("stock (LlamaRMSNorm's steps)", stock_norm)

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        module = LlamaRMSNorm(x.shape[-1], EPS)
        # The weight itself, not a parameter made of it: its gradient is asked for.
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    return Norm("stock (transformers)", forward)


def _ours(direct: bool) -> Norm:
    """Through the public operator, or calling the kernels, which is how they run interpreted."""
    if not direct:
        from layout_kernels import rms_norm

        return Norm(OURS, lambda x, weight: rms_norm(x, weight, EPS))
    return Norm(
        OURS,
        lambda x, weight: norm_kernels.rms_norm(x, weight, EPS, "cast_then_scale"),
        lambda grad, x, weight: norm_kernels.rms_norm_backward(grad, x, weight, EPS, "cast_then_scale", True, True),
    )


def _missing(name: str, reason: str) -> Norm:
    def forward(*_: Any) -> NoReturn:
        raise LeftOutError(reason)

    return Norm(name, forward, forward)


def _liger() -> Norm:
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    except ImportError as error:
        return _missing("Liger", f"not installed ({error.name})")
    return Norm("Liger", lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False))


def norms(direct: bool) -> list[Norm]:
    """Ours first, then what it is compared with."""
    own = Norm("F.rms_norm", lambda x, weight: functional.rms_norm(x, (x.shape[-1],), weight, EPS))
    found = [_ours(direct), _transformers_norm(), own]
    if direct:
        return [*found, _missing("torch.compile", "not while interpreting")]
    return [*found, Norm("torch.compile", torch.compile(stock_norm)), _liger()]


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
