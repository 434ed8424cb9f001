"""The smallest config of a family: every size of its default config cut down by what the field's name says.

Names of fields mean nearly the same in all families, so the rules below are patterns over names, first match wins.
Parts of a config are shrunk likewise. What the rules get wrong for one family is data: ``overrides.py``.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from .overrides import OVERRIDES

VOCABULARY = 128
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, EXPERTS = 32, 48, 4, 2, 8, 2, 4
PATCH, IMAGE = 4, 16
MAX_PARAMETERS = 20_000_000
MAX_LAYERS = 6

# Pattern over the whole name, and the value or a function of the default.
_RULES: tuple[tuple[str, Any], ...] = (
    (
        r"(?!token_dropout).*(dropout|drop_rate|drop_path|drop_path_rate|layerdrop|jitter_noise|jitter|_drop|_pdrop)(_\w*)?",
        0.0,
    ),
    (r"vocab_size\w*|\w*_vocab_size|codebook_size|num_codes", lambda v: min(v, VOCABULARY)),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", lambda v: min(v, 1)),
    (r"encoder_hash_byte_group_vocab", 64),
    (r"n_group|topk_group|num_expert_groups?|n_groups_moe", 1),
    (r"num_experts_per_tok(en)?|moe_topk?|moe_top_k|num_experts_per_token|top_k_experts|moe_k", lambda v: min(v, 2)),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", lambda v: min(v, 1)),
    (r"(\w*_)?(n|num)_(routed_|local_)?experts|moe_num_experts|num_local_experts", lambda v: min(v, EXPERTS)),
    (r"(num_|n_)?\w*(kv|key_value|key|k)_heads|n_kv_heads?", lambda v: min(v, KV_HEADS)),
    (r"(linear_)?num_value_heads|linear_num_value_heads", HEADS),
    (r"\w*(num_|n_)\w*heads|(\w*_)?n_heads?|(\w*_)?attention_heads|num_heads", lambda v: min(v, HEADS)),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank|\w*lora_rank|\w*_rank", lambda v: min(v, 16)),
    (r"qk_head_dim", 2 * HEAD_DIM),
    (r"\w*head_dim|d_kv|attention_head_size|kv_channels|d_head", HEAD_DIM),
    (r"(\w*_)?(num|n)_(\w*_)?(layers?|blocks?)|\w*depth|n_layers?|num_layers|\w+_layers", lambda v: min(v, LAYERS)),
    (r"\w*(moe|expert)\w*_(intermediate_size|ffn_dim|hidden_size|inter_dim)", 24),
    (r"\w*(intermediate|ffn|mlp|feed_?forward|ff)_(size|dim|hidden_size|hidden_dim)|d_ff|encoder_ffn_dim", INNER),
    (r"(\w*_)?(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|width|model_dim|dim|embd_dim)", HIDDEN),
    (
        r"\w*(max_position_embeddings|max_seq_len|max_sequence_length|n_positions|max_source_positions)",
        lambda v: min(v, 64),
    ),
    (r"(vision_)?patch_size", lambda v: min(v, PATCH)),
    (r"num_patches", 16),
    (r"num_embeddings|position_embedding_size|num_codes|num_position_embeddings", lambda v: min(v, VOCABULARY)),
    (r"\w*(mamba_d_head|time_step_rank|d_state|state_size|ssm_state_size)", lambda v: min(v, 16)),
    (r"\w*n_groups|\w*num_groups", lambda v: min(v, 2)),
    (r"hidden_size_\w+|\w+_dimension|\w+_inplanes|num_pos_feats", lambda v: min(v, HIDDEN)),
    (
        r"(base|latent|output|hidden)_channels|\w*filters|\w*_features|num_mel_bins|upsample_groups",
        lambda v: min(v, HIDDEN),
    ),
    (r"\w+_dims?", lambda v: min(v, HIDDEN)),
    (r"acoustic_tokenizer_chunk_size", lambda v: v),
    (r"sliding_window|attention_window_size|\w*chunk_size", lambda v: min(v, 8)),
)
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def shrunk_value(name: str, value: Any) -> Any:
    """``value`` of field ``name`` made small; itself when no rule knows the name."""
    for pattern, small in _RULES:
        if re.fullmatch(pattern, name):
            if isinstance(small, float):
                return small if isinstance(value, float | int) else value
            if isinstance(value, list | tuple) and value and all(type(v) is int for v in value) and min(value) > PATCH:
                return type(value)(shrunk_value(name, v) for v in value)
            if not isinstance(value, int) or isinstance(value, bool):
                return value
            return small(value) if callable(small) else min(value, small) if value else value
    return value


def _field_defaults(cls: Any) -> dict[str, Any]:
    """Values of the fields of a config class: of its default instance, else of the fields as declared."""
    try:
        default = cls()
        return {f.name: getattr(default, f.name, None) for f in dataclasses.fields(cls) if not f.name.startswith("_")}
    except Exception:  # noqa: BLE001 a class without a valid default
        missing = dataclasses.MISSING
        return {f.name: f.default for f in dataclasses.fields(cls) if f.default is not missing}


def _kept_layers(fields: dict[str, Any]) -> tuple[str, list[int], list[str]] | None:
    """The field that counts layers, which layers show every kind once, and the fields with one value a layer."""
    counter = next((name for name in _LAYER_COUNTS if isinstance(fields.get(name), int)), None)
    if counter is None:
        return None
    count = fields[counter]
    lists = [name for name, value in fields.items() if isinstance(value, list) and len(value) == count and count > 1]
    kinds: dict[str, int] = {}
    for layer in range(count):
        kinds.setdefault(repr([fields[name][layer] for name in lists]), layer)
    kept = sorted(kinds.values())[:MAX_LAYERS]
    kept += [layer for layer in range(count) if layer not in kept][: max(0, LAYERS - len(kept))]
    return counter, sorted(kept), lists


def _token_ids(fields: dict[str, Any]) -> dict[str, int]:
    """Small, different ids below the small vocabulary for each field that names a token."""
    found, free = {}, VOCABULARY - 1
    for name, value in fields.items():
        names_token = re.fullmatch(r"\w*(token_id|token_index|_token)", name) and not isinstance(value, str | list)
        if name in _SPECIAL and (value is not None or name != "decoder_start_token_id"):
            found[name] = _SPECIAL[name]
        elif names_token and isinstance(value, int) and not isinstance(value, bool):
            found[name] = free
            free -= 1
    return found


@cache
def _has_sections(module: str) -> bool:
    """Whether the modeling file beside the configuration ``module`` splits rotary frequencies over axes."""
    modeling = Path(str(sys.modules[module].__file__).replace("configuration_", "modeling_"))
    return modeling.exists() and "mrope_section" in modeling.read_text()


def _rope_with_sections(cls: Any, fields: dict[str, Any]) -> dict[str, Any] | None:
    """Rotary parameters whose three sections make up half of the small head."""
    rope = fields.get("rope_parameters")
    if "rope_parameters" not in fields or "Vision" in cls.__name__ or not _has_sections(cls.__module__):
        return None
    small = {"mrope_section": [HEAD_DIM // 4, HEAD_DIM // 8, HEAD_DIM // 8], "partial_rotary_factor": 1.0}
    if isinstance(rope, dict) and rope and all(isinstance(value, dict) for value in rope.values()):
        return {kind: {**value, **small} for kind, value in rope.items()}
    return {"rope_type": "default", "rope_theta": 1e4, **(rope or {}), **small}


def _part(cls: Any, default: Any, path: str, family: str) -> dict[str, Any] | None:
    part: Any = type(default) if default is not None and hasattr(type(default), "model_type") else cls
    if not hasattr(part, "__dataclass_fields__"):
        return None
    return {**shrunk_fields(part, family, path), "model_type": part.model_type}


def shrunk_fields(cls: Any, family: str, path: str = "") -> dict[str, Any]:
    """Keyword arguments for ``cls`` that make the family's smallest config; ``path`` names the part, for overrides."""
    fields = _field_defaults(cls)
    parts = {
        name: _part(part, fields.get(name), f"{path}{name}.", family)
        for name, part in cls.sub_configs.items()
        if fields.get(name) is not None or dataclasses.is_dataclass(part)
    }
    found = {
        name: small
        for name, value in fields.items()
        if name not in parts and (small := shrunk_value(name, value)) is not value
    }
    if fields.get("num_key_value_heads") == fields.get("num_attention_heads") and "num_attention_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]  # latent attention has no groups
    if isinstance(fields.get("image_size"), int):
        found["image_size"] = min(fields["image_size"], IMAGE)
    elif isinstance(fields.get("image_size"), list | tuple):
        found["image_size"] = type(fields["image_size"])([IMAGE] * len(fields["image_size"]))
    if "head_dim" in fields and fields["head_dim"] is None:
        found["head_dim"] = HEAD_DIM
    rope = _rope_with_sections(cls, fields)
    if rope is not None:
        found["rope_parameters"] = rope
    layers = _kept_layers(fields)
    if layers is not None:
        counter, kept, lists = layers
        found[counter] = len(kept)
        found |= {name: [fields[name][layer] for layer in kept] for name in lists}
    found |= _token_ids(fields)
    found |= {name: part for name, part in parts.items() if part is not None}
    for key, value in OVERRIDES.get(family, {}).items():
        head, _, name = key.rpartition(".")
        if (f"{head}." if head else "") == path:
            found[name] = value
    return found


def build_config(family: str, cls: Any) -> Any:
    """The smallest config of a family."""
    return cls(**shrunk_fields(cls, family))
