"""Whether the tensors of a checkpoint would reach the layers, by their names alone: a load without data."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import nn

from ..checkpoints.key_table import join


def saved_names(stock: Any) -> list[str]:
    """The names under which ``save_pretrained`` would write ``stock``, a model without layouts on the meta device."""
    from transformers.core_model_loading import revert_weight_conversion

    return list(revert_weight_conversion(stock, stock.state_dict()))


def unreached(names: list[str], model: Any, state: dict[str, Any]) -> dict[str, str]:
    """Paths of the layouts of ``model`` that a checkpoint with ``names`` would leave without values, with the reason.

    The names are sent through the renamings and converters of ``model``, whose ``state_dict()`` is ``state``. A family
    whose checkpoints hold merged tensors (Molmo 2's ``ff_proj``) has a converter of its own for them, and transformers
    lets one converter at most see a tensor.
    """
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, loading.WeightConverter)]
    led: dict[str, set[str | None]] = defaultdict(set)
    for name in names:
        target, source = loading.rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        led[target].add(source)
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        reason = _missing(module, path, led) if getattr(module, "is_layout", False) else ""
        if reason:
            found[path] = reason
    return found


def _missing(layout: nn.Module, path: str, led: dict[str, set[str | None]]) -> str:
    layer: Any = layout
    for rule in layer.rules():
        if len(led.get(join(path, rule.target), ())) < len(rule.sources):
            return (
                f"its {rule.target} is made of {list(rule.sources)}, which checkpoints of this family do not have by "
                "these names: transformers converts other tensors into them"
            )
    return ""
