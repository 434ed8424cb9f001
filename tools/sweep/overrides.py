"""What the shrinker's rules get wrong, family by family: fields of the config, those of a part as ``part.field``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_PLAIN = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
_QWEN4_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "ngram_vocab_size_base": 64,
    "hc_lowrank": 8,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 100, "<reserved08706>": 101}, "vq_config.resolution": 16},
    "cohere_compass": {"text_config.rope_parameters": {"full_attention": _SECTIONS}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _SECTIONS}},
    "deepseek_ocr2": {
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "text_config.num_experts_per_tok": 2,
        "text_config.n_group": 1,
        "text_config.topk_group": 1,
        "vision_config.sam_config.downsample_channels": [32, 32],
    },
    "dots1": {"n_routed_experts": 4, "num_local_experts": 4},
    "emu3": {"vocabulary_map": {"<image>": 100, "<|extra_200|>": 101}},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 8},
    "gemma3n_text": {"intermediate_size": [48, 48, 48, 48]},
    "glm5_next": {"text_config.num_key_value_heads": 4},
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0], [-2, 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "hunyuan_vl": {"vision_config.max_image_size": 16, "vision_config.max_vit_seq_len": 64},
    "kosmos-2.5": {},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"head_dim": 16, "num_heads": 4},
    "molmo2": {"adapter_config.vision_feature_layer": [1, 0]},
    "nemotron_h_omni": {"vision_config.video_temporal_patch_size": 2},
    "neomme": {"rope_parameters": {"full_attention": _PLAIN, "sliding_attention": _PLAIN}},
    "qwen3_omni_moe": {"talker_config.text_config.shared_expert_intermediate_size": 24},
    "qwen4_exp": {f"text_config.{name}": value for name, value in _QWEN4_INDEXER.items()},
    "qwen4_exp_text": _QWEN4_INDEXER,
    "unlimited_ocr": {"vision_config.sam_config.downsample_channels": [32, 32]},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
    },
}

# Inputs for a family whose forward the generic candidates do not fit: function of the model and a seed.
INPUTS: dict[str, Callable[[Any, int], dict[str, Any]]] = {}

# What the short sweep runs: each layer, each kind of key, each kind of refusal, and what was once wrong.
SHORT: tuple[str, ...] = ("llama", "gemma2", "olmo2")
