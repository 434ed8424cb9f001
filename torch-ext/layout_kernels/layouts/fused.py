"""The layouts of a norm and the MLP that follows it, and how they come apart again when they settle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from ..checkpoints.key_table import Rule
from ..recognition import adjacency, norms
from ..transformers_glue import class_patches
from .mlp import MLPLayout, adopt_mlp, filled, mlp_rules, take_mlp
from .norm import put_norm, replaced_norm, wrong_flavour


class FusedLayout(MLPLayout):
    """A norm and an MLP, and a second norm where ``kinds`` has one: ``scale`` [hidden_size], ``gate_up_proj``,
    ``down_proj``, ``act_fn`` and ``post_scale``.

    Each norm computes one of the known flavours or is one of our norm layouts (a norm key beside the fusion key); the
    MLP is a plain gated MLP, with separate or packed (Phi-3) gate and up products. The parent must hand what the norm
    returns to the MLP and to nothing else.
    """

    kinds: ClassVar[tuple[str, ...]] = ()
    norm_layers: ClassVar[Mapping[str, type[nn.Module]]]

    def __init__(self, *children: Any, **kwargs: Any) -> None:
        super().__init__()
        self.flavour, self.variance_epsilon = "cast_then_scale", 1e-6
        self.build(lambda: self._fill(_children(children, kwargs, self.kinds)))

    def _fill(self, children: tuple[nn.Module, ...]) -> None:
        _take_norm(self, children[0], "")
        take_mlp(self, children[1])
        for norm in children[2:]:
            _take_norm(self, norm, "post_")
        self.originals = children

    def norms(self) -> dict[str, int]:
        """The prefix of each norm's attributes, and its number among the children."""
        return {prefix: number for prefix, number in (("", 0), ("post_", 2)) if number < len(self.kinds)}

    def rules(self) -> list[Rule]:
        """See :meth:`Layout.rules`."""
        norms = {number: f"{prefix}scale" for prefix, number in self.norms().items()}
        found = [Rule(name, ("weight",), number) for number, name in norms.items() if hasattr(self, name)]
        return [*found[:1], *mlp_rules(self, child=1), *found[1:]]

    def inspect(self, parent: nn.Module) -> None:
        """Check that ``parent`` runs the children one directly after the other, and norms that came as layouts.

        Raises:
            ValueError: the result of one child goes elsewhere too, or a norm computes another flavour.
        """
        self.resolve_child_names(self.location)
        cls = class_patches.unfused_class(type(parent))
        if self.child_names is None:
            raise ValueError(f"the names of the children of {cls.__name__} that were fused are unknown")
        reason = adjacency.why_not_adjacent(cls, self.child_names)
        if reason is not None:
            raise ValueError(f"{list(self.child_names)} cannot be fused: {reason}. Leave this key out")
        children = list(self.originals)
        for prefix, number in self.norms().items():
            layout: Any = children[number]
            if getattr(layout, "is_layout", False):
                found = replaced_norm(layout, parent)
                if found.finding.flavour != layout.flavour:
                    raise wrong_flavour(layout.layer_name, found.finding, layout.flavour)
                setattr(self, f"{prefix}variance_epsilon", found.eps)
                children[number] = found.module
        self.originals = tuple(children)

    def settle(self) -> list[nn.Module]:
        """See :meth:`Layout.settle`: each child goes back to its place, and the parent gets its class back."""
        parent: Any = self.parent() if self.parent is not None else None
        names, children, name = self.child_names, self.originals, self.layer_name
        if parent is None or names is None:
            return []
        mlp = filled(self, children[1])
        adopt_mlp(mlp, self.layer, name)
        norms = [
            (n, getattr(self, f"{p}scale"), self.norm_layers[getattr(self, f"{p}flavour")])
            for p, n in self.norms().items()
        ]
        parent._modules[names[1]] = mlp
        for number, scale, layer in norms:
            place = parent._modules[names[number]] = self if number == 0 else children[number]
            put_norm(place, children[number], scale, layer)
        return [parent._modules[name] for name in names]


def _children(children: tuple[Any, ...], kwargs: dict[str, Any], kinds: tuple[str, ...]) -> tuple[Any, ...]:
    """The modules of a fused layout, one for each of ``kinds``; else ValueError names the key that gives them."""
    if kwargs or len(children) != len(kinds) or not all(isinstance(child, nn.Module) for child in children):
        key = ", ".join(f'("{kind}", "<parent>.<its name>")' for kind in kinds)
        given = [type(child).__name__ for child in children] + sorted(kwargs)
        raise ValueError(
            f"it is made of {len(kinds)} modules, {', '.join(kinds)}, given {given}; use the tuple key ({key})"
        )
    return children


def _take_norm(layout: Any, norm: nn.Module, prefix: str) -> None:
    """Give ``layout`` the ``<prefix>scale``, ``variance_epsilon`` and ``flavour`` of ``norm``, or of a norm layout."""
    place = "norm after the MLP" if prefix else "norm before the MLP"
    known: Any = norm
    if hasattr(known, "down_proj"):
        raise ValueError(
            f"the {place} is {type(norm).__name__}, an MLP: the key names its modules in another order than they run"
        )
    if getattr(norm, "is_layout", False):
        if known.refusal is not None:
            raise ValueError(known.refusal)
        if not hasattr(known, "flavour") or getattr(known, "scale", None) is None:
            raise ValueError(f"the {place} is a {type(norm).__name__}, expected a norm with a weight")
        flavour, eps, like = known.flavour, known.variance_epsilon, known.scale
    else:
        finding = norms.norm_flavour(norm)
        if finding.flavour is None or known.weight is None:
            raise ValueError(f"the {place} cannot be fused: {finding.reason or 'it has no weight'}")
        flavour, eps, like = finding.flavour, getattr(norm, finding.eps_name), known.weight
    setattr(layout, f"{prefix}flavour", flavour)
    setattr(layout, f"{prefix}variance_epsilon", eps)
    setattr(layout, f"{prefix}scale", nn.Parameter(like.detach().clone()))
