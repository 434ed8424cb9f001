"""Models with our layers, put in in each way, and what whoever looks by name sees of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf

from layout_kernels import kernel_plugins as kp
from tests.support.loads import by_hand, load, ref
from tests.support.tiny import FAMILIES, TEXT, Family, _causal

SANDWICH = ("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm")
DEEPSEEK = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
TREES: dict[str, Family] = {
    **{name: FAMILIES[name] for name in ("llama", "qwen2", "qwen3", "phi3", "granite", "mistral3")},
    "gemma2": Family(_causal("Gemma2"), "Gemma2RMSNorm", "Gemma2MLP"),
    "gemma3": Family(lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**TEXT)), "Gemma3RMSNorm", "Gemma3MLP"),
    "olmo2": Family(_causal("Olmo2"), "Olmo2RMSNorm", "Olmo2MLP"),
    "deepseek_v3": Family(_causal("DeepseekV3", **DEEPSEEK), "DeepseekV3RMSNorm", "DeepseekV3MLP"),
}
_NORMS = {"gemma2": "ZeroCenteredRMSNorm", "gemma3": "ZeroCenteredRMSNorm", "olmo2": "FP32RMSNorm"}
WAYS = ("norm", "MLP", "fusion", "norm and fusion", "by hand", "live")


def mapping(name: str, kind: str) -> dict[Any, Any]:
    """The KernelConfig of ``kind`` for family ``name``; the norm before an MLP of OLMo 2 or DeepSeek is not fused."""
    family = TREES[name]
    norms = {family.norm_class: ref(_NORMS.get(name, "CustomRMSNorm"))}
    mlp: dict[Any, Any] = {family.mlp_class: ref("GatedMLP")}
    fused = mlp
    if name.startswith("gemma"):
        kinds = ("RMSNorm", "MLP", "RMSNorm")
        key = tuple((what, f"{family.parent}.{child}") for what, child in zip(kinds, SANDWICH, strict=True))
        fused = {key: ref("RMSNormMLPRMSNorm")}
    elif name not in ("olmo2", "deepseek_v3"):
        fused = {family.fusion_key(): ref("RMSNormMLP")}
    return {"norm": norms, "MLP": mlp, "fusion": fused}.get(kind) or {**norms, **fused}


def with_layers(name: str, folder: Path, way: str, kernel: Any, **options: Any) -> Any:
    """The model in ``folder`` with our layers."""
    if way == "live":
        return kp.apply_default_kernels(load(TREES[name], folder, None, **options), "auto")
    with by_hand() if way == "by hand" else kernel.kernel_loading():
        return load(TREES[name], folder, mapping(name, way), **options)


def ours(model: Any) -> set[str]:
    """Paths of the modules that run our layers by their class."""
    return {path for path, module in model.named_modules() if getattr(type(module), "is_adopted", False)}


def seen(model: Any) -> dict[str, Any]:
    """Everything of a model that is found by going through its tree."""
    trainer = tf.Trainer.__new__(tf.Trainer)
    return {
        "modules": [(path, type(module).__name__) for path, module in model.named_modules()],
        "parameters": [(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in model.named_parameters()],
        "buffers": [(n, tuple(b.shape)) for n, b in model.named_buffers()],
        "state": list(model.state_dict()),
        "no split": set(model._no_split_modules or ()),
        "decayed": trainer.get_decay_parameter_names(model),
        "conversions": [type(c).__name__ for c in getattr(model, "_weight_conversions", None) or ()],
        # `kernels` binds the class's own forward where it has no kernel for a hub name.
        "attributes": {p: {k for k in vars(m) if k[0] != "_"} - {"forward"} for p, m in model.named_modules()},
    }


def logits(model: Any, inputs: Any = None) -> torch.Tensor:
    with torch.no_grad():
        return model(**(inputs or {"input_ids": torch.arange(3, 21).view(2, 9)})).logits.float()


def close(found: torch.Tensor, expected: torch.Tensor, relative: float = 1e-5) -> bool:
    """Equal but for the order in which float32 sums are added up (products of double width, norms): some roundings."""
    return bool((found - expected).abs().max() <= relative * expected.abs().max().clamp(min=1))
