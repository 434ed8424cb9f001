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
from typing import Any

import torch
from torch import nn

from .requests import MODELS, Builder

try:
    from transformers import conversion_mapping as _conversion_mapping
    from transformers import monkey_patching as _monkey_patching
except ImportError:  # see checkpoints/converter.py
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
    """The modules in which ``parent``'s ``__init__`` looks up the classes of its children.

    A parent that is of no model tells nothing: then all that are loaded.
    """
    names = dict.fromkeys(cls.__module__ for cls in type(parent).__mro__)
    if not any(name.startswith(MODELS) for name in names):
        names = dict.fromkeys(list(sys.modules))
    return [sys.modules[name] for name in names if name.startswith(MODELS) and name in sys.modules]


# Module and name of classes that patches stand in for now, and the classes; kernel_loading() keeps it.
replaced_now: dict[tuple[str, str], type] = {}


def original_classes(layout: Any, parent: nn.Module) -> list[type[nn.Module]]:
    """Classes that ``layout``, below ``parent``, may stand in for; several when a pattern covers several.

    Those that the function names which built the layout, else all of its module, else all where ``parent`` is from.
    """
    builder: Builder | None = layout.builder
    if builder is not None and builder.module in sys.modules:
        found = _replaced_by(type(layout), sys.modules[builder.module])
        named = [cls for name, cls in found.items() if name in builder.names]
        if found:
            return list(dict.fromkeys(named or found.values()))
    code = getattr(type(parent).__init__, "__code__", None)
    found = {n: cls for namespace in _namespaces(parent) for n, cls in _replaced_by(type(layout), namespace).items()}
    return sorted(set(found.values()), key=lambda cls: cls.__name__ not in getattr(code, "co_names", ()))


def _replaced_by(layout_class: type, namespace: Any) -> dict[str, type[nn.Module]]:
    """Classes of a module, by name, in whose place patches put ``layout_class``."""
    mapping = patch_mapping()
    found: dict[str, type[nn.Module]] = {}
    for name, value in list(vars(namespace).items()):
        known = replaced_now.get((namespace.__name__, name), value)
        if not isinstance(known, type) or not issubclass(known, nn.Module) or hasattr(known, "is_layout"):
            continue
        if replacement(name, mapping) is layout_class:
            found[name] = known
    return found


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


def forget_our_classes(model: nn.Module) -> None:
    """Let what goes by classes find the stock ones, which ``model`` consists of again.

    transformers wrote the classes that it had put in place into the recorders of outputs, which are attributes of
    model classes, and the names of fused parents stand in ``_no_split_modules``. Later stock models need it too.
    """
    stock: dict[type, type] = {}
    placed: list[Any] = list(model.modules())
    for module in placed:
        cls: Any = type(module)
        if getattr(cls, "is_adopted", False):
            layouts = [c for c in patch_mapping().values() if c.__name__ == f"{cls.kernel_layer_name}Layout"]
            stock |= dict.fromkeys(layouts, cls._layout_kernels.original)
        elif hasattr(cls, "is_layout"):  # of a load that was refused
            parent = module.parent() if module.parent is not None else None
            originals = [type(original) for original in module.originals] or original_classes(module, parent or model)
            stock |= dict.fromkeys([cls], originals[0]) if originals else {}
    names = {cls.__name__ for cls, _, _ in _fusions()} | {cls.__name__ for cls in stock}
    for module in model.modules():
        for place in (vars(module), *(vars(cls) for cls in type(module).__mro__)):
            listed = place.get("_no_split_modules")
            if isinstance(listed, set):
                listed -= names
            elif isinstance(listed, list):
                listed[:] = [name for name in listed if name not in names]
        recorders: Any = getattr(module, "_can_record_outputs", None)
        for output, found in recorders.items() if isinstance(recorders, dict) else ():
            recorders[output] = (
                [_recorded(r, stock) for r in found] if isinstance(found, list) else _recorded(found, stock)
            )


def restore_tied_names(model: Any) -> None:
    """Let ``all_tied_weights_keys`` name parameters that are there: layouts had other names (Zamba's shared block).

    Source: transformers 5.22.2, ``modeling_utils.py`` (``post_init``).
    """
    for module in [*model.modules()][::-1]:  # children first, as they were built
        names = vars(module).get("all_tied_weights_keys")
        if not names or {*names, *names.values()} <= {
            name for name, _ in module.named_parameters(remove_duplicate=False)
        }:
            continue
        names = module.get_expanded_tied_weights_keys(all_submodels=False)
        for path, child in module.named_children():
            own = getattr(child, "all_tied_weights_keys", None) or {}
            names |= {f"{path}.{target}": f"{path}.{source}" for target, source in own.items()}
        module.all_tied_weights_keys = names


def _recorded(recorder: Any, stock: dict[type, type]) -> Any:
    target = getattr(recorder, "target_class", None)
    if isinstance(target, type):
        recorder.target_class = _recorded(target, stock)
    return unfused_class(stock.get(recorder, recorder)) if isinstance(recorder, type) else recorder


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
