"""Whole models, loaded by the real transformers and `kernels` on the simulated device, beside stock on the CPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import KernelConfig
from transformers.core_model_loading import revert_weight_conversion

from tests.support.loads import ref
from tests.support.tiny import FAMILIES, TEXT, Family, save_family, tokens

FAMILY: dict[str, Family] = FAMILIES | {
    "gemma": Family(lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**TEXT)), "GemmaRMSNorm", "GemmaMLP"),
    "gemma2": Family(lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**TEXT)), "Gemma2RMSNorm", "Gemma2MLP"),
    "olmo2": Family(lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**TEXT)), "Olmo2RMSNorm", "Olmo2MLP"),
}
FUSION = FAMILY["qwen3"].fusion_key()
SANDWICH = (
    ("RMSNorm", "model.layers.*.pre_feedforward_layernorm"),
    ("MLP", "model.layers.*.mlp"),
    ("RMSNorm", "model.layers.*.post_feedforward_layernorm"),
)
NORM, SWIGLU, GEMMA, GEGLU = "npu_rms_norm", "npu_swiglu", "npu_gemma_rms_norm", "npu_geglu"
# A family, the KernelConfig, and the vendor's operators of its forward and backward.
LOADS: dict[str, tuple[str, dict[Any, Any], set[str], set[str]]] = {
    "the one line": ("qwen3", {"RMSNorm": ref("CustomRMSNorm")}, {NORM}, {f"{NORM}_backward"}),
    # Under a hub name there is no layout: after `train()` transformers binds its own choice, and stock runs.
    "the hub's name": ("qwen3", {"RMSNorm": ref("RMSNorm")}, {NORM}, set()),
    "MLP": ("qwen3", {(("MLP", "model.layers.*.mlp"),): ref("GatedMLP")}, {SWIGLU}, {f"{SWIGLU}_backward"}),
    "fusion": ("qwen3", {FUSION: ref("RMSNormMLP")}, {NORM, SWIGLU}, {f"{NORM}_backward", f"{SWIGLU}_backward"}),
    "norm and fusion": (
        "qwen3",
        {"RMSNorm": ref("CustomRMSNorm"), FUSION: ref("RMSNormMLP")},
        {NORM, SWIGLU},
        {f"{NORM}_backward", f"{SWIGLU}_backward"},
    ),
    "biases": ("llama", {FUSION: ref("RMSNormMLP")}, {NORM, SWIGLU}, {f"{NORM}_backward", f"{SWIGLU}_backward"}),
    "packed": ("phi3", {FUSION: ref("RMSNormMLP")}, {NORM, SWIGLU}, {f"{NORM}_backward", f"{SWIGLU}_backward"}),
    "Gemma's norm and MLP": (
        "gemma",
        {"GemmaRMSNorm": ref("ZeroCenteredRMSNorm"), FUSION: ref("RMSNormMLP")},
        {GEMMA, GEGLU},
        {f"{NORM}_backward", f"{GEGLU}_grad"},
    ),
    "a norm on both sides of the MLP": (
        "gemma2",
        {"Gemma2RMSNorm": ref("ZeroCenteredRMSNorm"), SANDWICH: ref("RMSNormMLPRMSNorm")},
        {GEMMA, GEGLU},
        {f"{NORM}_backward", f"{GEGLU}_grad"},
    ),
    "OLMo's norm": ("olmo2", {"Olmo2RMSNorm": ref("FP32RMSNorm")}, {NORM}, {f"{NORM}_backward"}),
}


@dataclass(frozen=True)
class Loaded:
    """A model on the device, the checkpoint that it came from, and the vendor's operators that it should run."""

    model: Any
    family: Family
    folder: Path
    forward: set[str]
    backward: set[str]

    @property
    def anew(self) -> set[str]:
        """What a backward runs again: the norm, for 1 / rms(x)."""
        return {name.removesuffix("_backward") for name in self.backward} - {"npu_geglu_grad"}

    def stock(self, folder: Path | None = None) -> Any:
        """The stock model on the CPU."""
        return load(self.family, folder or self.folder, "cpu")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    used = {name for name, *_ in LOADS.values()}
    return {name: save_family(FAMILY[name], tmp_path_factory.mktemp(name)) for name in used}


