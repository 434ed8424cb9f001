"""Tiny random models of real transformers families, saved to disk as a user's checkpoint would be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as tf

TEXT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYERS = "model.layers.*"


@dataclass(frozen=True)
class Family:
    """How to build one family, how its classes are called, where its blocks stand and what it is fed."""

    build: Callable[[], Any]
    norm_class: str
    mlp_class: str
    parent: str = LAYERS
    auto: Any = tf.AutoModelForCausalLM
    inputs: Callable[[], dict[str, torch.Tensor]] = field(default=lambda: {"input_ids": tokens()})

    def fusion_key(self) -> tuple[tuple[str, str], ...]:
        return (("RMSNorm", f"{self.parent}.post_attention_layernorm"), ("MLP", f"{self.parent}.mlp"))


def tokens(rows: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(5))


def _causal(name: str, **extra: Any) -> Callable[[], Any]:
    def build() -> Any:
        config = getattr(tf, f"{name}Config")(**{**TEXT, **extra})
        return getattr(tf, f"{name}ForCausalLM")(config)

    return build


def _qwen2_5_vl() -> Any:
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
        "window_size": 16,
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {**TEXT, "rope_parameters": rope}
    ids = {"image_token_id": 95, "video_token_id": 96, "vision_start_token_id": 97, "vision_end_token_id": 98}
    config = tf.Qwen2_5_VLConfig(vision_config=vision, text_config=text, **ids)
    return tf.Qwen2_5_VLForConditionalGeneration(config)


def _qwen2_5_vl_inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    ids = tokens(1, 12)
    ids[0, 2] = 97
    ids[0, 3:7] = 95
    pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=generator)
    types = (ids == 95).long()
    return {
        "input_ids": ids,
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": types,
    }


def _mistral3() -> Any:
    vision = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
        "image_size": 16,
        "patch_size": 4,
        "hidden_act": "silu",
    }
    text = {**TEXT, "model_type": "mistral"}
    config = tf.Mistral3Config(vision_config=vision, text_config=text, image_token_index=95, spatial_merge_size=2)
    return tf.Mistral3ForConditionalGeneration(config)


def _mistral3_inputs() -> dict[str, torch.Tensor]:
    ids = tokens(1, 12)
    ids[0, 3:7] = 95
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(6))
    return {"input_ids": ids, "pixel_values": pixels, "image_sizes": torch.tensor([[16, 16]])}


VISION = {"parent": "model.language_model.layers.*", "auto": tf.AutoModelForImageTextToText}
FAMILIES: dict[str, Family] = {
    "llama": Family(_causal("Llama", mlp_bias=True), "LlamaRMSNorm", "LlamaMLP"),
    "qwen2": Family(_causal("Qwen2"), "Qwen2RMSNorm", "Qwen2MLP"),
    "qwen3": Family(_causal("Qwen3"), "Qwen3RMSNorm", "Qwen3MLP"),
    "mistral": Family(_causal("Mistral"), "MistralRMSNorm", "MistralMLP"),
    "smollm3": Family(_causal("SmolLM3"), "SmolLM3RMSNorm", "SmolLM3MLP"),
    "granite": Family(_causal("Granite"), "GraniteRMSNorm", "GraniteMLP"),
    "phi3": Family(_causal("Phi3"), "Phi3RMSNorm", "Phi3MLP"),
    "qwen2_5_vl": Family(_qwen2_5_vl, "Qwen2_5_VLRMSNorm", "Qwen2MLP", inputs=_qwen2_5_vl_inputs, **VISION),
    "mistral3": Family(_mistral3, "MistralRMSNorm", "MistralMLP", inputs=_mistral3_inputs, **VISION),
}


def randomise(model: Any, seed: int = 0) -> Any:
    """Weights of a size that shows an error, norm weights on both sides of one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name.lower() or name.endswith("ln_q.weight")
            parameter.copy_(1 + 0.4 * value if is_norm else 0.15 * value)
    return model


def save_family(family: Family, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A random checkpoint of ``family`` in ``folder``."""
    randomise(family.build()).to(dtype).save_pretrained(folder)
    return folder
