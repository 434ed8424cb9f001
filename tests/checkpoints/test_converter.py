"""Weight conversion: exact names in both directions, whatever other rules and other modules a model has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from layout_kernels.checkpoints.key_table import Locations, Rule
from tests.support.loads import by_hand, load, ref
from tests.support.tiny import FAMILIES, TEXT, Family, _causal, randomise, save_family, tokens

LLAMA = FAMILIES["llama"]
RULE = Rule("gate_up_proj.weight", ("gate_proj.weight", "up_proj.weight"), 1)


def test_merge_and_split_are_inverse_to_the_bit() -> None:
    gate, up = torch.randn(5, 3), torch.randn(5, 3)
    merged = RULE.merge([gate, up], "x.gate_up_proj.weight", torch.Size([10, 3]))
    assert [torch.equal(a, b) for a, b in zip(RULE.split(merged), [gate, up], strict=True)] == [True, True]
    assert all(part.is_contiguous() for part in RULE.split(merged))


def test_merge_names_what_is_missing_and_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"x\.gate_up_proj\.weight: only one of .*up_proj"):
        RULE.merge([torch.ones(5, 3)], "x.gate_up_proj.weight", torch.Size([10, 3]))
    with pytest.raises(ValueError, match=r"give shape \(8, 3\), the layout has \(10, 3\)"):
        RULE.merge([torch.ones(4, 3), torch.ones(4, 3)], "x.gate_up_proj.weight", torch.Size([10, 3]))
    saved_so = torch.ones(10, 3)
    assert RULE.merge([saved_so], "x.gate_up_proj.weight", torch.Size([10, 3])) is saved_so


class Standing:
    """As much of a layout as a location table asks for."""

    is_layout = True

    def __init__(self, child_names: tuple[str, ...] | None) -> None:
        self.child_names = child_names

    def rules(self) -> list[Rule]:
        return [Rule("scale", ("weight",)), RULE]


class StateDict(dict[str, Any]):
    """A dict that can be referred to weakly, as the OrderedDict of ``state_dict()``."""


@pytest.mark.parametrize("names", [("norm2", "mlp"), None])
def test_keys_are_found_with_and_without_the_head_model_s_prefix(names: tuple[str, ...] | None) -> None:
    layout, table = Standing(names), Locations()
    live = StateDict({"model.layers.0.other.gate_proj.weight": 0})
    table.note(layout, "model.layers.0.norm2", live)  # type: ignore[arg-type]
    for prefix in ("model.", ""):
        match = table.find(f"{prefix}layers.0.mlp.up_proj.weight")
        assert match is not None
        assert (match.target, match.source_index) == (f"{prefix}layers.0.norm2.gate_up_proj.weight", 1)
        assert match.full_target == "model.layers.0.norm2.gate_up_proj.weight"
        scale = table.find(f"{prefix}layers.0.norm2.weight")
        assert scale is not None
        assert scale.target == f"{prefix}layers.0.norm2.scale"
    for foreign in ("model.layers.1.norm2.weight", "model.norm.weight", "model.layers.0.norm2.bias", "lm_head.weight"):
        assert table.find(foreign) is None
    assert table.find("model.layers.0.other.gate_proj.weight") is None


def test_a_table_forgets_the_model_before() -> None:
    table, first, second = Locations(), StateDict(), StateDict()
    old, new = Standing(("a", "b")), Standing(("a", "b"))
    table.note(old, "old.a", first)  # type: ignore[arg-type]
    table.note(new, "new.a", second)  # type: ignore[arg-type]
    assert table.find("old.a.weight") is None
    assert table.find("new.a.weight") is not None


def test_a_table_answers_only_for_a_model_that_is_being_loaded() -> None:
    table, state = Locations(), StateDict()
    layout = Standing(("a", "b"))
    table.note(layout, "model.a", state)  # type: ignore[arg-type]
    assert table.find("model.a.weight") is not None
    del state  # the load is over, and the next model may have no layout that would say so
    assert table.find("model.a.weight") is None


def test_layer_norms_beside_other_renames_are_left_alone(kernel: Any, tmp_path: Path) -> None:
    """Qwen2-VL: the vision norms are LayerNorms, and a hub checkpoint needs transformers' own renames as well."""
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = tf.Qwen2VLConfig(vision_config=vision, text_config={**TEXT, "rope_parameters": rope})
    family = Family(lambda: tf.Qwen2VLForConditionalGeneration(config), "", "", auto=tf.AutoModelForImageTextToText)
    save_family(family, tmp_path)
    file = tmp_path / "model.safetensors"
    names = list(load_file(file))
    assert any(name.startswith("visual.blocks.0.norm1") for name in names), names[:5]
    stock = load(family, tmp_path, None)
    with kernel.kernel_loading():
        fast = load(family, tmp_path, {"RMSNorm": ref("CustomRMSNorm")})
    for name, parameter in stock.model.visual.named_parameters():
        assert torch.equal(parameter, fast.model.visual.get_parameter(name)), name
    assert torch.equal(fast.model.language_model.norm.scale, stock.model.language_model.norm.weight)


