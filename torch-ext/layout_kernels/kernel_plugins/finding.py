"""Which modules of a live model get which layer, how, and why others get none."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from .. import layers
from ..checkpoints.mapped_memory import pages
from ..layer_table import MLP_LAYER_OF, NORM_LAYER_OF
from ..layouts.mlp import adopt_mlp
from ..layouts.norm import adopt_norm
from ..models.plan import chain_of, is_mlp, is_norm
from ..ops.adjacent import address, is_held_as_a_storage, is_held_elsewhere, why_not_lay
from ..recognition.mlps import mlp_kind
from ..recognition.norms import norm_flavour
from ..running import plain
from ..running.adopted import adoption_of, is_adopted, release

BEFORE = "_layout_kernels_forward_before"


@dataclass(frozen=True)
class Change:
    """One module that gets a layer, and how."""

    module: Any
    do: Callable[[], None]
    back: Callable[[Any], None] = release


class Found:
    """Changes, by module; why other modules get none; and why some that fit are left as they are."""

    def __init__(self) -> None:
        self.changes: dict[int, Change] = {}
        self.reasons: list[str] = []
        self.left_out: list[str] = []

    def add(self, change: Change) -> None:
        """A module that stands at several places is changed once."""
        self.changes.setdefault(id(change.module), change)


def foreign_forward(module: nn.Module) -> bool:
    """Whether the instance has a forward other than that of its class, which `kernels` binds too, or ours."""
    bound = vars(module).get("forward")
    if bound is None or getattr(bound, "is_linear_forward", False):
        return False
    return getattr(bound, "__func__", None) is not type(module).forward or bound.__self__ is not module


def _why_not(module: Any) -> str:
    """Why ``module`` keeps its forward, or an empty text."""
    if (adoption := adoption_of(module)) is not None:
        return f"it runs {adoption.name} already"
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            if parameter.is_meta:
                return "its weights are not in memory (offloaded)"
            if type(parameter) is not nn.Parameter:
                return f"its weights are {type(parameter).__name__} (quantised or sharded)"
        if foreign_forward(part):
            return "its forward was replaced (offloaded, tensor-parallel, or another kernel)"
    return ""


def _norm_change(norm: Any) -> Change | str:
    """How ``norm`` gets a layer, or why it gets none."""
    reason = _why_not(norm)
    finding = None if reason else norm_flavour(norm)
    if finding is None or finding.flavour is None:
        return reason or str(finding and finding.reason)
    layer = getattr(layers, NORM_LAYER_OF[finding.flavour])
    return Change(norm, lambda: adopt_norm(norm, layer, is_live=True))


def _mlp_change(mlp: Any, name: str) -> Change | str:
    if (adoption := adoption_of(mlp)) is not None and adoption.is_apart(mlp):
        return Change(mlp, lambda: _lay(mlp), lambda _: None)  # its weights were exchanged since
    reason = _why_not(mlp) or mlp_kind(mlp).reason
    return reason or Change(mlp, lambda: _adopt_mlp(mlp, name))


def _adopt_mlp(mlp: Any, name: str) -> None:
    adopt_mlp(mlp, layers.GatedMLP, name, is_live=True)
    try:
        _lay(mlp)
    except BaseException:
        release(mlp)
        raise


def _lay(mlp: Any) -> None:
    if mlp._layout_kernels.is_apart(mlp):
        for name, parameter in mlp.named_parameters():
            if name.startswith(("gate_proj.", "up_proj.")):
                pages.note(parameter)
    mlp._layout_kernels.arrange(mlp, even_if_held=True)  # by an autograd graph: see `_held_elsewhere`


def _places(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module, str]]:
    """(path of the parent, parent, name) of each child that is ``wanted``."""
    for path, parent in model.named_modules():
        for name, child in parent.named_children():
            if wanted(child):
                yield path, parent, name


def find_norms(model: nn.Module) -> Found:
    """Norms that compute a known flavour."""
    found = Found()
    for path, parent, name in _places(model, is_norm):
        change = _norm_change(parent.get_submodule(name))
        if isinstance(change, str):
            found.reasons.append(f"{path}.{name}: {change}")
        else:
            found.add(change)
    return found


def _held_elsewhere(model: nn.Module) -> set[int]:
    """Addresses of memory that other things than one parameter of ``model`` lie in: moving it would separate them.

    Such as tied parameters, a state dict, another model, an array. What only autograd has saved stays right where
    it is.
    """
    own = [p for p in model.parameters() if address(p)]
    counts = Counter(p.untyped_storage().data_ptr() for p in own)
    found = {place for place, count in counts.items() if count > 1}
    held = [p for p in own if is_held_elsewhere(p)]
    if held and gc.get_freeze_count():  # what is frozen cannot be asked
        return found | {p.untyped_storage().data_ptr() for p in held}
    if held:
        ids = set(map(id, own))
        found |= {p.untyped_storage().data_ptr() for p in held if is_held_as_a_storage(p)}
        found |= {_place_of(thing) for thing in gc.get_objects() if id(thing) not in ids}
    return found - {0}


def _place_of(thing: Any) -> int:
    """Where the memory of a tensor begins; 0 of all else."""
    if not issubclass(type(thing), torch.Tensor) or not torch._C._has_storage(thing) or thing.is_meta:
        return 0
    try:
        return int(thing.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # a subclass without memory of its own, whose parts are asked too
        return 0


def _add_mlp(found: Found, path: str, mlp: Any, name: str, elsewhere: set[int]) -> bool:
    """Whether ``mlp`` gets the layer ``name``."""
    change = _mlp_change(mlp, name)
    if isinstance(change, str):
        found.reasons.append(f"{path}: {change}")
        return False
    halves = [half for part in ("gate_proj", "up_proj") if (half := getattr(mlp, part, None)) is not None]
    parts = [parameter for half in halves for parameter in half.parameters()]
    shared = any(p.untyped_storage().data_ptr() in elsewhere for p in parts if address(p))
    held = (
        "something else lies in the same memory (a tied weight, a state dict, another model, an array): let go of it "
        "first, or give the weights memory of their own (parameter.data = parameter.data.clone())"
    )
    reason = held if shared else why_not_lay(*[half.weight for half in halves]) if halves else ""
    if reason:
        found.left_out.append(f"{path}: {reason}")
        return False
    found.add(change)
    return True


def find_mlps(model: nn.Module) -> Found:
    """Plain gated MLPs."""
    found, elsewhere = Found(), _held_elsewhere(model)
    for path, parent, name in _places(model, is_mlp):
        _add_mlp(found, f"{path}.{name}", parent.get_submodule(name), MLP_LAYER_OF[1], elsewhere)
    return found


def find_blocks(model: nn.Module) -> Found:
    """Norm and gated MLP, and where it follows directly a second norm, with nothing in between."""
    found, elsewhere = Found(), _held_elsewhere(model)
    for path, parent, name in _places(model, is_mlp):
        chain, mlp = chain_of(parent, name), parent.get_submodule(name)
        if len(chain) == 1:
            found.reasons.append(f"{path}.{name}: no norm of {type(parent).__name__} hands its result to it alone")
        elif _add_mlp(found, f"{path}.{name}", mlp, MLP_LAYER_OF[len(chain)], elsewhere):
            for norm in (chain[0], *chain[2:]):
                change = _norm_change(parent.get_submodule(norm))
                if isinstance(change, Change):
                    found.add(change)
    return found


def find_linears(model: nn.Module) -> Found:
    """Plain ``nn.Linear`` modules; those of our MLPs are left out, whose layer reads their weights itself."""
    found = Found()
    inside = {id(child) for mlp in model.modules() if is_adopted(mlp) for child in mlp.modules()}
    for module in model.modules():
        bound = vars(module).get("forward")
        if id(module) not in inside and plain.is_plain_linear(module) and not hasattr(bound, "is_linear_forward"):
            found.add(Change(module, lambda module=module: _bind_linear(module), unbind_linear))  # type: ignore[misc]
    if not found.changes:
        found.reasons.append("it has no plain nn.Linear without a layer")
    return found


def _bind_linear(module: Any) -> None:
    vars(module)[BEFORE] = vars(module).get("forward")
    module.forward = MethodType(layers.Linear.forward, module)


def unbind_linear(module: Any) -> None:
    """Give a product the forward that it had."""
    vars(module).pop("forward", None)
    before = vars(module).pop(BEFORE)
    if before is not None:
        module.forward = before
