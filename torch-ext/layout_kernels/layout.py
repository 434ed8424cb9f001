"""The base of every ``<Name>Layout``: what a module that holds remapped weights needs, whatever it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from . import conversion, patching
from .locations import Rule, locations, parent_path
from .pages import pages


class Rules(list[Any]):
    """A layout's ``conversion_mapping``. Reading it is the moment to look at the ``KernelConfig`` that asks for it."""

    def __iter__(self) -> Iterator[Any]:
        request = patching.requested_kernels()
        if request is not None and request.model is not None:
            reason = patching.conflicting_keys(request.mapping, request.model)
            if reason is not None:
                raise ValueError(f"This KernelConfig cannot work: {reason}")
        if request is not None and request.model_type:
            patching.register_under(request.model_type, list.copy(self))
        return super().__iter__()


def conversion_rules() -> Rules:
    """The rules of every layout; empty where transformers is absent or too old to load through them."""
    return Rules([conversion.LayoutConverter()] if conversion.WeightConverter is not None else [])


class Layout(nn.Module):
    """Parameters in a kernel's own layout, in the place of the module (or of the adjacent modules) that it replaces.

    A subclass sets its parameters and attributes in ``__init__``, states ``rules()``, and has the ``forward`` of the
    layer that it belongs to. ``__init__`` must not raise: transformers would leave the process patched. What is wrong
    goes into ``refuse(reason)`` instead, and is raised as ``ValueError`` when ``from_pretrained`` ends (it calls
    ``eval()`` on the model once the original classes are back, and before the model is returned).
    """

    is_layout = True  # copies of this package know each other's layouts by this, never by isinstance
    conversion_mapping = conversion_rules()

    def __init__(self) -> None:
        super().__init__()
        self.refusal: str | None = None
        self.location = ""
        self.child_names: tuple[str, ...] | None = None
        self.loaded: set[str] = set()
        self.verified = False
        self.awaits_weights = False
        # A model's _init_weights goes by class name and sets `weight` on whatever is called RMSNorm (Gemma), so it
        # must pass over this module; its children are still initialised.
        self._is_hf_initialized = True

    def build(self, fill: Callable[[], None]) -> None:
        """Run ``fill``, the subclass's own part of ``__init__``; what it raises becomes the reason to refuse."""
        try:
            fill()
            if patching.patch_mapping():  # a load, not kernels applied to a live model
                if patching.zero3_enabled():
                    raise ValueError(
                        "DeepSpeed ZeRO-3 loads weights without converting them; apply kernels afterwards"
                    )
                patching.keep_fused_parents_whole()
                patching.register_everywhere(list.copy(self.conversion_mapping))
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
        """Raise ValueError when what this layout computes is not what the original computes."""

    def refuse(self, reason: str) -> None:
        """Record why this layout cannot be used; the first reason stays."""
        self.refusal = self.refusal or reason

    def note_loaded(self, name: str) -> None:
        """Record that parameter ``name`` was made from the checkpoint."""
        self.loaded.add(name)

    def resolve_child_names(self, path: str, model: nn.Module | None = None) -> None:
        """Find the names of the children that were fused, from the class patches or, if given, from ``model``."""
        if self.child_names is None:
            self.child_names = patching.fused_children(type(self), path.rpartition(".")[2])
        if self.child_names is None and model is not None:
            self.child_names = patching.children_of_fused_parent(model.get_submodule(parent_path(path)))

    def __setattr__(self, name: str, value: Any) -> None:
        # Tensor parallelism wraps a module's forward, to sum the gradients of q_norm over ranks for example; binding a
        # kernel afterwards would discard that. What is wrapped is our forward already, so the wrapper stays.
        if name == "forward" and "forward" in self.__dict__ and "_is_hooked" in self.__dict__:
            return
        super().__setattr__(name, value)

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
                "Either the checkpoint lacks them, or the class patches of an earlier load are still registered in "
                "this process: load inside kernel_loading(), which removes them."
            )

    def train(self, mode: bool = True) -> Layout:
        """``nn.Module.train``, which is where a load ends: see :meth:`finish_loading`."""
        if self.location or not self.awaits_weights:  # else a constructor calls it, as Blt's does, before the load
            self.finish_loading()
        super().train(mode)
        return self
