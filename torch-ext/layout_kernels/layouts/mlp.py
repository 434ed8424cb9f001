"""The layouts of a gated MLP: gate and up as one product, from the module itself or from a config."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..checkpoints.key_table import Rule
from ..ops.adjacent import divide
from ..ops.gated_activation import gated_activation
from ..recognition import mlps
from ..running.adopted import Adoption, adopt
from ..transformers_glue import class_patches
from .base import Arguments, Layout, take_place

try:
    from transformers.activations import ACT2FN
except ImportError:  # see checkpoints/converter.py; only layouts made from a config need it
    ACT2FN = None  # type: ignore[assignment]

ACTIVATION_NAMES = ("hidden_act", "hidden_activation", "activation_function")


def _linear(like: nn.Linear, out_features: int) -> nn.Linear:
    weight = like.weight
    return nn.Linear(like.in_features, out_features, like.bias is not None, device=weight.device, dtype=weight.dtype)


def take_mlp(layout: Any, mlp: nn.Module) -> None:
    """Give ``layout`` the ``gate_up_proj``, ``down_proj`` and ``act_fn`` of the plain gated MLP ``mlp``."""
    if getattr(mlp, "is_layout", False):
        raise ValueError(
            f"another key has already replaced the MLP by {type(mlp).__name__}; an MLP key beside a fusion key cannot "
            'work. Use the fusion key alone: (("RMSNorm", "<parent>.<norm>"), ("MLP", "<parent>.<mlp>"))'
        )
    finding = mlps.mlp_kind(mlp)
    if finding.activation is None:
        raise ValueError(f"the MLP cannot be taken over: {finding.reason}")
    children: Any = mlp
    layout.source_packed, layout.activation = finding.packed, finding.activation
    if finding.packed:
        layout.gate_up_proj = _linear(children.gate_up_proj, children.gate_up_proj.out_features)
    else:
        gate, up = children.gate_proj, children.up_proj
        if gate.weight.shape != up.weight.shape or (gate.bias is None) != (up.bias is None):
            raise ValueError(
                f"gate_proj {gate} and up_proj {up} of {type(mlp).__name__} differ, expected equal shapes and biases"
            )
        layout.gate_up_proj = _linear(gate, 2 * gate.out_features)
    layout.down_proj = _linear(children.down_proj, children.down_proj.out_features)
    _, layout.act_fn = mlps.named_activation_of(mlp)


def mlp_rules(layout: Any, child: int) -> list[Rule]:
    """The rules of ``gate_up_proj`` and ``down_proj``, which come from the replaced child number ``child``."""
    if not hasattr(layout, "down_proj"):
        return []  # refused before it had parameters
    rules = []
    for kind in ("weight", "bias"):
        sources = ("gate_up_proj",) if layout.source_packed else ("gate_proj", "up_proj")
        if getattr(layout.gate_up_proj, kind) is not None:
            rules.append(Rule(f"gate_up_proj.{kind}", tuple(f"{name}.{kind}" for name in sources), child))
        if getattr(layout.down_proj, kind) is not None:
            rules.append(Rule(f"down_proj.{kind}", (f"down_proj.{kind}",), child))
    return rules


def mlp_from_config(layout: Any, arguments: Arguments) -> None:
    """Give ``layout`` the parameters of an MLP of ``config`` and optional sizes; :func:`compare_mlp` checks them."""
    (config, *rest), kwargs = arguments if arguments[0] else ((arguments[1].get("config"),), arguments[1])
    sizes = [value for value in rest if isinstance(value, int) and not isinstance(value, bool)]
    flags = [value for value in rest if isinstance(value, bool)]
    hidden = (
        kwargs.get("hidden_size") or (sizes[0] if len(sizes) > 1 else None) or getattr(config, "hidden_size", None)
    )
    inner = (
        kwargs.get("intermediate_size") or (sizes[-1] if sizes else None) or getattr(config, "intermediate_size", None)
    )
    name = next((getattr(config, n) for n in ACTIVATION_NAMES if isinstance(getattr(config, n, None), str)), None)
    if not isinstance(hidden, int) or not isinstance(inner, int) or name is None or ACT2FN is None:
        raise ValueError(
            f"the arguments {arguments} do not give hidden_size ({hidden}), intermediate_size ({inner}) and one of "
            f'{ACTIVATION_NAMES} ({name}); use the tuple key (("MLP", "<parent>.<mlp>"),), which hands over the module'
        )
    bias = bool(kwargs.get("bias", flags[0] if flags else getattr(config, "mlp_bias", False)))
    layout.act_fn = ACT2FN[name]
    layout.activation = mlps.activation_name_of(layout.act_fn)
    if layout.activation is None:
        raise ValueError(f"activation {name!r} is not supported, supported: {sorted(mlps.ACTIVATIONS)}")
    layout.gate_up_proj = nn.Linear(hidden, 2 * inner, bias=bias)
    layout.down_proj = nn.Linear(inner, hidden, bias=bias)


def _shape_of(module: Any) -> tuple[Any, ...]:
    """Sizes and biases that decide whether two MLPs hold the same parameters."""
    packed = hasattr(module, "gate_up_proj")
    first = [module.gate_up_proj] if packed else [module.gate_proj, module.up_proj]
    rows = sum(linear.weight.shape[0] for linear in first)
    down = module.down_proj
    return rows, first[0].weight.shape[1], first[0].bias is not None, tuple(down.weight.shape), down.bias is not None


def replaced_mlp(layout: Any, parent: nn.Module, arguments: Arguments) -> nn.Module:
    """An instance, without memory, of the class that a layout made from a config stands in for below ``parent``.

    Sets ``layout.source_packed`` from it, which the config does not tell.

    Raises:
        ValueError: the class has other shapes, biases or activation, or is no plain gated MLP.
    """
    args, kwargs = arguments
    way_out = 'use the tuple key (("MLP", "<parent>.<mlp>"),), which hands over the module itself'
    found: list[nn.Module] = []
    for cls in class_patches.original_classes(layout, parent):
        try:
            original = class_patches.build_original(cls, args, kwargs)
        except TypeError:
            continue
        finding = mlps.mlp_kind(original)
        found.append(original)
        if finding.activation is None:
            raise ValueError(f"the MLP cannot be taken over: {finding.reason}")
        given, expected = (_shape_of(layout), layout.activation), (_shape_of(original), finding.activation)
        if given != expected:
            raise ValueError(
                f"{cls.__name__} has (shapes and biases, activation) {expected}, its config gives {given}; {way_out}"
            )
        layout.source_packed = finding.packed
    if not found:
        raise ValueError(f"no class that takes {args}, {kwargs} was found to compare with; {way_out}")
    return found[0]


def filled(layout: Any, mlp: Any) -> Any:
    """The stock module ``mlp`` with the weights of ``layout``: gate's rows and up's are those of ``gate_up_proj``."""
    mlp.down_proj._parameters.update(layout.down_proj._parameters)
    if layout.source_packed:
        mlp.gate_up_proj._parameters.update(layout.gate_up_proj._parameters)
        return mlp
    for kind, merged in layout.gate_up_proj._parameters.items():
        if merged is not None:
            mlp.gate_proj._parameters[kind], mlp.up_proj._parameters[kind] = _halves(merged)
    return mlp


def _halves(merged: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """Gate's and up's parameter in the memory of ``merged``: the same two wherever it is tied to (Zamba)."""
    found = getattr(merged, "layout_kernels_halves", None)
    if found is None:
        rows = merged.detach()
        gate, up = (torch.empty_like(half) if rows.is_meta else half for half in rows.chunk(2))
        found = nn.Parameter(gate, merged.requires_grad), nn.Parameter(up, merged.requires_grad)
        if not rows.is_meta:
            divide(rows, *found)
        for half in found:
            vars(half).update(vars(merged))  # that it is loaded, and need not be initialised
        merged.layout_kernels_halves = found
    return found


def adopt_mlp(mlp: Any, layer: type[nn.Module], name: str = "", **settings: Any) -> None:
    """Let a plain gated MLP run ``layer``; ``name`` is what a ``KernelConfig`` calls it."""
    finding = mlps.mlp_kind(mlp)
    act_name, function = mlps.named_activation_of(mlp)
    act = type(function) if isinstance(function, nn.Module) else function
    own = sorted(vars(function).items()) if isinstance(function, nn.Module) else []
    plain = tuple((n, v) for n, v in own if isinstance(v, str | bool) and n != "training" and not n.startswith("_"))
    kind = {"packed": finding.packed, "activation": finding.activation, "act_name": act_name, "act": act}
    settings |= {"act_settings": plain, "act_forward": act.forward if isinstance(function, nn.Module) else None}
    known = ("gate_up_proj", "gate_proj", "up_proj", "down_proj", act_name)
    settings["idle"] = tuple(child for child in mlp._modules if child not in known)
    own = sorted((n, v) for n, v in vars(mlp).items() if isinstance(v, str | bool | float))
    settings["settings"] = tuple((n, v) for n, v in own if n != "training" and not n.startswith("_"))
    adopt(mlp, layer, name, **kind, **settings)


class _FromModules(nn.Module):
    """The MLP of a layout from its modules, where their weights cannot be read."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(gated_activation(self.gate_up_proj(hidden_states), self.activation))


