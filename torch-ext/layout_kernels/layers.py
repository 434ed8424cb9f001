"""The layers of this kernel repository, in pairs.

``<Name>`` is what runs: stateless, only ``forward``. ``<Name>Layout`` is what transformers puts into the model while a
checkpoint is loaded: the parameters under the kernel's names, and the rules that fill them. When the load ends the
layout settles: what stands there then is the stock module, whose class runs ``<Name>.forward`` (``running/adopted``).
Both are named in a ``KernelConfig`` by ``<Name>``. Nothing is computed here: a layer calls an operation of ``ops``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .layouts.fused import FusedLayout
from .layouts.mlp import PlainMLPLayout
from .layouts.norm import NormLayout
from .ops.gated_activation import gated_activation
from .ops.gated_rms_norm import gated_rms_norm
from .ops.linear import linear
from .ops.rms_norm import rms_norm
from .ops.rms_norm_mlp import rms_norm_mlp
from .recognition import gated_norms, norms
from .running import gated_mlp, norm
from .running.plain import (
    LINEAR_FORWARD,
    TENSORS,
    child,
    is_unwatched,
    mark_linear_forward,
    parameter,
    weight_and_bias,
)


class CustomRMSNorm(nn.Module):
    """RMSNorm as Llama, Qwen and Mistral compute it: ``scale * (x / rms(x)).to(x.dtype)``.

    ``hidden_states`` [..., hidden_size], float16, bfloat16 or float32; the result has the dtype of ``scale * x``.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """RMSNorm of the last dimension; any leading dimensions."""
        return norm.run(self, hidden_states, "cast_then_scale")


class CustomRMSNormLayout(NormLayout):
    """Holds ``scale`` for :class:`CustomRMSNorm`; see :class:`NormLayout`."""

    forward = CustomRMSNorm.forward
    layer = CustomRMSNorm
    flavour = "cast_then_scale"


class FP32RMSNorm(nn.Module):
    """RMSNorm as OLMo 2 computes it: ``(scale * (x / rms(x)) in float32).to(x.dtype)``; scale may be None."""

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """RMSNorm of the last dimension; any leading dimensions."""
        return norm.run(self, hidden_states, "scale_then_cast")


class FP32RMSNormLayout(NormLayout):
    """Holds ``scale`` for :class:`FP32RMSNorm`; see :class:`NormLayout`."""

    forward = FP32RMSNorm.forward
    layer = FP32RMSNorm
    flavour = "scale_then_cast"


class ZeroCenteredRMSNorm(nn.Module):
    """RMSNorm as Gemma computes it: ``((1 + scale) * (x / rms(x)) in float32).to(x.dtype)``."""

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """RMSNorm of the last dimension; any leading dimensions."""
        return norm.run(self, hidden_states, "one_plus_scale")


class ZeroCenteredRMSNormLayout(NormLayout):
    """Holds ``scale`` for :class:`ZeroCenteredRMSNorm`; see :class:`NormLayout`."""

    forward = ZeroCenteredRMSNorm.forward
    layer = ZeroCenteredRMSNorm
    flavour = "one_plus_scale"


class RMSNorm(nn.Module):
    """RMSNorm that keeps the module's own ``weight``: for the hub names "RMSNorm" and "RMSNormZeroCentered".

    The hub names cover classes that compute different things; what a class computes is found once, by running it.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """RMSNorm of the last dimension, in the flavour of the module's own class."""
        flavour, eps_name = norms.norm_class_flavour(self)
        return norm.compute(self, hidden_states, getattr(self, eps_name), flavour)


