"""Each family under each kind of key: the same results as stock, the same file back, and stock again afterwards."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.loads import by_hand, load, ref
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


# One family under each key through both doors; the others under the key that uses all layers and one or two more, so
# that each key meets several families; and every key of an MLP for the family whose products are packed.
LOADINGS = ("kernel_loading", "by_hand")
ALL_LAYERS = "RMSNorm and fusion"
Case = tuple[str, str, str]
OTHERS = [name for name in FAMILIES if name != "llama"]
EACH_FAMILY: list[Case] = [(name, ALL_LAYERS, LOADINGS[number % 2]) for number, name in enumerate(OTHERS)]
CASES: list[Case] = [
    *(("llama", kind, loading) for kind in KEYS for loading in LOADINGS),
    *EACH_FAMILY,
    *((name, KEYS[number % 6], LOADINGS[number // 2 % 2]) for number, name in enumerate(OTHERS)),
    *(("phi3", kind, "kernel_loading") for kind in ("MLP class", "MLP tuple", "fusion")),
]


def each_case(*kinds: str) -> list[Case]:
    """One family under each of ``kinds`` through both doors, and the others once."""
    return [case for case in CASES if case[0] == "llama" and case[1] in kinds] + EACH_FAMILY


def door(case: Case, kernel: Any) -> Any:
    return kernel.kernel_loading() if case[2] == "kernel_loading" else by_hand()


_folders: dict[str, Path] = {}
_stock: dict[str, Any] = {}


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def family(case: Case) -> Family:
    return FAMILIES[case[0]]


@pytest.fixture(scope="module")
def checkpoint(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if case[0] not in _folders:
        _folders[case[0]] = save_family(FAMILIES[case[0]], tmp_path_factory.mktemp(case[0]))
    return _folders[case[0]]


@pytest.fixture(scope="module")
def mapping(case: Case, family: Family) -> dict[Any, Any]:
    return mapping_of(case[1], family)


@pytest.fixture(scope="module")
def stock(case: Case, family: Family, checkpoint: Path) -> Any:
    """The stock model, which no test changes but for its gradients."""
    if case[0] not in _stock:
        _stock[case[0]] = load(family, checkpoint, None)
    return _stock[case[0]].eval()


@dataclass
class Loaded:
    """A model with our layers, and what it gave while the context of its load was open."""

    model: Any
    inside: torch.Tensor


@pytest.fixture(scope="module")
def loaded(case: Case, family: Family, checkpoint: Path, mapping: dict[Any, Any], kernel: Any) -> Loaded:
    with door(case, kernel):
        model = load(family, checkpoint, mapping)
        return Loaded(model, logits(model, family))


@pytest.fixture
def model(loaded: Loaded) -> Any:
    return loaded.model.eval()


def logits(model: Any, family: Family) -> torch.Tensor:
    with torch.no_grad():
        return model(**family.inputs()).logits


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def test_logits_equal_stock_and_the_wanted_layers_run(
    stock: Any, loaded: Loaded, model: Any, family: Family, mapping: dict[Any, Any], kernel: Any
) -> None:
    wanted = {value[0].partition(":")[2] for value in mapping.values()}
    found = kernel.report(model)
    # A fused norm runs the layer of its flavour in its own place.
    beside = {"CustomRMSNorm"} if "RMSNormMLP" in wanted else set()
    assert {row.layer for row in found.rows} == wanted | beside
    assert not found.unbound
    assert not any(row.fallback for row in found.rows)
    # Merged products add up the same terms as separate ones, possibly in another order: float32 rounding only.
    assert (loaded.inside - logits(stock, family)).abs().max() <= 1e-5
    assert torch.equal(logits(model, family), loaded.inside)


def test_saving_restores_every_name_and_tensor_also_the_second_time(
    case: Case, family: Family, checkpoint: Path, mapping: dict[Any, Any], model: Any, kernel: Any, tmp_path: Path
) -> None:
    original = tensors(checkpoint)
    model.save_pretrained(tmp_path / "first")
    with door(case, kernel):
        again = load(family, tmp_path / "first", mapping)
    again.save_pretrained(tmp_path / "second")
    for folder in ("first", "second"):
        saved = tensors(tmp_path / folder)
        assert sorted(saved) == sorted(original)
        assert [name for name in original if not torch.equal(saved[name], original[name])] == []


def gradients(model: Any, family: Family) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients by the parameters' names."""
    model.train()
    model.zero_grad()
    output = model(**family.inputs()).logits
    loss = (output.float() * torch.linspace(-1, 1, output.shape[-1])).mean()
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_training_gives_the_same_loss_and_gradients(stock: Any, model: Any, family: Family) -> None:
    loss, expected = gradients(stock, family)
    fast_loss, found = gradients(model, family)
    assert (fast_loss - loss).abs() <= 1e-6 * loss.abs().clamp(min=1)
    assert sorted(found) == sorted(expected)
    for name, gradient in expected.items():
        # Sums of at most some thousand float32 terms; relative to the largest entry, 1e-5 is about 100 roundings.
        assert (found[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max().clamp(min=1e-6), name


def test_generate_and_deepcopy_give_the_same_tokens(stock: Any, model: Any, family: Family) -> None:
    settings = {"max_new_tokens": 6, "do_sample": False}
    expected = stock.generate(**family.inputs(), **settings)
    assert torch.equal(model.generate(**family.inputs(), **settings), expected)
    assert torch.equal(copy.deepcopy(model).generate(**family.inputs(), **settings), expected)


AGAIN = [case for case in each_case(*KEYS) if case[0] != "llama" or case[2] == "kernel_loading"]


@pytest.mark.parametrize("case", AGAIN, ids="-".join, indirect=True)
def test_a_stock_load_afterwards_is_stock_and_a_second_kernel_load_works(
    stock: Any, family: Family, checkpoint: Path, mapping: dict[Any, Any], kernel: Any
) -> None:
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


@pytest.mark.parametrize("case", each_case(*KEYS), ids="-".join, indirect=True)
def test_bfloat16_logits_equal_stock_within_the_rounding_of_one_product(
    case: Case, family: Family, checkpoint: Path, mapping: dict[Any, Any], kernel: Any
) -> None:
    options = {"dtype": torch.bfloat16}
    expected = logits(load(family, checkpoint, None, **options), family).float()
    with door(case, kernel):
        model = load(family, checkpoint, mapping, **options)
    found = logits(model, family).float()
    # Norm and activation round at the same points as stock, bit for bit. A merged product may add up its terms in
    # another order: float32 sums that round to the neighbouring bfloat16 now and then, 2**-8 relative, carried
    # through two residual layers. Four of those steps at the size of the largest logit.
    assert (found - expected).abs().max() <= 4 * 2**-8 * expected.abs().max()


MOVED = each_case("RMSNorm", "MLP tuple", "fusion", ALL_LAYERS)


@pytest.mark.parametrize("case", MOVED, ids="-".join, indirect=True)
def test_device_map_auto_gives_the_same_logits(
    case: Case, stock: Any, family: Family, checkpoint: Path, mapping: dict[Any, Any], kernel: Any
) -> None:
    with door(case, kernel):
        model = load(family, checkpoint, mapping, device_map="auto")
    assert (logits(model, family) - logits(stock, family)).abs().max() <= 1e-5  # float32 rounding, as above


@pytest.mark.parametrize("case", MOVED, ids="-".join, indirect=True)
def test_weights_on_disk_bear_stock_names_or_the_load_says_how_they_would(
    case: Case, stock: Any, family: Family, checkpoint: Path, mapping: dict[Any, Any], kernel: Any, tmp_path: Path
) -> None:
    stem = family.parent.removesuffix(".*")
    expected, names = logits(stock, family), [name for name, _ in stock.named_parameters()]
    leaves = [name for name, module in stock.named_modules() if module._parameters or module._buffers]
    device_map = {name: "cpu" for name in leaves if not name.startswith(f"{stem}.")}
    device_map |= {f"{stem}.0": "cpu", f"{stem}.1": "disk"}
    options = {"device_map": device_map, "offload_folder": tmp_path}
    with door(case, kernel):
        if case[2] == "by_hand":
            with pytest.raises(ValueError, match=r"offloaded to disk.*kernel_loading\(\)"):
                load(family, checkpoint, mapping, **options)
            return
        model = load(family, checkpoint, mapping, **options)
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
