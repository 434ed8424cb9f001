"""The short form of the family sweep, and the proof that the sweep sees what it is there to see."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from layout_kernels.models.plan import Entry, Plan
from tools.sweep import compare
from tools.sweep.__main__ import summary
from tools.sweep.compare import Result, default_plan, sweep_family
from tools.sweep.families import families
from tools.sweep.inputs import tensors_of
from tools.sweep.overrides import MODELS, OUTSIDE, OVERRIDES, SHORT
from tools.sweep.shrink import HIDDEN, VOCABULARY, build_config, shrunk_value
from tools.sweep.table import render

FAMILIES = {family.model_type: family for family in families()}
REFUSED = {"t5"}
GATED = {"olmo_hybrid", "qwen3_next"}


@pytest.mark.parametrize("name", SHORT)
def test_family_is_equal_or_refused_with_the_reason(name: str, kernel: Any) -> None:
    result = sweep_family(FAMILIES[name], kernel)
    assert result.verdict == ("refused" if name in REFUSED else "equal"), result
    assert (result.verdict == "refused") == bool(result.reason)
    assert ("RMSNormGated" in dict(result.layers)) == (name in GATED)


def _with_layer(layer: str, other: str) -> Any:
    """A planner that makes a mistake: ``other`` where the plan says ``layer``."""

    def planner(folder: Path) -> Plan:
        made = default_plan(folder)
        entries = (dataclasses.replace(e, layer=other) if e.layer == layer else e for e in made.entries)
        return Plan(made.model_class, tuple(entries))

    return planner


def test_a_wrong_layer_is_no_equal(kernel: Any) -> None:
    result = sweep_family(FAMILIES["gemma2"], kernel, _with_layer("ZeroCenteredRMSNorm", "CustomRMSNorm"))
    assert result.verdict == "error"
    assert "ZeroCenteredRMSNorm" in result.reason


def _with_change_at_the_end(kernel: Any, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    layout = kernel.layers.CustomRMSNormLayout
    original = layout.settle

    def changed(self: Any) -> Any:
        settled = original(self)
        change(self)
        return settled

    monkeypatch.setattr(layout, "settle", changed)


def test_a_layer_that_computes_something_else_is_wrong(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_change_at_the_end(kernel, monkeypatch, lambda norm: setattr(norm, "variance_epsilon", 1e-3))
    result = sweep_family(FAMILIES["llama"], kernel)
    assert result.verdict == "wrong"
    assert "result" in result.reason


def test_another_tree_than_stock_s_is_wrong(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_change_at_the_end(kernel, monkeypatch, lambda norm: norm.register_parameter("scale_2", norm.weight))
    result = sweep_family(FAMILIES["llama"], kernel)
    assert (result.verdict, result.reason.partition(" ")[0]) == ("wrong", "tensor")


def test_a_file_with_other_values_is_wrong(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = compare.saved_tensors

    def exchanged(model: Any, folder: Any) -> dict[str, torch.Tensor]:
        found = original(model, folder)
        return {n: v + 1 for n, v in found.items()} if folder.name == "fast" else found

    monkeypatch.setattr(compare, "saved_tensors", exchanged)
    result = sweep_family(FAMILIES["llama"], kernel)
    assert result.verdict == "wrong"
    assert result.reason.startswith("file")


def test_a_plan_without_layers_is_refused_with_its_reasons(kernel: Any) -> None:
    entry = Entry("model.norm", "LlamaRMSNorm", 1, None, None, "for a reason")
    result = sweep_family(FAMILIES["llama"], kernel, lambda folder: Plan("LlamaForCausalLM", (entry,)))
    assert (result.verdict, result.reason) == ("refused", "for a reason")


def test_the_families_are_those_of_the_auto_classes() -> None:
    assert len(FAMILIES) > 200
    assert {"llama", "gemma3", "qwen3_vl", "t5", "eurobert", "mamba2", "llava"} <= set(FAMILIES)
    assert "qwen2_vl_text" not in FAMILIES  # swept as a part of qwen2_vl
    assert not {"gpt2", "bert", "vit"} & set(FAMILIES)


def test_every_entry_of_the_data_tables_names_a_family() -> None:
    for table in (OVERRIDES, OUTSIDE, MODELS, SHORT):
        assert sorted(set(table) - set(FAMILIES)) == []


def test_sizes_are_cut_by_what_their_names_say() -> None:
    assert shrunk_value("hidden_size", 4096) == HIDDEN
    assert shrunk_value("hidden_size", 16) == 16
    assert shrunk_value("attention_dropout", 0.1) == 0.0
    assert shrunk_value("rms_norm_eps", 1e-5) == 1e-5
    assert shrunk_value("num_key_value_heads", None) is None


def test_a_small_config_keeps_every_kind_of_layer_and_tells_its_tokens_apart() -> None:
    import transformers

    config = build_config("qwen3_next", transformers.Qwen3NextConfig)
    assert sorted(config.layer_types) == ["full_attention", "linear_attention"]
    vision = build_config("qwen2_5_vl", transformers.Qwen2_5_VLConfig)
    ids = [vision.image_token_id, vision.video_token_id, vision.vision_start_token_id, vision.vision_end_token_id]
    assert len(set(ids)) == 4
    assert max(ids) < VOCABULARY == vision.text_config.vocab_size


def test_results_are_found_at_any_depth_and_strings_are_none() -> None:
    import torch

    value = torch.ones(2)
    found = tensors_of({"a": value, "b": [value, ("name", value)], "past_key_values": {"c": value}, "d": value.long()})
    assert sorted(found) == ["a", "b.0", "b.1.1"]


def test_the_last_line_and_the_table_count_every_family() -> None:
    results = [
        Result("a", "equal", (("CustomRMSNorm", 3),), "text"),
        Result("b", "refused", reason="w | x"),
        Result("c", "wrong", reason="off"),
        Result("d", "error", reason="E"),
        Result("e", "outside", reason="sound"),
    ]
    assert summary(results).splitlines()[-1] == "sweep: 1 equal 1 refused 1 wrong 1 errors"
    page = render(results)
    for words in ("| a | 3 CustomRMSNorm | text |", "w \\| x", "## Wrong (1)", "## Errors (1)", "## Outside"):
        assert words in page
