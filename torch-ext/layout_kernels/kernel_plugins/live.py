"""Layouts in a live model: find where they fit, exchange all at once, roll back on any failure, and undo."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .. import layers, parts, plain
from ..flavours import norm_flavour
from ..models.plan import chain_of, is_mlp, is_norm
from ..state import accept_original_state_dicts, refuse_original_state_dicts
from . import optimizers, saving
from .swaps import Binding, Swap, foreign_forward, has_hooks, meta_twin

APPLIED = "_layout_kernels_applied"
HOOKED = "_layout_kernels_hooked"
Found = tuple[list[Any], list[str]]  # exchanges (Swap or Binding), and why other modules get none
_told: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
FUSED = {2: layers.RMSNormMLPLayout, 3: layers.RMSNormMLPRMSNormLayout}


class NothingMatchedError(RuntimeError):
    """The model has no module that a kernel fits; the message gives the reason for each that came close.

    ``left_out``: those of the reasons that concern layers which would fit, but cannot be merged as they are.
    """

    def __init__(self, message: str, left_out: list[str]) -> None:
        super().__init__(message)
        self.left_out = left_out


def default_order(kernel_id: str) -> tuple[int, str]:
    """Blocks before their parts: a norm, an MLP or a product that is left over then gets a layer of its own."""
    rank = 0 if kernel_id.endswith("rmsnorm_mlp") else 2 if kernel_id.endswith("linear") else 1
    return (rank, kernel_id)


def _touched(module: nn.Module) -> str | None:
    """Why ``module`` cannot be exchanged without losing what was done to it, or None."""
    parts_of_it = list(module.modules())
    for part in parts_of_it:
        for parameter in part.parameters(recurse=False):
            if parameter.is_meta:
                return "its weights are not in memory (offloaded)"
            if type(parameter) is not nn.Parameter:
                return f"its weights are {type(parameter).__name__} (quantised or sharded)"
    for part in parts_of_it:
        if has_hooks(part):
            return "it has hooks, which would be lost"
        if foreign_forward(part):
            return "its forward was replaced (offloaded, tensor-parallel, or another kernel)"
    return None


def _swap(parent: nn.Module, names: tuple[str, ...], build: Callable[..., Any], slots: Any = None) -> Swap:
    """A checked exchange of ``names``.

    Raises:
        ValueError: the layout refuses, or a child was changed in a way that would be lost.
    """
    children = tuple(parent.get_submodule(name) for name in names)
    for child, name in zip(children, names, strict=True):
        reason = _touched(child)
        if reason is not None:
            raise ValueError(f"{name}: {reason}")
    with torch.device("meta"):
        layout = build(*(meta_twin(child) for child in children))
    if layout.refusal is not None:
        raise ValueError(layout.refusal)
    layout.awaits_weights = False
    return Swap(parent, names, layout, children, slots or [(parent, names[0])])


def _places(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module, str]]:
    """(path of the parent, parent, name) of each child that is ``wanted``, shared ones at each of their places."""
    for path, parent in model.named_modules():
        if getattr(parent, "is_layout", False):
            continue
        for name, child in parent.named_children():
            if wanted(child) and not getattr(child, "is_layout", False):
                yield path, parent, name


def find_norms(model: nn.Module) -> Found:
    """Norms that compute a known flavour."""
    swaps: dict[int, Swap] = {}
    reasons = []
    for path, parent, name in _places(model, is_norm):
        norm = parent.get_submodule(name)
        if id(norm) in swaps:
            swaps[id(norm)].slots.append((parent, name))
            continue
        finding = norm_flavour(norm)
        layer = parts.LAYER_OF.get(finding.flavour or "")
        try:
            if layer is None:
                raise ValueError(finding.reason)
            swaps[id(norm)] = _swap(parent, (name,), _norm_builder(layer, norm, finding.eps_name))
        except ValueError as error:
            reasons.append(f"{path}.{name}: {error}")
    return list(swaps.values()), reasons


def _norm_builder(layer: str, norm: Any, eps_name: str) -> Callable[..., Any]:
    def build(twin: Any) -> Any:
        size = 1 if twin.weight is None else twin.weight.shape[0]
        kwargs = {"with_scale": False} if twin.weight is None else {}
        return getattr(layers, f"{layer}Layout")(size, eps=getattr(norm, eps_name), **kwargs)

    return build


def find_mlps(model: nn.Module) -> Found:
    """Plain gated MLPs."""
    swaps, reasons, tied = [], [], shared_parameters(model)
    for path, parent, name in _places(model, is_mlp):
        try:
            swap = _swap(parent, (name,), layers.GatedMLPLayout)
            _refuse_shared(swap, tied)
            swaps.append(swap)
        except ValueError as error:
            reasons.append(f"{path}.{name}: {error}")
    return swaps, reasons


def find_blocks(model: nn.Module) -> Found:
    """Norm and gated MLP, and where it follows directly a second norm, with nothing in between."""
    swaps, reasons, tied = [], [], shared_parameters(model)
    for path, parent, name in _places(model, is_mlp):
        chain = chain_of(parent, name)
        try:
            if len(chain) == 1:
                raise ValueError(f"no norm of {type(parent).__name__} hands its result to {name} alone")
            if foreign_forward(parent):
                raise ValueError(
                    f"the forward of this {type(parent).__name__} was replaced, so who calls {name} is unknown"
                )
            swap = _swap(parent, chain, FUSED[len(chain)])
            _refuse_shared(swap, tied)
            swaps.append(swap)
        except ValueError as error:
            reasons.append(f"{path}.{name}: {error}")
    return swaps, reasons


def find_linears(model: nn.Module) -> Found:
    """Plain ``nn.Linear`` modules, those inside of layouts left out: a fused layer reads their weights itself."""
    inside = {
        id(child) for layout in model.modules() if getattr(layout, "is_layout", False) for child in layout.modules()
    }
    linears = [m for m in model.modules() if id(m) not in inside and plain.is_plain_linear(m)]
    found = [Binding(m, layers.Linear) for m in linears if not hasattr(vars(m).get("forward"), "is_linear_forward")]
    return found, [] if found else ["it has no plain nn.Linear"]


def shared_parameters(model: nn.Module) -> set[int]:
    """Ids of parameters that two modules hold, or that belong to a module which stands at two places."""
    seen: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    return {number for number, count in seen.items() if count > 1}


def _refuse_shared(swap: Swap, shared: set[int]) -> None:
    if any(id(parameter) in shared for child in swap.children for parameter in child.parameters()):
        raise ValueError("its weights are tied to, or shared with, another module, which a merge would separate")


def apply(kernel_id: str, find: Callable[[nn.Module], Found], model: Any = None, optimizer: Any = None) -> Any:
    """Exchange all modules of ``model`` that ``find`` names, or none; returns the model.

    Layers that cannot be merged as they are (gate frozen alone) keep their modules, with a warning.

    Raises:
        ValueError: no model.
        NothingMatchedError: ``find`` names none that can be exchanged; with the reasons.
        RuntimeError: an optimizer of the process holds parameters that would be merged.
    """
    if model is None:
        raise ValueError(f"{kernel_id} needs model=<the model to change>")
    found, reasons = find(model)
    swaps, left_out = _exchangeable(model, found, optimizer)
    if not swaps:
        listed = "; ".join([*left_out, *reasons][:8]) or "no norm or gated MLP in it"
        message = f"{kernel_id} found nothing to do in {type(model).__name__}: {listed}"
        raise NothingMatchedError(message, left_out)
    merged = [parameter for swap in swaps for _, old in swap.to_merge() for parameter in old]
    _refuse_holders(merged, optimizer, "merged")
    warn_left_out(model, left_out)
    _all_or_none(swaps, lambda swap: swap.do(optimizer), lambda swap: swap.back(optimizer))
    setattr(model, APPLIED, [*getattr(model, APPLIED, []), (kernel_id, swaps)])
    if accept_original_state_dicts(model):
        setattr(model, HOOKED, True)
    saving.remember(model)
    return model


def _exchangeable(model: nn.Module, found: list[Any], optimizer: Any) -> tuple[list[Any], list[str]]:
    """Those of ``found`` that can be exchanged without loss, and path and reason of the others."""
    swaps, left_out = [], []
    for swap in found:
        try:
            swap.check(optimizer)
            swaps.append(swap)
        except RuntimeError as error:
            left_out.append(f"{path_of(model, swap)}: {error}")
    return swaps, left_out


def warn_left_out(model: nn.Module, left_out: list[str]) -> None:
    """Warn of layers of ``model`` that cannot be merged, once for each, however many kernels come by."""
    told = _told.setdefault(model, set())
    new = [reason for reason in left_out if reason not in told]
    told.update(new)
    if new:
        warnings.warn(f"layers of {type(model).__name__} left as they are: {'; '.join(new)}", stacklevel=3)


def path_of(model: nn.Module, swap: Any) -> str:
    """Where ``swap`` takes place: the path of the parent, or of a module that stays."""
    wanted = swap.parent if isinstance(swap, Swap) else swap.module
    return next((path for path, module in model.named_modules() if module is wanted), type(wanted).__name__)


def _refuse_holders(parameters: list[Any], optimizer: Any, what: str) -> None:
    if optimizers.holders(parameters, optimizer):
        raise RuntimeError(
            f"an optimizer of this process holds parameters that would be {what} and would go on with the old ones; "
            "pass it as optimizer=, which rewrites its groups and its state"
        )


def _all_or_none(swaps: list[Any], do: Callable[[Any], None], back: Callable[[Any], None]) -> None:
    done: list[Any] = []
    try:
        for swap in swaps:
            do(swap)
            done.append(swap)
    except BaseException:
        for swap in reversed(done):
            back(swap)
        raise


def _check_undo(model: nn.Module, swaps: list[Any], optimizer: Any) -> None:
    """Raise RuntimeError, with the path, when undoing ``swaps`` in this order would lose what was done since."""
    later: dict[tuple[int, str], Any] = {}

    def holds(holder: Any, name: str) -> Any:
        return later.get((id(holder), name), holder._modules.get(name))

    for swap in swaps:
        try:
            swap.check_back(optimizer, holds)
        except RuntimeError as error:
            raise RuntimeError(f"undo of {path_of(model, swap)}: {error}. Nothing was changed") from error
        later.update({(id(holder), name): child for holder, name, child in swap.put_back()})


def undo(model: Any, optimizer: Any = None) -> Any:
    """Take back all that was applied, or nothing; see ``interface.undo``."""
    applied = getattr(model, APPLIED, None)
    if not applied:
        raise ValueError(f"no kernel was applied to this {type(model).__name__}")
    swaps = [swap for _, swaps in reversed(applied) for swap in reversed(swaps)]
    _check_undo(model, swaps, optimizer)
    _refuse_holders([p for swap in swaps for p in swap.merged_parameters()], optimizer, "split")
    _all_or_none(swaps, lambda swap: swap.back(optimizer), lambda swap: swap.do(optimizer))
    delattr(model, APPLIED)
    _told.pop(model, None)
    if hasattr(model, HOOKED):  # else the model was loaded with layouts, which remain
        refuse_original_state_dicts(model)
        delattr(model, HOOKED)
    saving.forget(model)
    return model
