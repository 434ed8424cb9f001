"""``save_pretrained`` of a model with kernels applied: it goes through transformers' own list of conversions."""

from __future__ import annotations

from typing import Any

from torch import nn

from .. import conversion
from ..locations import join
from ..state import layouts_of

SAVED = "_layout_kernels_conversions"


def _pretrained(model: nn.Module) -> list[Any]:
    """The transformers models in ``model``, which may be one or a wrapper (PEFT); a composite model has several."""
    if conversion.WeightConverter is None:
        return []
    from transformers import PreTrainedModel

    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def _without_ours(found: Any) -> list[Any]:
    return [rule for rule in found or () if not isinstance(rule, conversion.LayoutConverter)]


def remember(model: nn.Module) -> None:
    """Let ``save_pretrained`` of ``model`` and of the models in it write the original names of their layouts."""
    for target in _pretrained(model):
        targets = {join(path, rule.target) for path, layout in layouts_of(target) for rule in layout.rules()}
        if targets:
            _remember(target, targets)


def _remember(target: Any, targets: set[str]) -> None:
    if not hasattr(target, SAVED):
        setattr(target, SAVED, (target.__dict__.get("_weight_conversions"),))
    before = target.__dict__.get("_weight_conversions")
    if before is None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        rules = get_model_conversion_mapping(target, add_legacy=False)
        before = [rule for rule in rules if not isinstance(rule, PrefixChange)]  # as revert_weight_conversion does
    ours = conversion.LayoutConverter()
    ours.applied.targets = targets
    target._weight_conversions = [*_without_ours(before), ours]


def forget(model: nn.Module) -> None:
    """Take back :func:`remember`, except where layouts that were applied through another model remain."""
    for target in _pretrained(model):
        if not hasattr(target, SAVED):
            continue
        if any(getattr(layout, "put_live", False) for _, layout in layouts_of(target)):
            remember(target)
            continue
        (before,) = getattr(target, SAVED)
        delattr(target, SAVED)
        if before is None:
            target.__dict__.pop("_weight_conversions", None)
        else:
            target._weight_conversions = before
