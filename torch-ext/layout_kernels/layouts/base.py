"""The base of every ``<Name>Layout``: what a module that holds remapped weights needs, whatever it computes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from ..checkpoints import converter
from ..checkpoints.key_table import Rule, layouts_of, locations, parent_path
from ..checkpoints.mapped_memory import pages
from ..ops import prepare_for
from ..transformers_glue import class_patches, requests

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ConversionMapping(list[Any]):
    """A layout's ``conversion_mapping``. Reading it is the moment to look at the ``KernelConfig`` that asks for it."""

    def __iter__(self) -> Iterator[Any]:
        request = requests.requested_kernels()
        if request is not None and request.model is not None:
            reason = class_patches.conflicting_keys(request.mapping, request.model)
            if reason is not None:
                raise ValueError(f"This KernelConfig cannot work: {reason}")
        if request is not None and request.model_type:
            class_patches.register_under(request.model_type, list.copy(self))
        return super().__iter__()


def conversion_rules() -> ConversionMapping:
    """The rules of every layout; empty where transformers is absent or too old to load through them."""
    return ConversionMapping([converter.LayoutConverter()] if converter.WeightConverter is not None else [])


class Layout(nn.Module):
    """Parameters in a kernel's own layout, in the place of the module (or of the adjacent modules) that it replaces.

    It lives while a checkpoint is loaded. ``from_pretrained`` calls ``eval()`` on the model once the original classes
    are back; then the layouts *settle*: each becomes the stock module that it stood in for, with the loaded weights
    under their stock names, running the layer's forward.

    A subclass sets its parameters and attributes in ``__init__``, states ``rules()``, finds in ``inspect`` what it
    stands in for, puts that into its place in ``settle``, and has the ``forward`` of the layer that it belongs to.
    ``__init__`` must not raise: transformers would leave the process patched. What is wrong goes into
    ``refuse(reason)`` instead, and is raised as ``ValueError`` when the load ends.
    """

    is_layout = True  # copies of this package know each other's layouts by this, never by isinstance
    conversion_mapping = conversion_rules()
    layer: ClassVar[type[nn.Module]]

    def __init__(self) -> None:
        super().__init__()
        self.refusal: str | None = None
        self.location = ""
        self.child_names: tuple[str, ...] | None = None
        self.originals: tuple[Any, ...] = ()  # the stock modules that it stands in for, without memory
        self.builder = requests.builder()
        self.parent: weakref.ref[nn.Module] | None = None
        self.model: weakref.ref[nn.Module] | None = None
        self.loaded: set[str] = set()
        self.verified = False
        self.awaits_weights = False
        # A model's _init_weights goes by class name and sets `weight` on whatever is called RMSNorm (Gemma), so it
        # must pass over this module; its children are still initialised.
        self._is_hf_initialized = True

    @property
    def layer_name(self) -> str:
        """What a ``KernelConfig`` calls the layer."""
        return type(self).__name__.removesuffix("Layout")

    def build(self, fill: Callable[[], None]) -> None:
        """Run ``fill``, the subclass's own part of ``__init__``; what it raises becomes the reason to refuse."""
        try:
            fill()
            if class_patches.patch_mapping():  # a load
                if class_patches.zero3_enabled():
                    raise ValueError(
                        "DeepSpeed ZeRO-3 loads weights without converting them; apply kernels afterwards"
                    )
                class_patches.keep_fused_parents_whole()
                class_patches.register_everywhere(list.copy(self.conversion_mapping))
        except Exception as error:  # noqa: BLE001 raised by finish_loading, see the class docstring
            self.refuse(str(error) or repr(error))
        self.awaits_weights = torch.empty(0).is_meta  # from_pretrained builds on the meta device

    def rules(self) -> list[Rule]:
        """One :class:`Rule` for each parameter."""
        raise NotImplementedError(f"{type(self).__name__} states no rules()")

    def verify(self, model: nn.Module, path: str) -> None:
        """Check once, while ``model`` is loaded, that this layout may stand at ``path``; see ``inspect``."""
        if self.verified:
            return
        self.location = path
        place = parent_path(path)
        self.parent, self.model = weakref.ref(model.get_submodule(place)), weakref.ref(model)
        while place and isinstance(model.get_submodule(place), nn.ModuleList | nn.ModuleDict | nn.Sequential):
            place = parent_path(place)  # a container built nothing itself
        self._inspect_once(model.get_submodule(place))

    def _inspect_once(self, parent: nn.Module) -> None:
        self.verified = True
        if self.refusal is not None:
            return  # it may have been refused before it had parameters
        try:
            self.inspect(parent)
        except ValueError as error:
            self.refuse(str(error))

    def inspect(self, parent: nn.Module) -> None:
        """Find the ``originals``; raise ValueError when what this layout computes is not what they compute."""
        raise NotImplementedError(f"{type(self).__name__} has no inspect()")

    def settle(self) -> list[nn.Module]:
        """Become the stock module, or modules, that this layout stands in for, with the values that it holds.

        Returns:
            These modules.
        """
        raise NotImplementedError(f"{type(self).__name__} has no settle()")

    def refuse(self, reason: str) -> None:
        """Record why this layout cannot be used; the first reason stays."""
        self.refusal = self.refusal or reason

    def note_loaded(self, name: str) -> None:
        """Record that parameter ``name`` was made from the checkpoint."""
        self.loaded.add(name)

    def resolve_child_names(self, path: str, model: nn.Module | None = None) -> None:
        """Find the names of the children that were fused, from the class patches or, if given, from ``model``."""
        if self.child_names is None:
            self.child_names = class_patches.fused_children(type(self), path.rpartition(".")[2])
        if self.child_names is None and model is not None:
            self.child_names = class_patches.children_of_fused_parent(model.get_submodule(parent_path(path)))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        path = prefix.removesuffix(".")
        self.location = path
        self.resolve_child_names(path)
        locations.note(self, path, destination)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.awaits_weights = False  # torch itself reports what is missing
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Layout:
        self.awaits_weights = False  # to_empty() and the like: the caller fills the parameters
        super()._apply(*args, **kwargs)
        return self

    def finish_loading(self) -> None:
        """Raise what was recorded against this layout, and make sure that each of its parameters was loaded.

        Raises:
            ValueError: the layout was refused, or a parameter has no value from the checkpoint.
        """
        place = f" at {self.location!r}" if self.location else ""
        if self.awaits_weights and not self.verified and not any(True for _ in self.parameters()):
            # No checkpoint tensor leads to a layer without parameters, so nothing may have had it checked.
            self._inspect_once(nn.Module())
        if self.refusal is not None:
            raise ValueError(f"{type(self).__name__}{place}: {self.refusal}")
        if not self.awaits_weights:
            return
        self.awaits_weights = False
        pages.release()
        missing = [
            name
            for name, parameter in self.named_parameters()
            if name not in self.loaded and not getattr(parameter, "_is_hf_initialized", False)
        ]
        if missing:
            wanted = [s for rule in self.rules() if rule.target in missing for s in rule.sources]
            raise ValueError(
                f"{type(self).__name__}{place}: no checkpoint tensor was loaded for {missing} (from {wanted}). "
                "Either the checkpoint lacks them, or transformers converts nothing in its format (GGUF), or class "
                "patches of an earlier load are still registered in this process: load inside kernel_loading(), which "
                "keeps a GGUF file's names and removes patches, or load plainly and call apply_default_kernels()."
            )
        if any(parameter.is_meta for parameter in self.parameters()):
            raise ValueError(
                f"{type(self).__name__}{place}: its weights are offloaded to disk under the names that they have "
                "while a checkpoint is loaded. Load inside kernel_loading(), which keeps the checkpoint's names then."
            )

    def train(self, mode: bool = True) -> Any:
        """``nn.Module.train``, which is where a load ends: see :meth:`finish_loading` and `settle_all`."""
        if not self.location and self.awaits_weights:  # a constructor calls it, as Blt's does, before the load
            return super().train(mode)
        model = self.model() if self.model is not None else None
        if model is not None:
            settle_all(model, mode)
        else:
            self.finish_loading()
            if self.verified:
                _settle(self, mode)
        if isinstance(self, Layout):
            return super().train(mode)
        return self.train(mode)  # of the class that it has now


