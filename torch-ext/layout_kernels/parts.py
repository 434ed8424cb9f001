"""How a layout takes over a norm or a gated MLP: sizes, parameters, and the proof that it computes the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import blocks, flavours, patching
from .layout import Layout
from .locations import Rule

try:
    from transformers.activations import ACT2FN
except ImportError:  # see conversion.py; only layouts made from a config need it
    ACT2FN = None  # type: ignore[assignment]

SIZE_NAMES = ("hidden_size", "dim", "normalized_shape", "hidden_dim", "embed_dim", "d_model", "num_features")
ACTIVATION_NAMES = ("hidden_act", "hidden_activation", "activation_function")
LAYER_OF = {
    "cast_then_scale": "CustomRMSNorm",
    "scale_then_cast": "FP32RMSNorm",
    "one_plus_scale": "ZeroCenteredRMSNorm",
}
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def norm_arguments(arguments: Arguments) -> tuple[int | None, float]:
    """hidden_size and epsilon from the arguments of a norm's class; hidden_size is None for a norm without weight.

    Such a norm has ``with_scale=False``, or is made of nothing but an epsilon (Llama 4's ``L2Norm``).

    Raises:
        ValueError: the arguments are something else, such as a config.
    """
    args, kwargs = arguments
    named = next((kwargs[n] for n in flavours.EPS_NAMES if n in kwargs), 1e-6)
    given = [*args, *kwargs.values()]
    if len(given) == 1 and isinstance(given[0], float) and set(kwargs) <= set(flavours.EPS_NAMES):
        return None, given[0]
    size = args[0] if args else next((kwargs[name] for name in SIZE_NAMES if name in kwargs), None)
    if size is None and kwargs.get("with_scale") is False:
        return None, named
    if not isinstance(size, int):
        raise ValueError(
            f"no hidden_size in the arguments {args}, {kwargs}: expected an int, first or as one of {SIZE_NAMES}"
        )
    return size if kwargs.get("with_scale", True) else None, args[1] if len(args) > 1 else named


def wrong_flavour(layer: str, finding: flavours.NormFinding, expected: str) -> ValueError:
    """The error that says what the replaced norm computes, what ``layer`` computes, and which layer is right."""
    computes = flavours.DESCRIPTIONS.get(finding.flavour or "", "something else")
    right = LAYER_OF.get(finding.flavour or "")
    way_out = f"Use {right} for it" if right else "Leave its class out of the KernelConfig"
    return ValueError(
        f"the class that it replaces computes {finding.flavour or 'no known flavour'} ({finding.reason or computes}), "
        f"{layer} computes {expected} ({flavours.DESCRIPTIONS[expected]}). {way_out}; a key that is an exact class "
        "name, such as 'LlamaRMSNorm', covers that class alone."
    )


def replaced_norm(
    layout: type[Layout], parent: nn.Module, arguments: Arguments, shape: torch.Size | None
) -> tuple[flavours.NormFinding, float]:
    """What the norm computes that ``layout`` stands in for below ``parent``, and its epsilon.

    Raises:
        ValueError: no class fits, or several fit and they differ.
    """
    args, kwargs = arguments
    results: dict[str, tuple[flavours.NormFinding, float]] = {}
    for cls in patching.original_classes(layout, parent):
        try:
            original = patching.build_original(cls, args, kwargs)
        except TypeError:
            continue  # another class of the same module that the key covers, with other arguments
        weight = getattr(original, "weight", None)
        if (None if weight is None else weight.shape) == shape:
            eps = flavours.eps_of(original)
            results[cls.__name__] = (flavours.norm_flavour(original), eps[1] if eps else 0.0)
    if not results:
        raise ValueError(
            f"no class that takes {args}, {kwargs} and has a weight of shape {shape} was found to compare with"
        )
    if len(set(results.values())) > 1:
        kinds = {name: finding.flavour or finding.reason for name, (finding, _) in results.items()}
        raise ValueError(
            f"the key covers classes that compute different things, {kinds}: let the key be one class, such as "
            f"'^{next(iter(results))}$'"
        )
    return next(iter(results.values()))


def set_defaults(layout: Any) -> None:
    """Attributes of a fused layout before its parts are taken over."""
    layout.packed, layout.activation = False, "silu"
    layout.flavour, layout.variance_epsilon = "cast_then_scale", 1e-6
    layout.replaced_norms = {}


def fused_children(children: tuple[Any, ...], kwargs: dict[str, Any], kinds: tuple[str, ...]) -> tuple[Any, ...]:
    """The modules of a fused layout, one for each of ``kinds``; else ValueError names the key that gives them."""
    if kwargs or len(children) != len(kinds) or not all(isinstance(child, nn.Module) for child in children):
        key = ", ".join(f'("{kind}", "<parent>.<its name>")' for kind in kinds)
        given = [type(child).__name__ for child in children] + sorted(kwargs)
        raise ValueError(
            f"it is made of {len(kinds)} modules, {', '.join(kinds)}, given {given}; use the tuple key ({key})"
        )
    return children


def take_norm(layout: Any, norm: nn.Module, prefix: str = "") -> None:
    """Give ``layout`` the ``<prefix>scale``, ``variance_epsilon`` and ``flavour`` of ``norm``, or of a norm layout."""
    place = "norm after the MLP" if prefix else "norm before the MLP"
    known: Any = norm
    if getattr(norm, "is_layout", False):
        if known.refusal is not None:
            raise ValueError(known.refusal)
        if not hasattr(known, "flavour") or getattr(known, "scale", None) is None:
            raise ValueError(f"the {place} is a {type(norm).__name__}, expected a norm with a weight")
        layout.replaced_norms[prefix] = (type(norm), known.arguments)
        flavour, eps, like = known.flavour, known.variance_epsilon, known.scale
    else:
        finding = flavours.norm_flavour(norm)
        if finding.flavour is None or known.weight is None:
            raise ValueError(f"the {place} cannot be fused: {finding.reason or 'it has no weight'}")
        flavour, eps, like = finding.flavour, getattr(norm, finding.eps_name), known.weight
    setattr(layout, f"{prefix}flavour", flavour)
    setattr(layout, f"{prefix}variance_epsilon", eps)
    setattr(layout, f"{prefix}scale", nn.Parameter(like.detach().clone()))


def norm_rules(layout: Any, prefix: str = "", child: int = 0) -> list[Rule]:
    """The rule of ``<prefix>scale``, which comes from the replaced child number ``child``."""
    name = f"{prefix}scale"
    return [Rule(name, ("weight",), child)] if hasattr(layout, name) else []


def check_fusion(layout: Any, parent: nn.Module) -> None:
    """Check that ``parent`` runs the fused children one directly after the other, and norms that came as layouts.

    Raises:
        ValueError: the result of one child goes elsewhere too, or a norm computes another flavour.
    """
    layout.resolve_child_names(layout.location)
    cls = patching.unfused_class(type(parent))
    if layout.child_names is None:
        raise ValueError(f"the names of the children of {cls.__name__} that were fused are unknown")
    reason = blocks.why_not_adjacent(cls, layout.child_names)
    if reason is not None:
        raise ValueError(f"{list(layout.child_names)} cannot be fused: {reason}. Leave this key out")
    for prefix, (norm_layout, arguments) in layout.replaced_norms.items():
        shape = getattr(layout, f"{prefix}scale").shape
        finding, eps = replaced_norm(norm_layout, parent, arguments, shape)
        expected = getattr(layout, f"{prefix}flavour")
        if finding.flavour != expected:
            raise wrong_flavour(norm_layout.__name__.removesuffix("Layout"), finding, expected)
        setattr(layout, f"{prefix}variance_epsilon", eps)


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
    finding = flavours.mlp_kind(mlp)
    if finding.activation is None:
        raise ValueError(f"the MLP cannot be taken over: {finding.reason}")
    children: Any = mlp
    layout.packed, layout.activation = finding.packed, finding.activation
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
    layout.act_fn = flavours.activation_of(mlp)


def mlp_rules(layout: Any, child: int) -> list[Rule]:
    """The rules of ``gate_up_proj`` and ``down_proj``, which come from the replaced child number ``child``."""
    if not hasattr(layout, "down_proj"):
        return []  # refused before it had parameters
    rules = []
    for kind in ("weight", "bias"):
        sources = ("gate_up_proj",) if layout.packed else ("gate_proj", "up_proj")
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
    layout.activation = flavours.activation_name_of(layout.act_fn)
    if layout.activation is None:
        raise ValueError(f"activation {name!r} is not supported, supported: {sorted(flavours.ACTIVATIONS)}")
    layout.gate_up_proj = nn.Linear(hidden, 2 * inner, bias=bias)
    layout.down_proj = nn.Linear(inner, hidden, bias=bias)


def _shape_of(module: Any) -> tuple[Any, ...]:
    """Sizes and biases that decide whether two MLPs hold the same parameters."""
    packed = hasattr(module, "gate_up_proj")
    first = [module.gate_up_proj] if packed else [module.gate_proj, module.up_proj]
    rows = sum(linear.weight.shape[0] for linear in first)
    down = module.down_proj
    return rows, first[0].weight.shape[1], first[0].bias is not None, tuple(down.weight.shape), down.bias is not None


def compare_mlp(layout: Any, parent: nn.Module, arguments: Arguments) -> None:
    """Check a layout made from a config against the class that it stands in for below ``parent``.

    Sets ``layout.packed`` from it, which the config does not tell.

    Raises:
        ValueError: the class has other shapes, biases or activation, or is no plain gated MLP.
    """
    args, kwargs = arguments
    way_out = 'use the tuple key (("MLP", "<parent>.<mlp>"),), which hands over the module itself'
    seen: list[str] = []
    for cls in patching.original_classes(type(layout), parent):
        try:
            original = patching.build_original(cls, args, kwargs)
        except TypeError:
            continue
        finding = flavours.mlp_kind(original)
        seen.append(cls.__name__)
        if finding.activation is None:
            raise ValueError(f"the MLP cannot be taken over: {finding.reason}")
        given, expected = (_shape_of(layout), layout.activation), (_shape_of(original), finding.activation)
        if given != expected:
            raise ValueError(
                f"{cls.__name__} has (shapes and biases, activation) {expected}, its config gives {given}; {way_out}"
            )
        layout.packed = finding.packed
    if not seen:
        raise ValueError(f"no class that takes {args}, {kwargs} was found to compare with; {way_out}")
