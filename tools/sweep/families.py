"""Which families of the installed transformers have an RMSNorm, and which class of each the sweep builds.

A family is a model type of the auto classes that has a head for text (causal, image-text-to-text, multimodal, masked,
encoder-decoder), or is an encoder of its own. Left out are model types that exist only as a part of another family:
they are swept within it. A family counts when its modeling file, or that of a part of its default config, has an
RMSNorm, found by its formula in the source; the sweep itself then looks at the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .overrides import MODELS

HEADS = ("IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM")
_NORM = re.compile(r"class \w*(RMSNorm|RmsNorm)\w*|nn\.RMSNorm\(|pow\(2\)\.mean\(-1|import .*RMSNorm")


@dataclass(frozen=True)
class Family:
    """A model type, the names of its config and model class in ``transformers``, and its kind of head."""

    model_type: str
    config: str
    model: str
    head: str


def _first(names: Any) -> str | None:
    return names[0] if isinstance(names, list | tuple) else names


@cache
def _folders_with_norms() -> frozenset[str]:
    import transformers

    root = Path(transformers.__file__).parent / "models"
    return frozenset(file.parent.name for file in root.glob("*/modeling_*.py") if _NORM.search(file.read_text()))


def _has_norm(model_type: str) -> bool:
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    return model_type_to_module_name(model_type) in _folders_with_norms()


def _parts_of(config: Any) -> Iterator[str]:
    for name in type(config).sub_configs:
        part: Any = getattr(config, name, None)
        if getattr(part, "model_type", ""):
            yield part.model_type
            yield from _parts_of(part)


def _sub_types(config_name: str) -> set[str]:
    """Model types of the parts of a config at any depth: of its default, else of those that the class declares."""
    import transformers

    cls = getattr(transformers, config_name)
    try:
        return set(_parts_of(cls()))
    except Exception:  # noqa: BLE001 a config without a valid default; the shrinker gives it values
        return {part.model_type for part in cls.sub_configs.values() if getattr(part, "model_type", "")}


@cache
def families() -> tuple[Family, ...]:
    """All families, by model type."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    heads = {head: getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES") for head in HEADS}
    found: dict[str, Family] = {}
    parts: set[str] = set()
    for model_type, config_name in CONFIG_MAPPING_NAMES.items():
        head = next((head for head in HEADS if model_type in heads[head]), "BASE")
        table = heads.get(head, modeling_auto.MODEL_MAPPING_NAMES)
        model = _first(table.get(model_type))
        if model is None:
            continue
        model = MODELS.get(model_type, model)
        sub_types = _sub_types(config_name)
        parts |= sub_types - {model_type}
        if _has_norm(model_type) or any(map(_has_norm, sub_types)):
            found[model_type] = Family(model_type, config_name, model, head)
    kept = (f for f in found.values() if f.head != "BASE" or f.model_type not in parts)
    return tuple(sorted(kept, key=lambda family: family.model_type))
