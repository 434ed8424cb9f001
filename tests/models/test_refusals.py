"""What cannot be right is refused before a forward, says why and what to do, and leaves nothing half changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torchao.quantization import Int8WeightOnlyConfig
from transformers import KernelConfig
from transformers.utils import kernel_config

from tests.support.loads import Loading, by_hand, load, process_state, ref
from tests.support.tiny import FAMILIES, LAYERS, Family, _causal, save_family, tokens

FUSION = FAMILIES["llama"].fusion_key()
GEMMA = Family(_causal("Gemma"), "GemmaRMSNorm", "GemmaMLP")
OLMO2 = Family(_causal("Olmo2"), "Olmo2RMSNorm", "Olmo2MLP")
MIXTRAL = Family(_causal("Mixtral", num_local_experts=2), "MixtralRMSNorm", "MixtralMLP")
LLAMA = FAMILIES["llama"]
MLP_CLASS = {"LlamaMLP": ref("GatedMLP")}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_family(LLAMA, tmp_path / "llama")


def refused(family: Family, folder: Path, mapping: dict[Any, Any], loading: Loading, *words: str) -> None:
    """The load raises a message with all ``words``, and the next stock load is right."""
    expected = load(family, folder, None)(input_ids=tokens()).logits
    with loading(), pytest.raises(ValueError) as caught:  # noqa: PT011 the words are checked one by one
        load(family, folder, mapping)
    for word in words:
        assert word in str(caught.value), f"{word!r} not in {caught.value}"
    assert torch.equal(load(family, folder, None)(input_ids=tokens()).logits, expected)


def test_gemma_norms_are_refused_with_the_weight_offset(loading: Loading, tmp_path: Path) -> None:
    folder = save_family(GEMMA, tmp_path / "gemma")
    refused(GEMMA, folder, {"RMSNorm": ref("CustomRMSNorm")}, loading, "weight offset 1", "CustomRMSNorm", "cast_then")


def test_a_norm_that_multiplies_in_float32_is_refused(loading: Loading, tmp_path: Path) -> None:
    folder = save_family(OLMO2, tmp_path / "olmo2")
    refused(OLMO2, folder, {"RMSNorm": ref("CustomRMSNorm")}, loading, "scale_then_cast", "CustomRMSNorm")


def test_an_mlp_key_beside_a_fusion_key_is_refused_with_the_key_to_use(loading: Loading, llama: Path) -> None:
    mapping = {"LlamaMLP": ref("GatedMLP"), FUSION: ref("RMSNormMLP")}
    refused(LLAMA, llama, mapping, loading, "GatedMLPLayout", "fusion key alone", '("MLP", "<parent>.<mlp>")')


@pytest.mark.parametrize("order", [1, -1])
def test_two_tuple_keys_under_one_parent_are_refused_with_the_key_to_use(
    order: int, loading: Loading, llama: Path
) -> None:
    keys = {(("MLP", f"{LAYERS}.mlp"),): ref("GatedMLP"), FUSION: ref("RMSNormMLP")}
    mapping = dict(list(keys.items())[::order])
    refused(LLAMA, llama, mapping, loading, "two tuple keys share the parent", LAYERS, f"Use one tuple key: {FUSION}")


def test_a_block_of_experts_is_refused(loading: Loading, tmp_path: Path) -> None:
    folder = save_family(MIXTRAL, tmp_path / "mixtral")
    block = "mlp" if hasattr(MIXTRAL.build().model.layers[0], "mlp") else "block_sparse_moe"
    key = (("RMSNorm", f"{LAYERS}.post_attention_layernorm"), ("MLP", f"{LAYERS}.{block}"))
    refused(MIXTRAL, folder, {key: ref("RMSNormMLP")}, loading, "no plain gated MLP", "gate_proj")


def test_an_activation_that_is_not_ours_is_refused(loading: Loading, tmp_path: Path) -> None:
    relu = Family(_causal("Llama", hidden_act="relu"), "LlamaRMSNorm", "LlamaMLP")
    folder = save_family(relu, tmp_path / "relu")
    refused(relu, folder, {FUSION: ref("RMSNormMLP")}, loading, "activation", "silu")
    refused(relu, folder, {"LlamaMLP": ref("GatedMLP")}, loading, "activation", "silu")


def test_a_mlp_whose_bias_the_config_does_not_tell_is_refused_with_the_tuple_key(
    loading: Loading, tmp_path: Path
) -> None:
    family = FAMILIES["qwen2_5_vl"]
    folder = save_family(family, tmp_path / "vl")
    # The vision MLP has a bias by a constructor argument; the text MLP has none: one class key, both are right.
    with loading():
        model = load(family, folder, {"Qwen2_5_VLMLP": ref("GatedMLP")})
    assert model.model.visual.blocks[0].mlp.gate_up_proj.bias is not None


def test_a_missing_weight_is_an_error_and_never_random(loading: Loading, llama: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = llama / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with loading(), pytest.raises(RuntimeError, match="conversion of the weights"):
        load(LLAMA, llama, {FUSION: ref("RMSNormMLP")})
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with loading(), pytest.raises(ValueError, match=r"no checkpoint tensor was loaded for \['scale'\]"):
        load(LLAMA, llama, {"LlamaRMSNorm": ref("CustomRMSNorm")})


class StopError(Exception):
    pass


def _before_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tf.LlamaForCausalLM, "_load_pretrained_model", _raise)


def _in_a_constructor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("transformers.models.llama.modeling_llama.LlamaAttention.__init__", _raise)


def _while_binding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tf.LlamaForCausalLM, "set_use_kernels", _raise)


def _raise(*args: Any, **kwargs: Any) -> None:
    raise StopError


@pytest.mark.parametrize("where", [_before_weights, _in_a_constructor, _while_binding])
@pytest.mark.parametrize("mapping", [{"RMSNorm": ref("CustomRMSNorm")}, {FUSION: ref("RMSNormMLP")}])
def test_a_load_that_raises_in_the_middle_leaves_the_process_as_it_was(
    where: Any, mapping: dict[Any, Any], kernel: Any, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load(LLAMA, llama, None)(input_ids=tokens()).logits
    before = process_state()
    where(monkeypatch)
    with kernel.kernel_loading(), pytest.raises(StopError):
        load(LLAMA, llama, mapping)
    monkeypatch.undo()
    assert process_state() == before
    stock = load(LLAMA, llama, None)
    assert torch.equal(stock(input_ids=tokens()).logits, expected)
    assert type(stock.model.norm).__name__ == "LlamaRMSNorm"


@pytest.mark.parametrize("mapping", [{"RMSNorm": ref("CustomRMSNorm")}, {FUSION: ref("RMSNormMLP")}])
def test_a_load_that_succeeds_leaves_the_process_as_it_was(mapping: dict[Any, Any], kernel: Any, llama: Path) -> None:
    load(LLAMA, llama, None)
    while "cpu" in (devices := kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES):  # as an earlier load may have left it
        devices.remove("cpu")
    before = process_state()
    with kernel.kernel_loading(), kernel.kernel_loading():
        load(LLAMA, llama, mapping)
    assert process_state() == before


def test_a_fused_parent_is_never_split_over_devices_and_its_name_is_gone_afterwards(
    loading: Loading, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []
    original = tf.modeling_utils._get_device_map
    monkeypatch.setattr(
        tf.modeling_utils,
        "_get_device_map",
        lambda model, *rest: seen.append(set(model._no_split_modules)) or original(model, *rest),
    )
    with loading():
        model = load(LLAMA, llama, {FUSION: ref("RMSNormMLP")}, device_map="auto")
        assert seen == [{"LlamaDecoderLayer", "FusedLlamaDecoderLayer"}]
        assert model._no_split_modules == {"LlamaDecoderLayer"} == set(type(model)._no_split_modules)


@pytest.mark.parametrize(
    ("transformers", "kernels", "available"), [("5.24.0", "0.17.2", False), ("5.22.2", "0.19.0", False)]
)
def test_versions_that_do_not_go_together_name_the_pair_to_install(
    transformers: str, kernels: str, available: bool, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"transformers": transformers, "kernels": kernels}
    check_versions = kernel.kernel_loading.__wrapped__.__globals__["check_versions"]
    monkeypatch.setitem(check_versions.__globals__, "installed", versions.get)
    monkeypatch.setattr("transformers.utils.import_utils.is_kernels_available", lambda: available)
    with (
        pytest.raises(ImportError, match=r"transformers==5\.22\.2 kernels==0\.17\.2") as caught,
        kernel.kernel_loading(),
    ):
        pass
    assert transformers in str(caught.value)
    assert kernels in str(caught.value)


@pytest.mark.parametrize("mapping", [{"RMSNorm": ref("CustomRMSNorm")}, {FUSION: ref("RMSNormMLP")}, MLP_CLASS])
def test_a_quantised_load_is_right_or_says_how_it_would_be(
    mapping: dict[Any, Any], loading: Loading, llama: Path
) -> None:
    quantised = {"quantization_config": tf.TorchAoConfig(Int8WeightOnlyConfig()), "dtype": torch.bfloat16}
    stock = load(LLAMA, llama, None, **quantised)
    with loading():
        if loading is by_hand and "RMSNorm" not in mapping:
            with pytest.raises((ValueError, RuntimeError), match=r"quantised|conversion of the weights"):
                load(LLAMA, llama, mapping, **quantised)
            return
        model = load(LLAMA, llama, mapping, **quantised)
    assert [(n, type(p)) for n, p in model.named_parameters()] == [(n, type(p)) for n, p in stock.named_parameters()]
    assert type(model.model.layers[0].mlp.up_proj.weight).__name__ != "Parameter"
    assert torch.equal(model(tokens()).logits, stock(tokens()).logits)


def test_a_load_under_zero3_is_refused(loading: Loading, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.integrations.is_deepspeed_zero3_enabled", lambda: True)
    with loading(), pytest.raises(ValueError, match="ZeRO-3"):
        load(LLAMA, llama, {"RMSNorm": ref("CustomRMSNorm")})


@pytest.mark.parametrize("layer", ["CustomRMSNorm", "RMSNorm"])
def test_a_layer_on_a_loaded_model_runs_where_it_computes_what_the_class_does(
    layer: str, kernel: Any, tmp_path: Any
) -> None:
    family = FAMILIES["llama"]
    model = load(family, save_family(family, tmp_path), None)
    expected = model(tokens()).logits
    with by_hand():
        model.set_use_kernels(True, KernelConfig({"RMSNorm": ref(layer)}))
    assert model.model.norm.forward.__func__.__module__.startswith(kernel.__name__)
    assert (model(tokens()).logits - expected).abs().max() <= 1e-5 * expected.abs().max()  # roundings


@pytest.mark.parametrize("layer", ["FP32RMSNorm", "ZeroCenteredRMSNorm"])
def test_a_layer_on_a_loaded_model_that_computes_something_else_is_refused(
    layer: str, kernel: Any, tmp_path: Any
) -> None:
    family = FAMILIES["llama"]
    model = load(family, save_family(family, tmp_path), None)
    with by_hand():
        model.set_use_kernels(True, KernelConfig({"RMSNorm": ref(layer)}))
    with pytest.raises(ValueError, match=r"LlamaRMSNorm computes cast_then_scale.*apply_kernel"):
        model(tokens())
