"""The layers of this kernel repository, in pairs.

``<Name>`` is what ``kernels`` binds: stateless, only ``forward``. ``<Name>Layout`` is what transformers puts into the
model before the checkpoint is loaded: the parameters, and the rules that fill them. Both are named in a
``KernelConfig`` by ``<Name>``. Nothing is computed here: a layer calls an operation of ``ops``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import flavours, gated, parts
from .layout import Layout
from .locations import Rule
from .ops.gated_activation import gated_activation
from .ops.gated_rms_norm import gated_rms_norm
from .ops.linear import linear
from .ops.rms_norm import rms_norm
from .ops.rms_norm_mlp import rms_norm_mlp
from .plain import child, mark_linear_forward, parameter, weight_and_bias


class CustomRMSNorm(nn.Module):
    """RMSNorm as Llama, Qwen and Mistral compute it: ``scale * (x / rms(x)).to(x.dtype)``.

    ``hidden_states`` [..., hidden_size], float16, bfloat16 or float32; the result has the dtype of ``scale * x``.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """RMSNorm of the last dimension; any leading dimensions."""
        return rms_norm(hidden_states, parameter(self, "scale"), self.variance_epsilon)


class NormLayout(Layout):
    """What the layouts of a norm share: ``scale`` [hidden_size], from the checkpoint's ``weight``, and epsilon.

    Takes the arguments of the class that it replaces: ``(hidden_size, eps=1e-6)``, ``dim=`` for ``hidden_size``,
    positional or by name; for a norm without weight ``with_scale=False``, or epsilon alone. Loading reads epsilon
    from an instance of that class and refuses a class that computes another flavour.
    """

    flavour = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.arguments: parts.Arguments = (args, dict(kwargs))
        self.variance_epsilon = 1e-6
        self.build(self._fill)

    def _fill(self) -> None:
        size, self.variance_epsilon = parts.norm_arguments(self.arguments)
        start = 0.0 if self.flavour == "one_plus_scale" else 1.0  # a factor of one
        self.register_parameter("scale", None if size is None else nn.Parameter(torch.full((size,), start)))

    @property
    def weight(self) -> torch.Tensor | None:
        """``scale`` under its former name, which parents read: Mamba's block casts to ``norm.weight.dtype``."""
        return getattr(self, "scale", None)

    def rules(self) -> list[Rule]:
        """See :meth:`Layout.rules`."""
        return [Rule("scale", ("weight",))] if getattr(self, "scale", None) is not None else []

    def inspect(self, parent: nn.Module) -> None:
        """Compare with the class that was replaced, and take over its epsilon."""
        scale: Any = self.scale
        finding, eps = parts.replaced_norm(type(self), parent, self.arguments, None if scale is None else scale.shape)
        if finding.flavour != self.flavour and (scale is not None or finding.flavour is None):
            raise parts.wrong_flavour(type(self).__name__.removesuffix("Layout"), finding, self.flavour)
        self.variance_epsilon = eps

    def extra_repr(self) -> str:
        """Shape and epsilon, as transformers' norms print them."""
        scale: Any = getattr(self, "scale", None)
        return f"{None if scale is None else tuple(scale.shape)}, eps={self.variance_epsilon}"


class CustomRMSNormLayout(NormLayout):
    """Holds ``scale`` for :class:`CustomRMSNorm`; see :class:`NormLayout`."""

    forward = CustomRMSNorm.forward
    flavour = "cast_then_scale"


class FP32RMSNorm(nn.Module):
    """RMSNorm as OLMo 2 computes it: ``(scale * (x / rms(x)) in float32).to(x.dtype)``; scale may be None."""

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """RMSNorm of the last dimension; any leading dimensions."""
        return rms_norm(hidden_states, parameter(self, "scale"), self.variance_epsilon, "scale_then_cast")


class FP32RMSNormLayout(NormLayout):
    """Holds ``scale`` for :class:`FP32RMSNorm`; see :class:`NormLayout`."""

    forward = FP32RMSNorm.forward
    flavour = "scale_then_cast"


class ZeroCenteredRMSNorm(nn.Module):
    """RMSNorm as Gemma computes it: ``((1 + scale) * (x / rms(x)) in float32).to(x.dtype)``."""

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """RMSNorm of the last dimension; any leading dimensions."""
        return rms_norm(hidden_states, parameter(self, "scale"), self.variance_epsilon, "one_plus_scale")


class ZeroCenteredRMSNormLayout(NormLayout):
    """Holds ``scale`` for :class:`ZeroCenteredRMSNorm`; see :class:`NormLayout`."""

    forward = ZeroCenteredRMSNorm.forward
    flavour = "one_plus_scale"


class RMSNorm(nn.Module):
    """RMSNorm that keeps the module's own ``weight``: for the hub names "RMSNorm" and "RMSNormZeroCentered".

    The hub names cover classes that compute different things; what a class computes is found once, by running it.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """RMSNorm of the last dimension, in the flavour of the module's own class."""
        flavour, eps_name = flavours.norm_class_flavour(self)
        return rms_norm(hidden_states, parameter(self, "weight"), getattr(self, eps_name), flavour)


