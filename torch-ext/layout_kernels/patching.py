"""What transformers' class patching did, read back: which class a layout replaced, and which children it fused.

A layout is told neither. While a model is built, transformers swaps classes by name (``apply_patches``)
and builds ``Fused<Parent>`` classes (``integrations/hub_kernels.make_parent_class_for_kernel_fusion``); both stay in
the process-wide patch mapping until the load is over, and are read from there.

Sources: transformers 5.22.2, the two modules named above and ``conversion_mapping.py``.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

try:
    from transformers import conversion_mapping as _conversion_mapping
    from transformers import monkey_patching as _monkey_patching
except ImportError:  # see conversion.py
    _conversion_mapping = _monkey_patching = None  # type: ignore[assignment]


def patch_mapping() -> dict[str, type]:
    """Patterns of class names and what replaces them, as registered now; empty without transformers."""
    return _monkey_patching.get_patch_mapping() if _monkey_patching is not None else {}


def replacement(class_name: str, mapping: dict[str, type]) -> type | None:
    """What replaces ``class_name``: an exact key first, else the first key that matches as a regular expression."""
    if class_name in mapping:
        return mapping[class_name]
    for pattern, value in mapping.items():
        try:
            if re.search(pattern, class_name):
                return value
        except re.error:
            continue
    return None


def _namespaces(parent: nn.Module) -> list[Any]:
    """The transformers modules in which ``parent``'s ``__init__`` looks up the classes of its children.

    A parent that is of no model tells nothing: then all that are loaded.
    """
    names = dict.fromkeys(cls.__module__ for cls in type(parent).__mro__)
    if not any(name.startswith("transformers.models.") for name in names):
        names = dict.fromkeys(list(sys.modules))
    return [sys.modules[name] for name in names if name.startswith("transformers.models.") and name in sys.modules]


def original_classes(layout_class: type, parent: nn.Module) -> list[type[nn.Module]]:
    """Classes that ``layout_class`` stood in for where ``parent`` was built; several when a pattern covers several."""
    mapping = patch_mapping()
    found: dict[type[nn.Module], None] = {}
    for namespace in _namespaces(parent):
        for name, value in list(vars(namespace).items()):
            if not isinstance(value, type) or not issubclass(value, nn.Module) or hasattr(value, "is_layout"):
                continue
            if replacement(name, mapping) is layout_class:
                found[value] = None
    return list(found)


def build_original(cls: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    """``cls(*args, **kwargs)`` without memory for its parameters, whatever device context is active."""
    with torch.device("meta"):
        return cls(*args, **kwargs)


def _fusions() -> Iterator[tuple[type, type, tuple[str, ...]]]:
    """(fused parent class, layout class, names of the fused children) for each fusion that is registered now."""
    for cls in patch_mapping().values():
        init = cls.__dict__.get("__init__")
        if init is None or getattr(init, "__closure__", None) is None:
            continue
        free = inspect.getclosurevars(init).nonlocals
        if hasattr(free.get("kernel_cls"), "is_layout") and free.get("child_names"):
            yield cls, free["kernel_cls"], tuple(free["child_names"])


def fused_children(layout_class: type, own_name: str) -> tuple[str, ...] | None:
    """Names of the children that a ``layout_class`` at ``own_name`` was made from, when they are unambiguous."""
    found = {names for _, layout, names in _fusions() if layout is layout_class and names[0] == own_name}
    return found.pop() if len(found) == 1 else None


def children_of_fused_parent(parent: nn.Module) -> tuple[str, ...] | None:
    """Names of the children that ``parent``, an instance of a ``Fused<Parent>`` class, was fused from."""
    init = type(parent).__dict__.get("__init__")
    if init is None or getattr(init, "__closure__", None) is None:
        return None
    names = inspect.getclosurevars(init).nonlocals.get("child_names")
    return tuple(names) if names else None


def zero3_enabled() -> bool:
    """Whether transformers loads under DeepSpeed ZeRO-3, which partitions weights before any conversion."""
    if _monkey_patching is None:
        return False
    from transformers.integrations import is_deepspeed_zero3_enabled

    return bool(is_deepspeed_zero3_enabled())


def unfused_class(cls: type) -> type:
    """The class that transformers made ``cls``, a ``Fused<Parent>``, from; any other class as it is."""
    init = cls.__dict__.get("__init__")
    is_fused = cls.__name__.startswith("Fused") and init is not None and getattr(init, "__closure__", None) is not None
    return cls.__bases__[0] if is_fused else cls


@dataclass(frozen=True)
class Request:
    """A ``KernelConfig`` that transformers is registering: its mapping, and for which model.

    ``model`` is the model on the meta device that transformers looks tuple keys up in; None before the first of them.
    """

    mapping: dict[Any, Any]
    model: nn.Module | None
    model_type: str | None


def requested_kernels() -> Request | None:
    """What transformers is registering now, further up the call stack, or None.

    transformers shows it to nobody, and patches by class name, so that of two keys that exclude each other one is
    dropped without a word. A version that names its variables otherwise only loses the early and clear message.
    """
    frame = inspect.currentframe()
    for _ in range(6):
        frame = frame.f_back if frame is not None else None
        if frame is not None and frame.f_code.co_name == "register_kernel_replacements_and_fusions":
            mapping = getattr(frame.f_locals.get("kernel_config"), "kernel_mapping", {})
            model = frame.f_locals.get("meta_model")
            return Request(
                mapping if isinstance(mapping, dict) else {},
                model if isinstance(model, nn.Module) else None,
                getattr(frame.f_locals.get("config"), "model_type", None),
            )
    return None


def register_under(model_type: str, rules: list[Any]) -> None:
    """Add ``rules`` to the conversion entry of ``model_type``, the config's own.

    transformers registers the rules of a layout under the type of the model class's config and looks them up under
    the type of the config itself; where a family borrows another's classes (GLM-GA those of GLM-4.6V) they differ.
    """
    if _conversion_mapping is None:
        return
    _conversion_mapping.get_checkpoint_conversion_mapping("")  # builds the table on first use
    table: dict[str, Any] = _conversion_mapping._checkpoint_conversion_mapping_cache or {}
    entry = table.get(model_type) or []
    if not any(type(rule) is type(rules[0]) for rule in entry):
        table[model_type] = [*entry, *rules]


_extended: dict[str, Any] | None = None


def register_everywhere(rules: list[Any]) -> None:
    """Add ``rules`` to each conversion entry that transformers keeps under a class name.

    An entry under a class name hides the one under the model type, where ``from_pretrained`` registers the rules of
    a layout (Qwen2.5-VL then loads nothing into it). Our rules touch no key of a model without layouts, so the class
    that is being loaded, which is unknown here, does not matter.
    """
    if _conversion_mapping is None:
        return
    global _extended
    table: dict[str, Any] | None = _conversion_mapping._checkpoint_conversion_mapping_cache
    if (
        table is None or table is _extended
    ):  # nothing was registered at all, or this table was done for a layout before
        return
    _extended = table
    for name, entry in table.items():
        if name[:1].isupper() and not any(type(rule) is type(rules[0]) for rule in entry):
            table[name] = [*entry, *rules]


def keep_fused_parents_whole() -> None:
    """Let ``device_map="auto"`` treat ``Fused<Parent>`` as it treats ``<Parent>``: never split across devices."""
    for fused, _, _ in _fusions():
        parent = fused.__bases__[0]
        for value in list(vars(sys.modules[parent.__module__]).values()):
            names = getattr(value, "_no_split_modules", None) if isinstance(value, type) else None
            if names and parent.__name__ in names and fused.__name__ not in names:
                value._no_split_modules = [*names, fused.__name__]


def _parent_pattern(key: Any) -> str:
    return key[0][1].rpartition(".")[0]


def _parents(key: Any, model: nn.Module) -> set[type]:
    """Classes of the modules that ``key`` names as parents, found as transformers finds them."""
    pattern = _parent_pattern(key).replace("*", r"\w+")
    return {type(module) for path, module in model.named_modules() if re.fullmatch(pattern, path)}


def _shown(key: Any) -> str:
    return str(tuple(tuple(pair) for pair in key)) if isinstance(key, tuple) else repr(key)


def conflicting_keys(kernel_mapping: dict[Any, Any], model: nn.Module) -> str | None:
    """Why the keys of a ``KernelConfig`` cannot work together in ``model``, with the key to use; None when they can.

    transformers patches by class name: of two tuple keys under one parent class only the last takes effect, and a
    fusion key that meets a child which another key has replaced cannot see its weights.
    """
    fusions = [key for key in kernel_mapping if isinstance(key, tuple)]
    for number, first in enumerate(fusions):
        for second in fusions[number + 1 :]:
            if _parents(first, model) & _parents(second, model):
                longest = max(first, second, key=len)
                return (
                    f"two tuple keys share the parent {_parent_pattern(second)!r}: {_shown(first)} and "
                    f"{_shown(second)}. "
                    f"transformers applies only the last of them. Use one tuple key: {_shown(longest)}"
                )
    return None
