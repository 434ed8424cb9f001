"""The layers of this kernel repository, in pairs.

``<Name>`` is what ``kernels`` binds: stateless, only ``forward``. ``<Name>Layout`` is what transformers puts into the
model before the checkpoint is loaded: the parameters, and the rules that fill them. Both are named in a
``KernelConfig`` by ``<Name>``. Nothing is computed here: a layer calls an operation of ``ops``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import flavours, parts
from .layout import Layout
from .locations import Rule
from .ops.gated_activation import gated_activation
from .ops.rms_norm import rms_norm
from .ops.rms_norm_mlp import rms_norm_mlp


class CustomRMSNorm(nn.Module):
    """RMSNorm as Llama, Qwen and Mistral compute it: ``scale * (x / rms(x)).to(x.dtype)``.

    ``hidden_states`` [..., hidden_size], float16, bfloat16 or float32; the result has the dtype of ``scale * x``.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """RMSNorm of the last dimension; any leading dimensions."""
        return rms_norm(hidden_states, self.scale, self.variance_epsilon)


class CustomRMSNormLayout(Layout):
    """``scale`` [hidden_size], from the checkpoint's ``weight``.

    Takes the arguments of the class that it replaces: ``(hidden_size, eps=1e-6)``, ``dim=`` for ``hidden_size``,
    positional or by name. Loading reads epsilon from an instance of that class and refuses one that computes
    something else (Gemma multiplies by ``1 + weight``).
    """

    forward = CustomRMSNorm.forward
    flavour = "cast_then_scale"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.arguments: parts.Arguments = (args, dict(kwargs))
        self.variance_epsilon = 1e-6
        self.build(self._fill)

    def _fill(self) -> None:
        size, self.variance_epsilon = parts.norm_arguments(self.arguments)
        self.scale = nn.Parameter(torch.ones(size))

    def rules(self) -> list[Rule]:
        """See :meth:`Layout.rules`."""
        return [Rule("scale", ("weight",))]

    def inspect(self, parent: nn.Module) -> None:
        """Compare with the class that was replaced, and take over its epsilon."""
        finding, eps = parts.replaced_norm(type(self), parent, self.arguments, self.scale.shape)
        if finding.flavour != self.flavour:
            raise parts.wrong_flavour("CustomRMSNorm", finding, self.flavour)
        self.variance_epsilon = eps

    def extra_repr(self) -> str:
        """Shape and epsilon, as transformers' norms print them."""
        return f"{tuple(self.scale.shape)}, eps={self.variance_epsilon}" if hasattr(self, "scale") else "refused"


class RMSNorm(nn.Module):
    """RMSNorm that keeps the module's own ``weight``: for the hub name "RMSNorm", without a layout.

    The hub name covers classes that round differently; which one a class computes is found once, by running it.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """RMSNorm of the last dimension, in the flavour of the module's own class."""
        flavour, eps_name = flavours.norm_class_flavour(self)
        return rms_norm(hidden_states, self.weight, getattr(self, eps_name), flavour)


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

    The operation reads the weights, so it runs only where both products are plain ``nn.Linear``; where one is
    offloaded, wrapped or quantised, the norm, the two modules and the activation run one after the other.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norm and MLP on the last dimension, [..., hidden_size] to [..., hidden_size]."""
        if parts.is_plain_linear(self.gate_up_proj) and parts.is_plain_linear(self.down_proj):
            return rms_norm_mlp(
                hidden_states,
                self.scale,
                self.gate_up_proj.weight,
                self.down_proj.weight,
                self.variance_epsilon,
                self.flavour,
                self.activation,
                self.gate_up_proj.bias,
                self.down_proj.bias,
            )
        normalised = rms_norm(hidden_states, self.scale, self.variance_epsilon, self.flavour)
        return self.down_proj(gated_activation(self.gate_up_proj(normalised), self.activation))


class RMSNormMLPLayout(Layout):
    """``scale`` [hidden_size], ``gate_up_proj``, ``down_proj`` and ``act_fn`` from a norm and the MLP that follows it.

    ``norm`` computes one of the known flavours or is a ``CustomRMSNormLayout`` (an "RMSNorm" key beside the fusion
    key); ``mlp`` is a plain gated MLP, with separate or packed (Phi-3) gate and up products.
    """

    forward = RMSNormMLP.forward

    def __init__(self, norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.packed = False
        self.activation = "silu"
        self.flavour = "cast_then_scale"
        self.variance_epsilon = 1e-6
        self.norm_layout: tuple[type[Layout], parts.Arguments] | None = None
        self.scale: nn.Parameter
        self.build(lambda: self._fill(norm, mlp))

    def _fill(self, norm: nn.Module, mlp: nn.Module) -> None:
        parts.take_norm(self, norm)
        parts.take_mlp(self, mlp)

    def rules(self) -> list[Rule]:
        """See :meth:`Layout.rules`."""
        return [Rule("scale", ("weight",)), *parts.mlp_rules(self, child=1)]

    def inspect(self, parent: nn.Module) -> None:
        """Compare a norm that came as a layout with the class that it had replaced."""
        if self.norm_layout is None:
            return
        layout, arguments = self.norm_layout
        finding, eps = parts.replaced_norm(layout, parent, arguments, self.scale.shape)
        if finding.flavour != self.flavour:
            raise parts.wrong_flavour("CustomRMSNorm", finding, self.flavour)
        self.variance_epsilon = eps