class RMSNormGated(nn.Module):
    """RMSNorm with a gate, for the hub name "RMSNormGated"; what the class computes is found by running it."""

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Gated RMSNorm of the last dimension; ``gate`` has the shape of ``hidden_states``."""
        flavour, order, group_size, activation, eps_name = gated_norms.class_arguments(self)
        eps = getattr(self, eps_name)
        return gated_rms_norm(hidden_states, gate, self.weight, eps, flavour, order, group_size, activation)


class Linear(nn.Module):
    """The product of ``nn.Linear``, for layers of a model that no other layer of this package holds.

    No class of transformers carries the hub name "Linear": ``kernel_loading(linear=True)`` gives it to ``nn.Linear``.
    """

    can_torch_compile = True
    has_backward = True

    # `input` is the name that nn.Linear.forward has for it, and `kernels` compares the two.
    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """``input @ weight^T + bias`` on the last dimension, [..., in_features] to [..., out_features]."""
        stock = type(self).forward
        if stock is not LINEAR_FORWARD and not hasattr(stock, "is_linear_forward"):
            return stock(self, input)  # patched, or of another class, since ours was bound
        weight = parameter(self, "weight")
        if type(weight) in TENSORS and is_unwatched():
            return linear(input, weight, parameter(self, "bias"))
        return functional.linear(input, weight, self.bias)  # quantised or sharded: the tensor knows how to multiply


mark_linear_forward(Linear.forward)


class GatedMLP(nn.Module):
    """``down_proj(act_fn(gate_proj(x)) * up_proj(x))`` with gate and up as one product, in one call.

    The call reads the weights, so it is made only where each product is a plain ``nn.Linear`` without hooks and the
    rows of gate and up lie one after the other; else (offloaded, wrapped, quantised, sharded) the class's own forward
    calls the modules one by one.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """The MLP on the last dimension, [..., hidden_size] to [..., hidden_size]."""
        return gated_mlp.run(self, hidden_states)


class GatedMLPLayout(PlainMLPLayout):
    """Holds ``gate_up_proj``, ``down_proj`` and ``act_fn`` for :class:`GatedMLP`; see :class:`PlainMLPLayout`."""

    forward = GatedMLP.forward
    layer = GatedMLP


class RMSNormMLP(nn.Module):
    """``down_proj(act_fn(gate) * up)`` of a normalised input, ``gate_up_proj(rms_norm(x))``, in one operation.

    What a layout runs that has not settled. In a settled model the norm runs in its own place and the MLP is a
    :class:`GatedMLP`: whoever calls or watches one of them finds what stock computes, and it is as fast.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norm and MLP on the last dimension, [..., hidden_size] to [..., hidden_size]."""
        scale, gate_up, down = parameter(self, "scale"), child(self, "gate_up_proj"), child(self, "down_proj")
        first, second = weight_and_bias(gate_up), weight_and_bias(down)
        if first is not None and second is not None:
            settings = self.variance_epsilon, self.flavour, self.activation
            return rms_norm_mlp(hidden_states, scale, first[0], second[0], *settings, first[1], second[1])
        normalised = rms_norm(hidden_states, scale, self.variance_epsilon, self.flavour)
        return down(gated_activation(gate_up(normalised), self.activation))


_NORM_LAYERS = {
    layout.flavour: layout.layer for layout in (CustomRMSNormLayout, FP32RMSNormLayout, ZeroCenteredRMSNormLayout)
}


class RMSNormMLPLayout(FusedLayout):
    """For :class:`RMSNormMLP`; see :class:`FusedLayout`."""

    forward = RMSNormMLP.forward
    kinds = ("RMSNorm", "MLP")
    layer, norm_layers = GatedMLP, _NORM_LAYERS


class RMSNormMLPRMSNorm(nn.Module):
    """A norm, a gated MLP and a second norm, as Gemma 2 and 3 run them in a row: see :class:`RMSNormMLP`."""

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norm, MLP and norm on the last dimension, [..., hidden_size] to [..., hidden_size]."""
        output = RMSNormMLP.forward(self, hidden_states)
        return rms_norm(output, self.post_scale, self.post_variance_epsilon, self.post_flavour)


class RMSNormMLPRMSNormLayout(FusedLayout):
    """For :class:`RMSNormMLPRMSNorm`; see :class:`FusedLayout`."""

    forward = RMSNormMLPRMSNorm.forward
    kinds = ("RMSNorm", "MLP", "RMSNorm")
    layer, norm_layers = GatedMLP, _NORM_LAYERS
