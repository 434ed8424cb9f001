"""A load without weights: builds a model with layers in place and asks each layer whether it may stand there."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from .. import layers
from ..checkpoints import converter
from ..layouts.base import Layout
from ..transformers_glue import class_patches
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
    fused = class_patches.children_of_fused_parent(parent)
    for key, layer in mapping.items():
        if f"{layer}Layout" != type(layout).__name__:
            continue
        if isinstance(key, str):
            covered = class_patches.original_classes(layout, parent)
            if any(class_patches.replacement(cls.__name__, {key: cls}) for cls in covered):
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
    try:
        return _refused_in_one_model(cls, config, mapping)
    except Exception as error:  # noqa: BLE001 what the model raises with a layer inside is the reason to leave it out
        reason = f"transformers cannot build {cls.__name__} with it: {error}"
    if len(mapping) == 1:
        return dict.fromkeys(mapping, reason)
    found: dict[Key, str] = {}
    for key, layer in mapping.items():
        found |= refusals(cls, config, {key: layer})
    return found or dict.fromkeys(mapping, reason)


def _refused_in_one_model(cls: Any, config: Any, mapping: dict[Key, str]) -> dict[Key, str]:
    with kernel_loading(), torch.device("meta"):
        stock = cls(config)
        names = saved_names(stock)
        model = _with_layers(cls, config, _patches(stock, mapping))
        class_patches.register_under(config.model_type, list.copy(Layout.conversion_mapping))
        state = model.state_dict()  # kept until the names are followed: the layouts' places are noted with it
        converter.verify_all(model)
        reasons = unreached(names, model, state)
        keys = {}
        for path, module in model.named_modules():
            layout: Any = module
            if getattr(module, "is_layout", False):
                keys[path] = _key_of(layout, path, model, mapping)
                if layout.refusal is not None:
                    reasons[path] = layout.refusal
    found: dict[Key, str] = {}
    for path, key in keys.items():
        if key is not None and path in reasons:
            found.setdefault(key, reasons[path])
    placed = set(keys.values())
    for key, layer in mapping.items():
        if key not in placed and hasattr(layers, f"{layer}Layout"):
            found[key] = _out_of_reach(key)
    return found


def _with_layers(cls: Any, config: Any, patches: dict[str, type]) -> Any:
    """``cls(config)`` with the classes replaced; put back also when the model cannot be built."""
    from transformers import modeling_utils
    from transformers.monkey_patching import register_patch_mapping

    register_patch_mapping(patches, overwrite=True)
    with modeling_utils.apply_patches():  # looked up here: kernel_loading() has made it clean up after an error
        return cls(config)


def _out_of_reach(key: Key) -> str:
    what = "the class" if isinstance(key, str) else f"the class of {key[0][1].rpartition('.')[0]}"
    return (
        f"transformers patches a class by its name in the modeling file, and {what} is taken from a table or from "
        "elsewhere there, so no layer was put in its place"
    )
