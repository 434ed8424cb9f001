"""Running a foreign module's class on an input of ours, away from its weights and from the contexts around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

EPS_NAMES = ("variance_epsilon", "eps")


class Same:
    """Compares by identity and keeps its object alive, so that no other object can take over its id."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value


def settings(module: nn.Module) -> tuple[Any, ...]:
    """Attributes of ``module`` that its forward may read, as a key; objects (a config) count by identity."""
    own = (
        (k, v) for k, v in sorted(vars(module).items()) if not k.startswith("_") and k not in ("training", "forward")
    )
    return tuple((k, v if isinstance(v, bool | int | float | str | type(None)) else Same(v)) for k, v in own)


_PLAIN = (bool, int, float, str, type(None))
_names: dict[type, tuple[str, ...]] = {}


def _setting_names(module: Any) -> tuple[str, ...]:
    """Names of the plain values that instances of the class hold, without epsilon (each call reads it) and width."""
    weight = module._parameters.get("weight")
    width = None if weight is None else weight.shape[-1]
    skipped = ("training", "forward", *EPS_NAMES)
    return tuple(
        name
        for name, value in sorted(vars(module).items())
        if not name.startswith("_")
        and name not in skipped
        and isinstance(value, _PLAIN)
        and not (type(value) is int and value == width)
    )


@torch.compiler.assume_constant_result
def _names_while_compiling(cls: Any) -> tuple[str, ...]:
    if cls not in _names:
        try:
            _names[cls] = _setting_names(cls(16))
        except TypeError as error:
            raise ValueError(
                f"{cls.__name__}: run the model once before compiling it, {cls.__name__}(16): {error}"
            ) from error
    return _names[cls]


def plain_settings(module: nn.Module) -> tuple[Any, ...]:
    """Class, presence of a weight, and plain settings: what a module computes, as a key that a forward can afford.

    Objects (a config) are not in it; :func:`settings` has them.
    """
    cls: Any = type(module)
    if torch.compiler.is_compiling():
        names = _names_while_compiling(cls)
    else:
        found = _names.get(cls)
        names = _names.setdefault(cls, _setting_names(module)) if found is None else found
    own = module.__dict__
    return (cls, module._parameters.get("weight") is not None, *[own.get(name) for name in names])


def remembered(cache: dict[Any, Any], key: Any, find: Callable[[], Any]) -> Any:
    """``cache[key]``, found when new. Bounded: a key holds a config, and each load brings its own."""
    if key not in cache:
        if len(cache) >= 256:
            cache.clear()
        cache[key] = find()
    return cache[key]


def blank_copy(module: nn.Module) -> nn.Module:
    """A module of the same class and settings, without its parameters, children, hooks and a bound ``forward``."""
    copy = type(module).__new__(type(module))
    nn.Module.__init__(copy)
    fresh = set(vars(copy))
    vars(copy).update({k: v for k, v in vars(module).items() if k not in fresh and k != "forward"})
    return copy


def run(module: nn.Module, *inputs: torch.Tensor) -> Any:
    """The class's own forward, whatever has been bound to the instance."""
    return type(module).forward(module, *inputs)


def examine(probe: Callable[[], Any]) -> Any:
    """Run ``probe`` away from the device, dtype and gradient contexts that a model is built under."""
    with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
        return probe()


def check_not_sharded(module: nn.Module) -> None:
    """Refuse to train a hub-name layer under tensor parallelism: binding it has discarded what the plan wrapped.

    transformers marks each module of such a model (``apply_tensor_parallelism``) and replaces the forward of some, to
    sum the gradients of q_norm over ranks for example; ``kernels`` then replaces it again.

    Raises:
        ValueError: names the layers to use, whose layouts keep the wrapped forward.
    """
    if "_is_hooked" in module.__dict__ and module.training and torch.is_grad_enabled():
        raise ValueError(
            f"{type(module).__name__} is bound under its hub name in a tensor-parallel model, whose gradients would "
            "not be summed over ranks: train with a layer that has a layout, such as CustomRMSNorm, or without kernels"
        )
