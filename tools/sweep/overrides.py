"""What the shrinker's rules get wrong, family by family: fields of the config, those of a part as ``part.field``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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

_ONE_CROP = {"image_grid_pinpoints": [[16, 16]]}

OVERRIDES: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "gemma3": {"mm_tokens_per_image": 4},
    "llama4": {"vision_config.intermediate_size": 128},
    "llava_next": _ONE_CROP,
    "llava_next_video": _ONE_CROP,
    "llava_onevision": _ONE_CROP,
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 100, "<reserved08706>": 101}, "vq_config.resolution": 16},
    "cohere_compass": {"text_config.rope_parameters": {"full_attention": _SECTIONS}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _SECTIONS}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_ocr2": {
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "text_config.num_experts_per_tok": 2,
        "text_config.n_group": 1,
        "text_config.topk_group": 1,
        "vision_config.sam_config.downsample_channels": [32, 32],
    },
    "diffusion_gemma": {
        "text_config.num_experts": 4,
        "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": 24,
    },
    "dots1": {"n_routed_experts": 4, "num_local_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "emu3": {"vocabulary_map": {"<image>": 100, "<|extra_200|>": 101}},
    "ernie4_5_vl_moe": {"text_config.rope_parameters": {**_SECTIONS, "mrope_section": [1, 1, 2]}},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 8},
    "gemma3n_text": {"intermediate_size": [48, 48, 48, 48]},
    "glm5_next": {"text_config.num_key_value_heads": 4},
    "granite4_vision": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-1, 0], [-2, 1]],
        "vision_config.hidden_size": 64,
        **_ONE_CROP,
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "hunyuan_vl": {"vision_config.max_image_size": 16, "vision_config.max_vit_seq_len": 64},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"head_dim": 16, "num_heads": 4},
    "molmo2": {"adapter_config.vision_feature_layer": [1, 0]},
    "nemotron_h_omni": {"vision_config.video_temporal_patch_size": 2},
    "neomme": {"rope_parameters": {"full_attention": _PLAIN, "sliding_attention": _PLAIN}},
    "muse_glimmer": {"out_hidden_size": 128},
    "muse_spark": {
        "out_hidden_size": 128,
        "audio_config.num_hidden_layers": 4,
        "audio_config.hidden_sizes": [32, 32, 32, 32],
        "audio_config.depths": [1, 1, 1, 1],
    },
    "qwen4_exp": {f"text_config.{name}": value for name, value in _QWEN4_INDEXER.items()},
    "qwen4_exp_text": _QWEN4_INDEXER,
    "sapiens2": {"num_key_value_heads_per_layer": [4, 2]},
    "step3p7": {"text_config.sliding_window": 8},
    "t5gemma2": {"encoder.mm_tokens_per_image": 4},
    "shieldgemma2": {"yes_token_index": 100, "no_token_index": 101},
    "unlimited_ocr": {"vision_config.sam_config.downsample_channels": [32, 32]},
    "zamba": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
    },
}

# The class to build where the auto classes name one that cannot load the family's own checkpoints.
MODELS = {"shieldgemma2": "ShieldGemma2ForImageClassification"}

_SOUND = "makes sound or encodes it: neither a language model nor a vision-language model nor a text encoder"
_SPEECH = "recognises speech: it cannot be run without sound"
_ROBOT = "a robot's policy: its results are actions"
_SERIES = "forecasts time series"
_DRAFTER = "drafts tokens from the states of another model, which it cannot run without"
OUTSIDE: dict[str, str] = {
    **dict.fromkeys(
        (
            "clvp",
            "csm",
            "dia",
            "gemma4_audio",
            "gradium_phonon_tts",
            "higgs_audio_v2",
            "kyutai_speech_to_text",
            "musicgen",
            "musicgen_melody",
            "neucodec",
            "pe_audio",
            "qwen2_5_omni",
            "qwen3_omni_moe",
            "vibevoice",
            "vibevoice_acoustic_tokenizer_decoder",
            "xcodec2",
        ),
        _SOUND,
    ),
    **dict.fromkeys(("vibevoice_asr", "voxtral_realtime"), _SPEECH),
    "pi0": _ROBOT,
    "deimv2": "finds objects in images: neither a language model nor an encoder",
    **dict.fromkeys(("timesfm", "timesfm2_5"), _SERIES),
    **dict.fromkeys(("gemma4_unified_assistant", "muse_glimmer_assistant"), _DRAFTER),
}


def _idefics(model: Any, seed: int) -> dict[str, Any]:
    """One image, which every token may look at."""
    size = model.config.vision_config.image_size
    pixels = torch.randn(1, 1, 3, size, size, generator=torch.Generator().manual_seed(seed))
    ids = torch.randint(3, 90, (1, 9), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "pixel_values": pixels, "image_attention_mask": torch.ones(1, 9, 1, dtype=torch.long)}


# Inputs for a family whose forward the generic candidates do not fit: function of the model and a seed.
INPUTS: dict[str, Callable[[Any, int], dict[str, Any]]] = {"idefics": _idefics}

# What the short sweep runs: each layer and kind of key, each kind of refusal, and what the sweep once found wrong.
SHORT: tuple[str, ...] = (
    "afmoe",  # a dense MLP where other layers have experts with a shared one
    "bamba",  # a gated norm without a hub name
    "blt",  # its constructor calls eval()
    "deepseek_v4",  # a loose renaming hits its norm
    "diffusion_gemma",  # norms tied by name
    "zamba",  # products that two layers tie
    "falcon_mamba",  # its blocks read norm.weight
    "gemma2",  # 1 + weight, a sandwich of norms
    "gemma3n_text",  # norms with and without weight in one class
    "glmga",  # it borrows the classes of another model type
    "granite4_vision",
    "hrm_text",  # norms without weight
    "internvl",
    "jamba",  # its layers are taken from a table
    "llama",
    "llama4_text",  # norms without weight beside others
    "mistral3",  # a vision tower with its own names
    "molmo2",  # checkpoints with merged tensors
    "nanochat",  # nothing but norms without weight
    "olmo2",  # float32 scale, no fusion
    "olmo_hybrid",  # two kinds of layers in one list
    "qwen2_5_vl",
    "qwen3_next",  # a gated norm with a hub name
    "phi3",  # packed gate and up
    "t5",  # refused: another norm
)
