"""The layout of a norm: sizes from the arguments of the class that it replaces, and what that class computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..checkpoints.key_table import Rule
from ..layer_table import NORM_LAYER_OF
from ..recognition import norms
from ..running.adopted import adopt
from ..transformers_glue import class_patches
from .base import Arguments, Layout, take_place

SIZE_NAMES = ("hidden_size", "dim", "normalized_shape", "hidden_dim", "embed_dim", "d_model", "num_features")


@dataclass(frozen=True)
class ReplacedNorm:
    """What a norm layout stands in for: what it computes, its epsilon, and an instance without memory."""

    finding: norms.NormFinding
    eps: float
    module: Any


def norm_arguments(arguments: Arguments) -> tuple[int | None, float]:
    """hidden_size and epsilon from the arguments of a norm's class; hidden_size is None for a norm without weight.

    Such a norm has ``with_scale=False``, or is made of nothing but an epsilon (Llama 4's ``L2Norm``).

    Raises:
        ValueError: the arguments are something else, such as a config.
    """
    args, kwargs = arguments
    named = next((kwargs[n] for n in norms.EPS_NAMES if n in kwargs), 1e-6)
    given = [*args, *kwargs.values()]
    if len(given) == 1 and isinstance(given[0], float) and set(kwargs) <= set(norms.EPS_NAMES):
        return None, given[0]
    size = args[0] if args else next((kwargs[name] for name in SIZE_NAMES if name in kwargs), None)
    if size is None and kwargs.get("with_scale") is False:
        return None, named
    if not isinstance(size, int):
        raise ValueError(
            f"no hidden_size in the arguments {args}, {kwargs}: expected an int, first or as one of {SIZE_NAMES}"
        )
    return size if kwargs.get("with_scale", True) else None, args[1] if len(args) > 1 else named


def wrong_flavour(layer: str, finding: norms.NormFinding, expected: str) -> ValueError:
    """The error that says what the replaced norm computes, what ``layer`` computes, and which layer is right."""
    computes = norms.DESCRIPTIONS.get(finding.flavour or "", "something else")
    right = NORM_LAYER_OF.get(finding.flavour or "")
    way_out = f"Use {right} for it" if right else "Leave its class out of the KernelConfig"
    return ValueError(
        f"the class that it replaces computes {finding.flavour or 'no known flavour'} ({finding.reason or computes}), "
        f"{layer} computes {expected} ({norms.DESCRIPTIONS[expected]}). {way_out}; a key that is an exact class "
        "name, such as 'LlamaRMSNorm', covers that class alone."
    )


def replaced_norm(layout: Any, parent: nn.Module) -> ReplacedNorm:
    """What the norm computes that ``layout`` stands in for below ``parent``, and an instance of its class.

    Raises:
        ValueError: no class fits, or several fit and they differ.
    """
    args, kwargs = layout.arguments
    shape = None if layout.scale is None else layout.scale.shape
    found: dict[str, ReplacedNorm] = {}
    for cls in class_patches.original_classes(layout, parent):
        try:
            original = class_patches.build_original(cls, args, kwargs)
        except TypeError:
            continue  # another class of the same module that the key covers, with other arguments
        weight = getattr(original, "weight", None)
        if (None if weight is None else weight.shape) == shape:
            eps = norms.eps_of(original)
            found[cls.__name__] = ReplacedNorm(norms.norm_flavour(original), eps[1] if eps else 0.0, original)
    if not found:
        raise ValueError(
            f"no class that takes {args}, {kwargs} and has a weight of shape {shape} was found to compare with"
        )
    if len({(norm.finding, norm.eps) for norm in found.values()}) > 1:
        kinds = {name: norm.finding.flavour or norm.finding.reason for name, norm in found.items()}
        raise ValueError(
            f"the key covers classes that compute different things, {kinds}: let the key be one class, such as "
            f"'^{next(iter(found))}$'"
        )
    return next(iter(found.values()))


def put_norm(place: Any, norm: Any, weight: nn.Parameter | None, layer: type[nn.Module]) -> None:
    """Let ``place``, a layout, become the stock module ``norm`` with ``weight``, running ``layer``."""
    if weight is not None:
        norm._parameters["weight"] = weight
    take_place(place, norm)
    adopt_norm(place, layer)


def adopt_norm(norm: Any, layer: type[nn.Module], **settings: Any) -> None:
    """Let a norm of a known flavour run ``layer``."""
    eps = norms.eps_of(norm)
    adopt(norm, layer, eps_name=eps[0] if eps else "variance_epsilon", **settings)


class NormLayout(Layout):
    """What the layouts of a norm share: ``scale`` [hidden_size], from the checkpoint's ``weight``, and epsilon.

    Takes the arguments of the class that it replaces: ``(hidden_size, eps=1e-6)``, ``dim=`` for ``hidden_size``,
    positional or by name; for a norm without weight ``with_scale=False``, or epsilon alone. Loading reads epsilon
    from an instance of that class and refuses a class that computes another flavour.
    """

    flavour: ClassVar[str] = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.arguments: Arguments = (args, dict(kwargs))
        self.variance_epsilon = 1e-6
        self.build(self._fill)

    def _fill(self) -> None:
        size, self.variance_epsilon = norm_arguments(self.arguments)
        start = 0.0 if self.flavour == "one_plus_scale" else 1.0  # a factor of one
        self.register_parameter("scale", None if size is None else nn.Parameter(torch.full((size,), start)))

    @property
    def weight(self) -> torch.Tensor | None:
        """``scale`` under the stock model's name: the layer reads it, and parents do (Mamba's block its dtype)."""
        return getattr(self, "scale", None)

    def rules(self) -> list[Rule]:
        """See :meth:`Layout.rules`."""
        return [Rule("scale", ("weight",))] if getattr(self, "scale", None) is not None else []

    def inspect(self, parent: nn.Module) -> None:
        """Compare with the class that was replaced, and take over its epsilon."""
        scale: Any = self.scale
        found = replaced_norm(self, parent)
        if found.finding.flavour != self.flavour and (scale is not None or found.finding.flavour is None):
            raise wrong_flavour(self.layer_name, found.finding, self.flavour)
        self.variance_epsilon = found.eps
        self.originals = (found.module,)

    def settle(self) -> list[nn.Module]:
        """See :meth:`Layout.settle`."""
        scale: Any = self.scale
        put_norm(self, self.originals[0], scale, self.layer)
        return [self]

    def extra_repr(self) -> str:
        """Shape and epsilon, as transformers' norms print them."""
        scale: Any = getattr(self, "scale", None)
        return f"{None if scale is None else tuple(scale.shape)}, eps={self.variance_epsilon}"
