"""A load without weights: builds a model with layers in place and asks each layer whether it may stand there."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from .. import conversion, layers, patching
from ..layout import Layout
from .loading import kernel_loading
from .names import saved_names, unreached

Key = str | tuple[tuple[str, str], ...]


def _patches(model: nn.Module, mapping: dict[Key, str]) -> dict[str, type]:
    """What transformers registers for ``mapping`` (``register_kernel_replacements_and_fusions``)."""
    from transformers.integrations.hub_kernels import make_parent_class_for_kernel_fusion

    found: dict[str, type] = {}
    for key, layer in mapping.items():
        layout = getattr(layers, f"{layer}Layout", None)
        if layout is None:
            continue  # a stateless layer, which replaces no class
        if isinstance(key, str):
            found[key] = layout
            continue
        parent = key[0][1].rpartition(".")[0].replace("*", r"\w+")
        children = [path.rpartition(".")[2] for _, path in key]
        for name, module in model.named_modules():
            if re.fullmatch(parent, name):
                cls = type(module)
                found[cls.__name__] = make_parent_class_for_kernel_fusion(cls, children, layout)
    return found


def _key_of(layout: Any, path: str, model: nn.Module, mapping: dict[Key, str]) -> Key | None:
    """The key of ``mapping`` that put ``layout`` at ``path``."""
    parent = model.get_submodule(path.rpartition(".")[0])
    fused = patching.children_of_fused_parent(parent)
    for key, layer in mapping.items():
        if f"{layer}Layout" != type(layout).__name__:
            continue
        if isinstance(key, str):
            if any(
                patching.replacement(cls.__name__, {key: cls})
                for cls in patching.original_classes(type(layout), parent)
            ):
                return key
        elif fused is not None and tuple(pattern.rpartition(".")[2] for _, pattern in key) == fused:
            owner = key[0][1].rpartition(".")[0].replace("*", r"\w+")
            named = (module for name, module in model.named_modules() if re.fullmatch(owner, name))
            if any(type(module) is type(parent) for module in named):
                return key
    return None


def refusals(cls: Any, config: Any, mapping: dict[Key, str]) -> dict[Key, str]:
    """Keys of ``mapping`` whose layers would be refused when ``cls`` is loaded with ``config``, with the reasons."""
    if not mapping:
        return {}
    from transformers.monkey_patching import apply_patches, register_patch_mapping

    found: dict[Key, str] = {}
    placed: set[Key] = set()
    with kernel_loading():
        with torch.device("meta"):
            stock = cls(config)
        names = saved_names(stock)
        register_patch_mapping(_patches(stock, mapping), overwrite=True)
        with apply_patches(), torch.device("meta"):
            model = cls(config)
        patching.register_under(config.model_type, list.copy(Layout.conversion_mapping))
        model.state_dict()
        conversion.verify_all(model)
        unfilled = unreached(names, model)
        for path, module in model.named_modules():
            layout: Any = module
            key = _key_of(layout, path, model, mapping) if getattr(module, "is_layout", False) else None
            if key is not None:
                placed.add(key)
                reason = layout.refusal or unfilled.get(path)
                if reason is not None:
                    found.setdefault(key, reason)
    for key, layer in mapping.items():
        if key not in placed and hasattr(layers, f"{layer}Layout"):
            found.setdefault(key, _out_of_reach(key))
    return found


def _out_of_reach(key: Key) -> str:
    what = "the class" if isinstance(key, str) else f"the class of {key[0][1].rpartition('.')[0]}"
    return (
        f"transformers patches a class by its name in the modeling file, and {what} is taken from a table or from "
        "elsewhere there, so no layer was put in its place"
    )
