"""Modules of a model that keep everything that is theirs and run one of our forwards: only their class changes.

An adopted module is the same object with the same parameters, children, hooks and attributes. Its class is made here:
a subclass of its own class, under the same name, with the layer's `forward`. So whoever goes by paths, names, shapes,
`isinstance` or class names sees the stock model, and `release` is one assignment.

Where a layer needs weights to lie in a certain way (the rows of gate and up one after the other), the module arranges
them when it is adopted and whenever its weights were exchanged as a whole: `.to(...)`, a copy, `train()` and `eval()`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from types import MethodType, SimpleNamespace
from typing import Any

from torch import nn

from .ops.adjacent import gathered, lay
from .sharded import is_sharded, local


@dataclass(frozen=True)
class Adoption:
    """What an adopted module's class is made of. A class has it as ``_layout_kernels``: any other name could be that
    of a child or an attribute of the stock module.

    ``name`` is what a ``KernelConfig`` calls the layer. For a norm ``eps_name`` is the attribute with its epsilon; for
    a gated MLP ``packed`` says whether gate and up are one module already, ``act_name`` is the attribute with the
    activation, ``act`` its class, or the function that it is, and ``act_settings`` its plain attributes.
    """

    original: type[nn.Module]
    layer: type[nn.Module]
    name: str
    is_live: bool = False
    was_bound: bool = False
    lacks: tuple[str, ...] = ()  # names that a layer or the guide's readers read and the module has not
    eps_name: str = "variance_epsilon"
    packed: bool | None = None
    activation: str = ""
    act_name: str = ""
    act: Any = None
    act_settings: tuple[tuple[str, Any], ...] = ()


class Adopted:
    """What the classes of adopted modules share."""

    is_adopted = True  # copies of this package know each other's modules by this, never by isinstance
    _layout_kernels: Adoption

    @staticmethod
    def kernel_condition(module: nn.Module) -> bool:  # noqa: ARG004
        """`kernels` asks this before it binds a forward: the class has ours, and an instance needs none."""
        return False

    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        super()._apply(*args, **kwargs)  # type: ignore[misc]
        _arrange(self)
        return self

    def train(self: Any, mode: bool = True) -> Any:
        """``nn.Module.train``, which ends a load, and a change of parameters that nobody else announces."""
        super().train(mode)  # type: ignore[misc]
        _arrange(self)
        return self

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        _arrange(self)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # The class has no name to be found by: a copy, or a file, holds what it is made of.
        return _blank, (self._layout_kernels,), super().__reduce_ex__(protocol)[2]

    def extra_repr(self: Any) -> str:
        """What the stock module prints, and the layer that runs."""
        return ", ".join(part for part in (super().extra_repr(), f"layer={self._layout_kernels.name}") if part)  # type: ignore[misc]


def _arrange(module: Any) -> None:
    """Lay the rows of gate and up, and their biases, one after the other, where they may be moved."""
    if module._layout_kernels.packed is not False:
        return
    gate, up = (module._modules.get(name) for name in ("gate_proj", "up_proj"))
    for kind in ("weight", "bias"):
        parts: list[Any] = [getattr(linear, "_parameters", {}).get(kind) for linear in (gate, up)]
        if all(is_sharded(part) for part in parts):
            lay(*map(local, parts))
        elif all(part is not None for part in parts):
            lay(*parts)


def _merged(mlp: Any) -> SimpleNamespace:
    """``weight`` [2 * size, width] and ``bias`` of gate and up, as they are named while a checkpoint is loaded."""
    gate, up = mlp.gate_proj, mlp.up_proj
    bias = None if gate.bias is None else gathered((gate.bias, up.bias))
    return SimpleNamespace(weight=gathered((gate.weight, up.weight)), bias=bias)


# What a module lacks, by name: the guide's names for weights, and what the layers of a norm read.
_GIVEN: dict[str, Any] = {
    "scale": property(lambda norm: norm.weight),
    "weight": None,
    "variance_epsilon": property(lambda norm: getattr(norm, norm._layout_kernels.eps_name)),
    "gate_up_proj": property(_merged),
}


@cache
def _adopted_class(adoption: Adoption) -> type[nn.Module]:
    original = adoption.original
    members = {name: _GIVEN[name] for name in adoption.lacks} | {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_layout_kernels": adoption,
        "kernel_layer_name": adoption.name,
        "forward": adoption.layer.forward,
    }
    return type(original.__name__, (Adopted, original), members)


def _blank(adoption: Adoption) -> nn.Module:
    cls = _adopted_class(adoption)
    return cls.__new__(cls)


def adopt(module: Any, layer: type[nn.Module], name: str = "", **settings: Any) -> None:
    """Let ``module`` run ``layer.forward``; `release` takes it back.

    Args:
        module: of a stock class, without a forward of its own (one that is the class's own, bound, is put aside).
        layer: the stateless layer.
        name: what a ``KernelConfig`` calls it; by default the layer's own name.
        settings: other fields of `Adoption`.
    """
    adoption = Adoption(type(module), layer, name or layer.__name__, **settings)
    read = ("gate_up_proj",) if adoption.packed is not None else ("scale", "weight", "variance_epsilon")
    adoption = replace(
        adoption,
        was_bound=vars(module).pop("forward", None) is not None,
        lacks=tuple(name for name in read if not hasattr(module, name)),
    )
    module.__class__ = _adopted_class(adoption)
    try:
        _arrange(module)
    except BaseException:
        release(module)
        raise


def adoption_of(module: nn.Module) -> Adoption | None:
    """How ``module`` runs one of our layers by its class, or None. Of any copy of this package."""
    return getattr(type(module), "_layout_kernels", None) if is_adopted(module) else None


def is_adopted(module: nn.Module) -> bool:
    """Whether ``module`` runs one of our layers by its class."""
    return getattr(type(module), "is_adopted", False)


def why_not_release(module: nn.Module) -> str:
    """What would be lost if ``module`` got its stock class back; empty where nothing would."""
    if "_layout_kernels" in vars(type(module)):
        return ""
    return (
        f"its class was changed to {type(module).__name__} after the kernel was applied (a parametrisation, "
        "fully_shard), and would be lost; take that back first"
    )


def release(module: Any) -> None:
    """Give ``module`` its stock class back. Its weights stay where they lie."""
    adoption = module._layout_kernels
    module.__class__ = adoption.original
    if adoption.was_bound:
        module.forward = MethodType(adoption.original.forward, module)