MAPPINGS = [
    {"RMSNorm": ref("CustomRMSNorm")},
    {LLAMA.fusion_key(): ref("RMSNormMLP")},
]


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_a_base_model_s_checkpoint_loads_into_the_head_model_and_back(
    mapping: dict[Any, Any], kernel: Any, tmp_path: Path
) -> None:
    whole = randomise(LLAMA.build())
    whole.model.save_pretrained(tmp_path / "base")
    with kernel.kernel_loading():
        head = load(LLAMA, tmp_path / "base", mapping)
    ids = tokens()
    expected = whole.eval().model(ids).last_hidden_state
    assert (head.model(ids).last_hidden_state - expected).abs().max() <= 1e-5  # float32 rounding of merged products
    head.save_pretrained(tmp_path / "head")
    saved = load_file(tmp_path / "head" / "model.safetensors")
    assert all(torch.equal(saved[f"model.{k}"], v) for k, v in whole.model.state_dict().items())
    base = Family(LLAMA.build, "", "", auto=tf.AutoModel)
    names = {k.replace("model.", "") if isinstance(k, str) else k: v for k, v in mapping.items()}
    inner = {
        tuple((n, p.removeprefix("model.")) for n, p in k) if isinstance(k, tuple) else k: v for k, v in names.items()
    }
    with kernel.kernel_loading():
        body = load(base, tmp_path / "head", inner)
    assert (body(ids).last_hidden_state - expected).abs().max() <= 1e-5  # as above


def test_rules_registered_by_several_loads_do_not_add_up(kernel: Any, tmp_path: Path) -> None:
    folder = save_family(LLAMA, tmp_path)
    original = load_file(folder / "model.safetensors")
    with by_hand():
        for _ in range(3):
            model = load(LLAMA, folder, {"RMSNorm": ref("CustomRMSNorm"), LLAMA.fusion_key(): ref("RMSNormMLP")})
        model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert sorted(saved) == sorted(original)
    assert all(torch.equal(saved[name], original[name]) for name in original)


def test_a_checkpoint_in_the_layout_s_own_names_loads_too(kernel: Any, tmp_path: Path) -> None:
    folder = save_family(LLAMA, tmp_path / "original")
    mapping = {LLAMA.fusion_key(): ref("RMSNormMLP")}
    with kernel.kernel_loading():
        model = load(LLAMA, folder, mapping)
    own = {}
    for name, value in load_file(folder / "model.safetensors").items():
        place = name.replace(".mlp.", ".post_attention_layernorm.")
        if "gate_proj" in name:
            up = model.get_parameter(name.replace("gate_proj", "up_proj"))
            own[place.replace("gate_proj", "gate_up_proj")] = torch.cat([value, up.detach()])
        elif "up_proj" not in name:
            own[place.replace("post_attention_layernorm.weight", "post_attention_layernorm.scale")] = value
    save_file(own, folder / "model.safetensors", {"format": "pt"})
    with kernel.kernel_loading():
        again = load(LLAMA, folder, mapping)
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


def test_sharded_checkpoints_and_shards_that_separate_gate_from_up(kernel: Any, tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    randomise(LLAMA.build()).save_pretrained(folder, max_shard_size="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    expected = load(LLAMA, folder, None)(tokens()).logits
    with kernel.kernel_loading():
        model = load(LLAMA, folder, {LLAMA.fusion_key(): ref("RMSNormMLP")})
    assert (model(tokens()).logits - expected).abs().max() <= 1e-5  # as above


def test_epsilon_comes_from_the_class_that_was_replaced(kernel: Any, tmp_path: Path) -> None:
    family = Family(_causal("Llama", rms_norm_eps=3e-2), "LlamaRMSNorm", "LlamaMLP")
    folder = save_family(family, tmp_path)
    with kernel.kernel_loading():
        model = load(family, folder, {"RMSNorm": ref("CustomRMSNorm")})
    assert model.model.norm.variance_epsilon == 3e-2
