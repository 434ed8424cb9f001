"""State dicts of a model with layouts, in the names of the stock model and back.

A layout's parameter is one original tensor under another name, or several concatenated along dimension 0
(``locations.Rule``). What is here applies these rules to whole state dicts; ``conversion.py`` applies them while
transformers loads and saves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .locations import Rule, join, parent_path, source_names


def merge(tensors: Sequence[torch.Tensor], rule: Rule, name: str, expected: torch.Size) -> torch.Tensor:
    """The parameter that ``tensors`` make: concatenated along dimension 0 in the order of ``rule.sources``.

    A single tensor that has the parameter's own shape is taken as it is: the checkpoint was saved in this layout.

    Raises:
        ValueError: tensors are missing, or the result has another shape than the parameter.
    """
    if len(tensors) == 1 and len(rule.sources) > 1 and tensors[0].shape != expected:
        raise ValueError(
            f"{name}: only one of {list(rule.sources)} is in the checkpoint (shape {tuple(tensors[0].shape)}), "
            f"the parameter needs all of them (shape {tuple(expected)})"
        )
    merged = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=0)
    if merged.shape != expected:
        raise ValueError(
            f"{name}: the checkpoint's {list(rule.sources)} give shape {tuple(merged.shape)}, "
            f"the layout has {tuple(expected)}; the layout was built with sizes of another module"
        )
    return merged


def split(tensor: torch.Tensor, rule: Rule) -> list[torch.Tensor]:
    """The inverse of :func:`merge`: equal parts along dimension 0, each contiguous."""
    if len(rule.sources) == 1:
        return [tensor]
    return [part.contiguous() for part in torch.chunk(tensor, len(rule.sources), dim=0)]


def layouts_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Path and layout of every layout of ``model``, whichever copy of this package it belongs to.

    One that stands at two places comes twice: a state dict names its parameters at both.
    """
    for path, module in model.named_modules(remove_duplicate=False):
        if getattr(module, "is_layout", False):
            yield path, module


def _named_rules(path: str, layout: Any, model: nn.Module) -> Iterator[tuple[Rule, str, tuple[str, ...]]]:
    """Each rule of ``layout`` with the full names of its parameter and of its original tensors."""
    layout.resolve_child_names(path, model)
    for rule in layout.rules():
        names = source_names(layout, path, rule)
        if names is not None:
            yield rule, join(path, rule.target), names


def original_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """``model.state_dict()`` under the names and in the shapes that the stock model has.

    Split tensors are copies; the others are the model's own, as in ``state_dict()``.
    """
    found = dict(model.state_dict())
    for path, layout in layouts_of(model):
        for rule, target, names in _named_rules(path, layout, model):
            if target in found:
                found.update(zip(names, split(found.pop(target), rule), strict=True))
    return found


def load_original_state_dict(model: nn.Module, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> Any:
    """``model.load_state_dict`` for a state dict of the stock model.

    Returns:
        What ``load_state_dict`` returns: the missing and the unexpected keys.

    Raises:
        RuntimeError: keys are missing or unexpected (``strict``), a shape differs, or a layout gets some of its
            tensors and not the others (always).
    """
    given = dict(state_dict)
    errors: list[str] = []
    accept_original_names(model, given, "", {}, strict, [], [], errors)
    if errors:
        raise RuntimeError("; ".join(errors))
    return model.load_state_dict(given, strict=strict)


def accept_original_names(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,  # noqa: ARG001 the signature of a load_state_dict pre-hook
    strict: bool,  # noqa: ARG001
    missing_keys: list[str],  # noqa: ARG001
    unexpected_keys: list[str],  # noqa: ARG001
    error_msgs: list[str],
) -> None:
    """Turn original tensors in ``state_dict`` into layout parameters, in place: a pre-hook of ``load_state_dict``.

    A layout that gets some of its tensors and not the others is an error even where missing keys are tolerated:
    resuming a training run would otherwise go on with half of a layer's weights. So is a tensor of a module that was
    replaced which no rule takes (an adapter of ``gate_proj``): it would be dropped.
    """
    for path, layout in layouts_of(module):
        rules = list(_named_rules(path, layout, module))
        absent, half = [], False
        for rule, target, names in rules:
            key, sources = f"{prefix}{target}", [f"{prefix}{name}" for name in names]
            if key not in state_dict and all(name in state_dict for name in sources):
                expected = layout.get_parameter(rule.target).shape
                try:
                    merged = merge([state_dict[name] for name in sources], rule, key, expected)
                except ValueError as error:
                    error_msgs.append(str(error))
                    continue
                for name in sources:
                    del state_dict[name]
                state_dict[key] = merged
            if key not in state_dict:
                absent.append(f"{key} (from {', '.join(sources)})")
                half = half or any(name in state_dict for name in sources)
        if absent and (half or len(absent) < len(rules)):
            error_msgs.append(f"{type(layout).__name__} at {path!r}: the state dict lacks {'; '.join(absent)}")
        error_msgs.extend(_without_a_place(module, state_dict, prefix, path, layout, rules))


def _without_a_place(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, path: str, layout: Any, rules: Sequence[Any]
) -> list[str]:
    """An error where ``state_dict`` has tensors below modules that ``layout`` replaced, other than its originals."""
    originals = {f"{prefix}{name}" for _, _, names in rules for name in names}
    gone = {
        parent_path(name)
        for rule, target, names in rules
        for name in names
        if "." in rule.target and parent_path(name) != parent_path(target)
    }
    starts = tuple(f"{prefix}{name}." for name in gone)
    lost = [key for key in state_dict if starts and key.startswith(starts) and key not in originals]
    lost = [key for key in lost if not _has_module(module, parent_path(key.removeprefix(prefix)))]
    if not lost:
        return []
    return [
        f"{type(layout).__name__} at {path!r} stands in the place of modules that {lost} belong to (an adapter of the "
        "stock model?): load it on the stock model, and apply kernels afterwards, which leaves such layers out"
    ]


def _has_module(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def accept_original_state_dicts(model: nn.Module) -> bool:
    """Let ``model.load_state_dict`` take the stock model's names, also where a Trainer or a wrapper calls it.

    Returns:
        Whether it did not do so before.
    """
    if any(_is_ours(hook) for hook in model._load_state_dict_pre_hooks.values()):
        return False
    model.register_load_state_dict_pre_hook(accept_original_names)
    return True


def refuse_original_state_dicts(model: nn.Module) -> None:
    """Take back :func:`accept_original_state_dicts`."""
    for number, hook in list(model._load_state_dict_pre_hooks.items()):
        if _is_ours(hook):
            del model._load_state_dict_pre_hooks[number]


def _is_ours(hook: Any) -> bool:
    return getattr(hook, "hook", None) is accept_original_names
