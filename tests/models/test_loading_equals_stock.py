"""Each family under each kind of key: the same results as stock, the same file back, and stock again afterwards."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.loads import Loading, by_hand, load, ref
from tests.support.tiny import FAMILIES, Family, _causal, save_family, tokens

KEYS = ["RMSNorm", "hub name", "exact class", "MLP class", "MLP tuple", "fusion", "RMSNorm and fusion"]


def mapping_of(kind: str, family: Family) -> dict[Any, Any]:
    return {
        "RMSNorm": {"RMSNorm": ref("CustomRMSNorm")},
        "hub name": {"RMSNorm": ref("RMSNorm")},
        "exact class": {family.norm_class: ref("CustomRMSNorm")},
        "MLP class": {family.mlp_class: ref("GatedMLP")},
        "MLP tuple": {(("MLP", f"{family.parent}.mlp"),): ref("GatedMLP")},
        "fusion": {family.fusion_key(): ref("RMSNormMLP")},
        "RMSNorm and fusion": {"RMSNorm": ref("CustomRMSNorm"), family.fusion_key(): ref("RMSNormMLP")},
    }[kind]


@pytest.fixture(params=KEYS)
def mapping(request: pytest.FixtureRequest, family: Family) -> dict[Any, Any]:
    return mapping_of(request.param, family)


def logits(model: Any, family: Family) -> torch.Tensor:
    with torch.no_grad():
        return model(**family.inputs()).logits


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def test_logits_equal_stock_and_the_wanted_layers_run(
    family: Family, checkpoint: Path, mapping: dict[Any, Any], loading: Loading, kernel: Any
) -> None:
    expected = logits(load(family, checkpoint, None), family)
    with loading():
        model = load(family, checkpoint, mapping)
        inside = logits(model, family)
    wanted = {value[0].partition(":")[2] for value in mapping.values()}
    found = kernel.report(model)
    # A fused norm runs the layer of its flavour in its own place.
    beside = {"CustomRMSNorm"} if "RMSNormMLP" in wanted else set()
    assert {row.layer for row in found.rows} == wanted | beside
    assert not found.unbound
    assert not any(row.fallback for row in found.rows)
    # Merged products add up the same terms as separate ones, possibly in another order: float32 rounding only.
    assert (inside - expected).abs().max() <= 1e-5
    assert torch.equal(logits(model, family), inside)


def test_saving_restores_every_name_and_tensor_also_the_second_time(
    family: Family, checkpoint: Path, mapping: dict[Any, Any], loading: Loading, tmp_path: Path
) -> None:
    original = tensors(checkpoint)
    with loading():
        model = load(family, checkpoint, mapping)
    model.save_pretrained(tmp_path / "first")
    with loading():
        again = load(family, tmp_path / "first", mapping)
    again.save_pretrained(tmp_path / "second")
    for folder in ("first", "second"):
        saved = tensors(tmp_path / folder)
        assert sorted(saved) == sorted(original)
        assert [name for name in original if not torch.equal(saved[name], original[name])] == []


def test_a_stock_load_afterwards_is_stock_and_a_second_kernel_load_works(
    family: Family, checkpoint: Path, mapping: dict[Any, Any], kernel: Any
) -> None:
    stock = load(family, checkpoint, None)
    classes = [type(module) for module in stock.modules()]
    expected = logits(stock, family)
    hidden = len(stock(**family.inputs(), output_hidden_states=True).hidden_states)
    for _ in range(2):
        with kernel.kernel_loading():
            fast = load(family, checkpoint, mapping)
        assert (logits(fast, family) - expected).abs().max() <= 1e-5  # as above
        assert len(fast(**family.inputs(), output_hidden_states=True).hidden_states) == hidden
        later = load(family, checkpoint, None)
        assert [type(module) for module in later.modules()] == classes
        assert torch.equal(logits(later, family), expected)
        assert len(later(**family.inputs(), output_hidden_states=True).hidden_states) == hidden


def gradients(model: Any, family: Family) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients by the parameters' names."""
    model.train()
    output = model(**family.inputs()).logits
    loss = (output.float() * torch.linspace(-1, 1, output.shape[-1])).mean()
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_training_gives_the_same_loss_and_gradients(
    family: Family, checkpoint: Path, mapping: dict[Any, Any], loading: Loading
) -> None:
    loss, expected = gradients(load(family, checkpoint, None), family)
    with loading():
        model = load(family, checkpoint, mapping)
    fast_loss, found = gradients(model, family)
    assert (fast_loss - loss).abs() <= 1e-6 * loss.abs().clamp(min=1)
    assert sorted(found) == sorted(expected)
    for name, gradient in expected.items():
        # Sums of at most some thousand float32 terms; relative to the largest entry, 1e-5 is about 100 roundings.
        assert (found[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max().clamp(min=1e-6), name


def test_generate_and_deepcopy_give_the_same_tokens(
    family: Family, checkpoint: Path, mapping: dict[Any, Any], loading: Loading
) -> None:
    settings = {"max_new_tokens": 6, "do_sample": False}
    expected = load(family, checkpoint, None).generate(**family.inputs(), **settings)
    with loading():
        model = load(family, checkpoint, mapping)
    assert torch.equal(model.generate(**family.inputs(), **settings), expected)
    assert torch.equal(copy.deepcopy(model).generate(**family.inputs(), **settings), expected)


@pytest.mark.parametrize("kind", KEYS)
def test_bfloat16_logits_equal_stock_within_the_rounding_of_one_product(
    family: Family, checkpoint: Path, kind: str, loading: Loading
) -> None:
    options = {"dtype": torch.bfloat16}
    expected = logits(load(family, checkpoint, None, **options), family).float()
    with loading():
        model = load(family, checkpoint, mapping_of(kind, family), **options)
    found = logits(model, family).float()
    # Norm and activation round at the same points as stock, bit for bit. A merged product may add up its terms in
    # another order: float32 sums that round to the neighbouring bfloat16 now and then, 2**-8 relative, carried
    # through two residual layers. Four of those steps at the size of the largest logit.
    assert (found - expected).abs().max() <= 4 * 2**-8 * expected.abs().max()


@pytest.mark.parametrize("kind", ["RMSNorm", "MLP tuple", "fusion", "RMSNorm and fusion"])
def test_device_map_auto_gives_the_same_logits(family: Family, checkpoint: Path, kind: str, loading: Loading) -> None:
    expected = logits(load(family, checkpoint, None), family)
    with loading():
        model = load(family, checkpoint, mapping_of(kind, family), device_map="auto")
    assert (logits(model, family) - expected).abs().max() <= 1e-5  # float32 rounding, as above


@pytest.mark.parametrize("kind", ["RMSNorm", "MLP tuple", "fusion", "RMSNorm and fusion"])
def test_weights_on_disk_bear_stock_names_or_the_load_says_how_they_would(
    family: Family, checkpoint: Path, kind: str, loading: Loading, tmp_path: Path
) -> None:
    stem = family.parent.removesuffix(".*")
    stock = load(family, checkpoint, None)
    expected, names = logits(stock, family), [name for name, _ in stock.named_parameters()]
    leaves = [name for name, module in stock.named_modules() if module._parameters or module._buffers]
    device_map = {name: "cpu" for name in leaves if not name.startswith(f"{stem}.")}
    device_map |= {f"{stem}.0": "cpu", f"{stem}.1": "disk"}
    options = {"device_map": device_map, "offload_folder": tmp_path}
    with loading():
        if loading is by_hand:
            with pytest.raises(ValueError, match=r"offloaded to disk.*kernel_loading\(\)"):
                load(family, checkpoint, mapping_of(kind, family), **options)
            return
        model = load(family, checkpoint, mapping_of(kind, family), **options)
    assert [name for name, _ in model.named_parameters()] == names
    assert (logits(model, family) - expected).abs().max() <= 1e-5  # float32 rounding, as above
    assert any(parameter.is_meta for parameter in model.parameters()), "nothing was offloaded"


def test_families_are_the_ones_that_the_readme_names() -> None:
    named = {"llama", "qwen2", "qwen3", "mistral", "smollm3", "granite", "phi3", "qwen2_5_vl", "mistral3"}
    assert named <= set(FAMILIES)
    assert tokens().shape == (2, 9)


def test_the_norms_before_and_after_an_mlp_keep_an_epsilon_each(
    kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer

    build = Gemma2DecoderLayer.__init__

    def building(layer: Any, *args: Any, **kwargs: Any) -> None:
        build(layer, *args, **kwargs)
        layer.pre_feedforward_layernorm.eps, layer.post_feedforward_layernorm.eps = 0.3, 2.0

    gemma = Family(_causal("Gemma2"), "Gemma2RMSNorm", "Gemma2MLP")
    save_family(gemma, tmp_path)
    monkeypatch.setattr(Gemma2DecoderLayer, "__init__", building)
    expected = logits(load(gemma, tmp_path, None), gemma)
    kinds = (("RMSNorm", "pre_feedforward_layernorm"), ("MLP", "mlp"), ("RMSNorm", "post_feedforward_layernorm"))
    key = tuple((kind, f"{gemma.parent}.{name}") for kind, name in kinds)
    with kernel.kernel_loading():
        model = load(gemma, tmp_path, {key: ref("RMSNormMLPRMSNorm")})
    assert (logits(model, gemma) - expected).abs().max() <= 1e-5  # as above