@pytest.fixture(scope="session", params=LOADS)
def loaded(request: pytest.FixtureRequest, folders: dict[str, Path], kernel: Any) -> Loaded:
    name, mapping, forward, backward = LOADS[request.param]
    with kernel.kernel_loading():
        model = load(FAMILY[name], folders[name], "npu", mapping)
    return Loaded(model, FAMILY[name], folders[name], forward, backward)


def load(family: Family, folder: Path, device: str, mapping: dict[Any, Any] | None = None) -> Any:
    wanted: dict[str, Any] = {"device_map": device, "attn_implementation": "eager"}
    if mapping is not None:
        # Transformers has a mapping of its own for norms on an npu, which asks the Hub.
        config = KernelConfig(dict(mapping), inherit_mapping="RMSNorm" in mapping)
        wanted |= {"use_kernels": True, "kernel_config": config}
    return family.auto.from_pretrained(folder, **wanted)


def test_the_resolver_of_kernels_picks_the_npu_variant(kernel: Any, built_kernel: Path):
    folder = Path(kernel.__file__).parent
    assert folder.name == "torch-npu"
    assert json.loads((folder / "metadata.json").read_text())["backend"]["type"] == "cann"


def test_logits_equal_stock_on_the_cpu_and_the_vendors_operators_ran(npu, loaded: Loaded):
    assert {parameter.device.type for parameter in loaded.model.parameters()} == {"npu"}
    with torch.no_grad(), npu.watched() as calls:
        found = loaded.model(tokens().to("npu")).logits
    assert {name for name in calls if name.startswith("npu_")} == loaded.forward
    with torch.no_grad():
        expected = loaded.stock()(tokens()).logits
    # Merged products add up the same terms as separate ones, possibly in another order: float32 rounding only.
    assert (found.cpu() - expected).abs().max() <= 1e-5


def test_generate_gives_the_tokens_of_stock_on_the_cpu(loaded: Loaded):
    wanted = {"max_new_tokens": 8, "do_sample": False, "min_new_tokens": 8}
    found = loaded.model.generate(tokens().to("npu"), **wanted).cpu()
    assert torch.equal(found, loaded.stock().generate(tokens(), **wanted))


def test_what_is_saved_from_the_device_loads_as_stock(loaded: Loaded, tmp_path: Path):
    loaded.model.save_pretrained(tmp_path)
    again = loaded.stock(tmp_path).state_dict()
    for name, tensor in loaded.stock().state_dict().items():
        assert torch.equal(again[name], tensor), name


def loss_and_gradients(model: Any, device: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.train()
    logits = model(tokens().to(device)).logits
    loss = (logits * torch.linspace(-1, 1, logits.shape[-1], device=device)).mean()
    loss.backward()
    # The conversion back to checkpoint names is looked up when a state dict is made.
    model.state_dict()
    found = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach().cpu(), revert_weight_conversion(model, found)


def test_training_gives_the_gradients_of_stock_on_the_cpu(npu, loaded: Loaded):
    with npu.watched() as calls:
        loss, found = loss_and_gradients(loaded.model, "npu")
    assert {name for name in calls if name.startswith("npu_")} == (
        loaded.forward | loaded.backward | loaded.anew if loaded.backward else set()
    )
    expected_loss, expected = loss_and_gradients(loaded.stock(), "cpu")
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-7)
    assert sorted(found) == sorted(expected)
    for name, gradient in expected.items():
        # Sums of some hundred float32 terms in another order, through two layers.
        assert (found[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max() + 1e-8, name
