"""Modules of a model that keep everything that is theirs and run one of our forwards: only their class changes.

An adopted module is the same object with the same parameters, children, hooks and attributes. Its class is made here:
a subclass of its own class, under the same name, with the layer's `forward`. So whoever goes by paths, names, shapes,
`isinstance` or class names sees the stock model, and `release` is one assignment.

Where a layer needs weights to lie in a certain way (the rows of gate and up one after the other), the module arranges
them when it is adopted and whenever its weights were exchanged as a whole: `.to(...)`, a copy, `train()` and `eval()`.
"""

from __future__ import annotations

from functools import cache
from types import MethodType, SimpleNamespace
from typing import Any

from torch import nn

from .ops.adjacent import gathered, lay
from .sharded import is_sharded, local


class Adopted:
    """What the classes of adopted modules share. ``layer`` is the class whose forward runs, ``layer_name`` its key."""

    is_adopted = True  # copies of this package know each other's modules by this, never by isinstance
    original: type[nn.Module]
    layer: type[nn.Module]
    is_live = False
    was_bound = False
    settings: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def kernel_condition(module: nn.Module) -> bool:  # noqa: ARG004
        """`kernels` asks this before it binds a forward: the class has ours, and an instance needs none."""
        return False

    def arrange(self: Any) -> None:
        """Bring the weights into the order that the layer reads, where they may be moved."""

    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        super()._apply(*args, **kwargs)  # type: ignore[misc]
        self.arrange()
        return self

    def train(self: Any, mode: bool = True) -> Any:
        """``nn.Module.train``, which ends a load, and a change of parameters that nobody else announces."""
        super().train(mode)  # type: ignore[misc]
        self.arrange()
        return self

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self.arrange()

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # The class has no name to be found by: a copy, or a file, holds what it is made of.
        state = super().__reduce_ex__(protocol)[2]
        return _blank, (self.original, self.layer, self.kernel_layer_name, self.settings), state

    def extra_repr(self: Any) -> str:
        """What the stock module prints, and the layer that runs."""
        return ", ".join(part for part in (super().extra_repr(), f"layer={self.kernel_layer_name}") if part)  # type: ignore[misc]


class AdoptedNorm(Adopted):
    """A norm; ``eps_name`` is the attribute that holds its epsilon."""

    eps_name = "variance_epsilon"

    @property
    def scale(self: Any) -> Any:
        """``weight``, under the name that it has while a checkpoint is loaded."""
        return self.weight


class AdoptedMLP(Adopted):
    """A gated MLP. ``packed``: gate and up are one module already. ``act_name``: the attribute with the activation."""

    packed = False
    activation = "silu"
    act_name = ""
    act: Any = None

    def arrange(self: Any) -> None:
        """The rows of gate and up, and their biases, one after the other."""
        if self.packed:
            return
        gate, up = (self._modules.get(name) for name in ("gate_proj", "up_proj"))
        for kind in ("weight", "bias"):
            parts: list[Any] = [getattr(module, "_parameters", {}).get(kind) for module in (gate, up)]
            if all(is_sharded(part) for part in parts):
                lay(*map(local, parts))
            elif all(part is not None for part in parts):
                lay(*parts)


class _Separate(AdoptedMLP):
    @property
    def gate_up_proj(self: Any) -> SimpleNamespace:
        """``weight`` [2 * size, width] and ``bias`` of gate and up, as they are named while a checkpoint is loaded."""
        gate, up = self.gate_proj, self.up_proj
        bias = None if gate.bias is None else gathered((gate.bias, up.bias))
        return SimpleNamespace(weight=gathered((gate.weight, up.weight)), bias=bias)


@cache
def _adopted_class(
    original: type[nn.Module], layer: type[nn.Module], name: str, settings: tuple[tuple[str, Any], ...]
) -> type[nn.Module]:
    members = dict(settings)
    kind: type = (AdoptedMLP if members["packed"] else _Separate) if "packed" in members else AdoptedNorm
    if members.get("eps_name", "variance_epsilon") != "variance_epsilon":
        members["variance_epsilon"] = property(lambda self: getattr(self, self.eps_name))
    if callable(act := members.get("act")) and not isinstance(act, type):
        members["act"] = staticmethod(act)
    members |= {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "original": original,
        "layer": layer,
        "settings": settings,
        "kernel_layer_name": name,
        "forward": layer.forward,
        "stock_forward": original.forward,
    }
    return type(original.__name__, (kind, original), members)


def _blank(*made_of: Any) -> nn.Module:
    cls = _adopted_class(*made_of)
    return cls.__new__(cls)


def adopt(module: Any, layer: type[nn.Module], name: str = "", **settings: Any) -> None:
    """Let ``module`` run ``layer.forward``; `release` takes it back.

    Args:
        module: of a stock class, without a forward of its own (one that is the class's own, bound, is put aside).
        layer: the stateless layer.
        name: what a ``KernelConfig`` calls it; by default the layer's own name.
        settings: class attributes that the layer reads (``packed`` makes it an `AdoptedMLP`), and ``is_live``.
    """
    bound = vars(module).pop("forward", None)
    if bound is not None:
        settings["was_bound"] = True
    original: Any = type(module)
    made_of: Any = layer
    cls = _adopted_class(original, made_of, name or layer.__name__, tuple(sorted(settings.items())))
    module.__class__ = cls
    try:
        module.arrange()
    except BaseException:
        release(module)
        raise


def is_adopted(module: nn.Module) -> bool:
    """Whether ``module`` runs one of our layers by its class."""
    return getattr(type(module), "is_adopted", False)


def why_not_release(module: nn.Module) -> str:
    """What would be lost if ``module`` got its stock class back; empty where nothing would."""
    if "original" in vars(type(module)):
        return ""
    return (
        f"its class was changed to {type(module).__name__} after the kernel was applied (a parametrisation, "
        "fully_shard), and would be lost; take that back first"
    )


def release(module: Any) -> None:
    """Give ``module`` its stock class back. Its weights stay where they lie."""
    was_bound = type(module).was_bound
    module.__class__ = type(module).original
    if was_bound:
        module.forward = MethodType(type(module).forward, module)
