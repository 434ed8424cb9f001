"""Modules of a model that keep everything that is theirs and run one of our forwards: only their class changes.

An adopted module is the same object with the same parameters, children, hooks and attributes. Its class is made here:
a subclass of its own class, under the same name, with the layer's `forward`. So whoever goes by paths, names, shapes,
`isinstance` or class names sees the stock model, and `release` is one assignment.

Where a layer needs weights to lie in a certain way (the rows of gate and up one after the other), `Adoption.arrange`
lays them so: at the end of a load, when a kernel is applied, and after `.to(...)` or a copy, which gave the weights
new memory anyway. Memory that anybody else may hold stays where it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

from torch import nn

from ..ops.adjacent import address, gathered, lay, rows_of, why_not_lay
from .sharded import is_sharded, rows_here


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
    idle: tuple[str, ...] = ()  # other children of an MLP: dropout that drops nothing
    settings: tuple[tuple[str, Any], ...] = ()  # plain attributes of an MLP that its own forward may read
    forward: Any = None  # of the original, and of the activation: not those of a class that was patched since
    act_forward: Any = None

    # Methods, so that another copy of this package asks the one whose forward runs.
    def is_apart(self, module: Any) -> bool:
        """Whether gate's and up's rows do not lie one after the other, though they could."""
        return any(not why_not_lay(*pair) and rows_of(*pair) is None for pair in _pairs(module))

    def arrange(self, module: Any, even_if_held: bool = False) -> None:
        """Lay the rows of gate and up, and their biases, one after the other; see `ops.adjacent.lay`."""
        for pair in _pairs(module):
            lay(*pair, even_if_held=even_if_held)


class _Named(type):
    """For policies that find a class in the model by its name, and wrap all modules of that class (FSDP's): the class
    of one adopted module stands for all that are of its original, whatever runs in them.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        own = vars(cls).get("_layout_kernels")
        return super().__instancecheck__(instance) if own is None else isinstance(instance, own.original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        own = vars(cls).get("_layout_kernels")
        return super().__subclasscheck__(subclass) if own is None else issubclass(subclass, own.original)


class Adopted:
    """What the classes of adopted modules share."""

    is_adopted = True  # copies of this package know each other's modules by this, never by isinstance
    _layout_kernels: Adoption

    @staticmethod
    def kernel_condition(module: nn.Module) -> bool:  # noqa: ARG004
        """`kernels` asks this before it binds a forward: the class has ours, and an instance needs none."""
        return False

    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _addresses(self)
        super()._apply(*args, **kwargs)  # type: ignore[misc]
        if not set(before) & set(_addresses(self)):  # new memory, which nobody else has seen
            self._layout_kernels.arrange(self)
        return self

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self._layout_kernels.arrange(self)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if "_layout_kernels" not in vars(type(self)) or len(reduced) < 3:
            return reduced  # a class that was made of this one since, or one that says itself how it is copied
        # The class has no name to be found by: a copy, or a file, holds what it is made of.
        return _blank, (self._layout_kernels,), reduced[2]

    def extra_repr(self: Any) -> str:
        """What the stock module prints, and the layer that runs."""
        return ", ".join(part for part in (super().extra_repr(), f"layer={self._layout_kernels.name}") if part)  # type: ignore[misc]


def _pairs(module: Any) -> list[Any]:
    """Gate's and up's weights, and their biases: what this rank holds of them where a parallel plan shards them."""
    if module._layout_kernels.packed is not False:
        return []
    halves = [module._modules.get(name) for name in ("gate_proj", "up_proj")]
    parts = [getattr(half, "_parameters", {}) for half in halves]
    found = [[own.get(kind) for own in parts] for kind in ("weight", "bias")]
    if all(is_sharded(own.get("weight")) for own in parts):
        here = [rows_here(half) for half in halves]
        found = [] if any(part is None for part in here) else list(map(list, zip(*here, strict=True)))  # type: ignore[arg-type]
    return [pair for pair in found if all(part is not None for part in pair)]


def _addresses(module: Any) -> list[int]:
    return [address(part) for pair in _pairs(module) for part in pair]


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


def _forward_like(forward: Any, original: Any) -> FunctionType:
    """``forward``, whose one argument has the name that it has in ``original``: for callers that give it by name."""
    code, names = forward.__code__, original.__code__.co_varnames
    if len(names) < 2:  # a wrapper: its own argument stays
        return forward
    own = code.co_varnames
    code = code.replace(co_varnames=(*own[:1], names[1], *own[2:]))
    return FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__)


@cache
def _adopted_class(adoption: Adoption) -> Any:
    original = adoption.original
    members = {name: _GIVEN[name] for name in adoption.lacks} | {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_layout_kernels": adoption,
        "kernel_layer_name": adoption.name,
        "forward": _forward_like(adoption.layer.forward, original.forward),
    }
    kind = type(original)
    made = _Named if kind is type else type(_Named.__name__, (_Named, kind), {})
    return made(original.__name__, (Adopted, original), members)


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
        forward=type(module).forward,
        lacks=tuple(name for name in read if not hasattr(module, name)),
    )
    module.__class__ = _adopted_class(adoption)


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
    vars(module).pop("forward", None)  # its own, bound, as accelerate leaves it behind
    module.__class__ = adoption.original
    if adoption.was_bound:
        module.forward = MethodType(adoption.original.forward, module)