class RMSNormGated(nn.Module):
    """RMSNorm with a gate, for the hub name "RMSNormGated"; what the class computes is found by running it."""

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Gated RMSNorm of the last dimension; ``gate`` has the shape of ``hidden_states``."""
        flavour, order, group_size, activation, eps_name = gated.class_arguments(self)
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
        return linear(input, parameter(self, "weight"), parameter(self, "bias"))


mark_linear_forward(Linear.forward)


class GatedMLP(nn.Module):
    """``down_proj(act_fn(gate) * up)`` with gate and up from one product, ``gate_up_proj``."""

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """The MLP on the last dimension, [..., hidden_size] to [..., hidden_size]."""
        return self.down_proj(gated_activation(self.gate_up_proj(hidden_states), self.activation))


class GatedMLPLayout(Layout):
    """``gate_up_proj`` (the checkpoint's ``gate_proj`` and ``up_proj``, in this order), ``down_proj`` and ``act_fn``.

    Made from the MLP itself under a tuple key of one pair; under a class key from the arguments of the class that it
    replaces, ``config`` and optional sizes, which loading compares with an instance of that class.
    """

    forward = GatedMLP.forward

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.arguments: parts.Arguments | None = (args, dict(kwargs))
        self.packed = False
        self.activation = "silu"
        self.build(lambda: self._fill(args, kwargs))

    def _fill(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) == 1 and not kwargs and isinstance(args[0], nn.Module):
            self.arguments = None
            parts.take_mlp(self, args[0])
        else:
            parts.mlp_from_config(self, (args, kwargs))

    def rules(self) -> list[Rule]:
        """See :meth:`Layout.rules`."""
        return parts.mlp_rules(self, child=0)

    def inspect(self, parent: nn.Module) -> None:
        """Compare with the class that was replaced, unless the module itself was handed over."""
        if self.arguments is not None:
            parts.compare_mlp(self, parent, self.arguments)


class RMSNormMLP(nn.Module):
    """``down_proj(act_fn(gate) * up)`` of a normalised input, ``gate_up_proj(rms_norm(x))``, in one operation.

    The operation reads the weights, so it runs only where both products are plain ``nn.Linear``; else (offloaded,
    wrapped, quantised) norm, modules and activation run one after the other.
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


class RMSNormMLPLayout(Layout):
    """``scale`` [hidden_size], ``gate_up_proj``, ``down_proj`` and ``act_fn`` from a norm and the MLP that follows it.

    ``norm`` computes one of the known flavours or is one of our norm layouts (a norm key beside the fusion key);
    ``mlp`` is a plain gated MLP, with separate or packed (Phi-3) gate and up products. The parent must hand what the
    norm returns to the MLP and to nothing else.
    """

    forward = RMSNormMLP.forward

    def __init__(self, *children: Any, **kwargs: Any) -> None:
        super().__init__()
        parts.set_defaults(self)
        self.build(lambda: self._fill(*parts.fused_children(children, kwargs, ("RMSNorm", "MLP"))))

    def _fill(self, norm: nn.Module, mlp: nn.Module) -> None:
        parts.take_norm(self, norm)
        parts.take_mlp(self, mlp)

    def rules(self) -> list[Rule]:
        """See :meth:`Layout.rules`."""
        return [*parts.norm_rules(self), *parts.mlp_rules(self, child=1)]

    def inspect(self, parent: nn.Module) -> None:
        """Check the parent's data flow, and norms that came as layouts against the classes that they had replaced."""
        parts.check_fusion(self, parent)


class RMSNormMLPRMSNorm(nn.Module):
    """A norm, a gated MLP and a second norm, as Gemma 2 and 3 run them in a row: see :class:`RMSNormMLP`."""

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norm, MLP and norm on the last dimension, [..., hidden_size] to [..., hidden_size]."""
        output = RMSNormMLP.forward(self, hidden_states)
        return rms_norm(output, self.post_scale, self.post_variance_epsilon, self.post_flavour)


class RMSNormMLPRMSNormLayout(Layout):
    """As :class:`RMSNormMLPLayout`, with ``post_scale`` [hidden_size] of the norm that follows the MLP."""

    forward = RMSNormMLPRMSNorm.forward

    def __init__(self, *children: Any, **kwargs: Any) -> None:
        super().__init__()
        parts.set_defaults(self)
        self.build(lambda: self._fill(*parts.fused_children(children, kwargs, ("RMSNorm", "MLP", "RMSNorm"))))

    def _fill(self, norm: nn.Module, mlp: nn.Module, post_norm: nn.Module) -> None:
        parts.take_norm(self, norm)
        parts.take_mlp(self, mlp)
        parts.take_norm(self, post_norm, "post_")

    def rules(self) -> list[Rule]:
        """See :meth:`Layout.rules`."""
        return [*parts.norm_rules(self), *parts.mlp_rules(self, child=1), *parts.norm_rules(self, "post_", child=2)]

    def inspect(self, parent: nn.Module) -> None:
        """See :meth:`RMSNormMLPLayout.inspect`."""
        parts.check_fusion(self, parent)