def settle_all(model: nn.Module, mode: bool | None = None) -> None:
    """Let every layout of ``model`` settle, or none: afterwards the model's tree is the stock model's.

    Args:
        model: its layouts have been verified.
        mode: of the ``train(mode)`` that ends the load. None: before the weights are loaded, where something else goes
            by the stock names while they are (a quantiser, a parallel plan, offloading). Refused layouts stay then,
            and say so when the load ends.

    Raises:
        ValueError: a layout was refused or has no weights; nothing has settled then.
    """
    layouts = [layout for _, layout in layouts_of(model) if hasattr(layout, "settle")]  # of earlier versions: stay
    try:
        if mode is not None:
            for layout in layouts:
                layout.finish_loading()
        for layout in layouts:
            if getattr(layout, "is_layout", False) and layout.verified and layout.refusal is None:
                parent = layout.parent()
                parent.__class__ = class_patches.unfused_class(type(parent))
                _settle(layout, mode)
    finally:
        class_patches.forget_our_classes(model)
    locations.forget()
    converter.forget_conversions(model)
    class_patches.restore_tied_names(model)
    if mode is not None:
        prepare_for(model)


def _settle(layout: Any, mode: bool | None) -> None:
    for module in layout.settle():
        module.train(layout.training if mode is None else mode)
        if not any(parameter.is_meta for parameter in module.parameters()):
            for part in module.modules():
                part._is_hf_initialized = True  # as the end of a load leaves stock's: initialised once


def take_place(place: Any, stock: nn.Module) -> None:
    """Let ``place``, a layout, become the module ``stock``: whoever holds it, however often, holds that."""
    if place is not stock:
        vars(place).clear()
        vars(place).update(vars(stock))
        place.__class__ = type(stock)