class MLPLayout(Layout):
    """What the layouts with an MLP share: ``gate_up_proj``, ``down_proj`` and ``act_fn``.

    ``gate_up_proj`` holds the checkpoint's ``gate_proj`` and ``up_proj``, in this order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.source_packed = False
        self.activation = "silu"

    @property
    def _layout_kernels(self) -> Adoption:
        """While a checkpoint is loaded gate and up are one module, and nobody exchanges the activation."""
        how = {"packed": True, "activation": self.activation, "act_name": "act_fn", "act": type(self.act_fn)}
        return Adoption(_FromModules, self.layer, self.layer_name, **how)  # type: ignore[arg-type]


class PlainMLPLayout(MLPLayout):
    """An MLP without its norm: made from the MLP itself under a tuple key of one pair; under a class key from the
    arguments of the class that it replaces, ``config`` and optional sizes, which loading compares with that class.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.arguments: Arguments | None = (args, dict(kwargs))
        self.build(lambda: self._fill(args, kwargs))

    def _fill(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) == 1 and not kwargs and isinstance(args[0], nn.Module):
            self.arguments, self.originals = None, args
            take_mlp(self, args[0])
        else:
            mlp_from_config(self, (args, kwargs))

    def rules(self) -> list[Rule]:
        """See :meth:`Layout.rules`."""
        return mlp_rules(self, child=0)

    def inspect(self, parent: nn.Module) -> None:
        """Compare with the class that was replaced, unless the module itself was handed over."""
        if self.arguments is not None:
            self.originals = (replaced_mlp(self, parent, self.arguments),)

    def settle(self) -> list[nn.Module]:
        """See :meth:`Layout.settle`."""
        layer = self.layer
        take_place(self, filled(self, self.originals[0]))
        adopt_mlp(self, layer)
        return [self]
