"""A plan fits what the model computes, loads to the same results, and says why where nothing fits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereDecoderLayer
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.moshi.modeling_moshi import MoshiDecoderLayer
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer
from transformers.models.pixtral.modeling_pixtral import PixtralAttentionLayer

from layout_kernels.models.plan import pattern_of, plan
from layout_kernels.recognition.adjacency import why_not_adjacent
from tests.support.loads import REPO, load
from tests.support.tiny import FAMILIES, TEXT, Family, _causal, save_family, tokens

SANDWICH = ("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm")
EXPECTED = {
    "Gemma": ({"ZeroCenteredRMSNorm", "RMSNormMLP"}, "GemmaRMSNorm"),
    "Gemma2": ({"ZeroCenteredRMSNorm", "RMSNormMLPRMSNorm"}, "Gemma2RMSNorm"),
    "Gemma3Text": ({"ZeroCenteredRMSNorm", "RMSNormMLPRMSNorm"}, "Gemma3RMSNorm"),
    "Olmo2": ({"FP32RMSNorm", "GatedMLP"}, "Olmo2RMSNorm"),
    "Llama": ({"CustomRMSNorm", "RMSNormMLP"}, "LlamaRMSNorm"),
    "Mixtral": ({"CustomRMSNorm"}, "MixtralRMSNorm"),
    "Cohere": ({"GatedMLP"}, ""),
}


def _family(name: str) -> Family:
    if name == "Gemma3Text":
        return Family(lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**TEXT)), "", "")
    return Family(_causal(name), "", "")


@pytest.mark.parametrize("name", list(EXPECTED))
@pytest.mark.parametrize("fuse", [True, False])
def test_a_plan_loads_to_the_results_and_the_file_of_stock(name: str, fuse: bool, kernel: Any, tmp_path: Path) -> None:
    family = _family(name)
    folder = save_family(family, tmp_path / "original")
    layers, norm_class = EXPECTED[name]
    if not fuse:
        layers = {layer for layer in layers if layer.endswith("RMSNorm") and "MLP" not in layer}
    made = plan(folder, fuse=fuse)
    assert set(made.mapping.values()) == layers, str(made)
    expected = load(family, folder, None)(tokens()).logits
    if not layers:
        with pytest.raises(ValueError, match="no layer fits CohereForCausalLM"):
            made.kernel_config(REPO, revision="v1")
        return
    assert not norm_class or norm_class in made.mapping
    with kernel.kernel_loading():
        model = family.auto.from_pretrained(
            folder, use_kernels=True, kernel_config=made.kernel_config(REPO, revision="v1")
        )
    # Merged products add up the same terms as separate ones, possibly in another order: float32 rounding only.
    assert (model(tokens()).logits - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)
    model.save_pretrained(tmp_path / "saved")
    original, saved = (load_file(tmp_path / part / "model.safetensors") for part in ("original", "saved"))
    assert sorted(saved) == sorted(original)
    assert all(torch.equal(saved[key], original[key]) for key in original)
    rows = kernel.report(model).rows
    assert {row.layer for row in rows} == layers


def test_a_plan_s_config_asks_the_hub_for_nothing_but_its_own_layers() -> None:
    """GPT-OSS has experts and norms with hub names, for which transformers names kernels of other repositories."""
    config = plan(tf.GptOssConfig(**TEXT, num_local_experts=2)).kernel_config(REPO, revision="v1")
    assert not config.inherit_mapping
    assert all(value[0].startswith(f"{REPO}:") for value in config.kernel_mapping.values())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "mistral3"])
def test_towers_of_a_vision_language_model_are_fused_too(family: str, kernel: Any, tmp_path: Path) -> None:
    tiny = FAMILIES[family]
    folder = save_family(tiny, tmp_path)
    made = plan(folder)
    fused = [entry for entry in made.entries if entry.layer == "RMSNormMLP"]
    assert len(fused) == 2, str(made)
    expected = load(tiny, folder, None)(**tiny.inputs()).logits
    with kernel.kernel_loading():
        config = made.kernel_config(REPO, revision="v1")
        model = tiny.auto.from_pretrained(folder, use_kernels=True, kernel_config=config)
    assert (model(**tiny.inputs()).logits - expected).abs().max() <= 1e-5  # float32 rounding, as above


@pytest.mark.parametrize(
    ("cls", "children", "adjacent"),
    [
        (LlamaDecoderLayer, ("post_attention_layernorm", "mlp"), True),
        (LlamaDecoderLayer, ("input_layernorm", "mlp"), False),
        (PixtralAttentionLayer, ("ffn_norm", "feed_forward"), True),
        (Gemma2DecoderLayer, SANDWICH, True),
        (Gemma2DecoderLayer, ("post_attention_layernorm", "mlp"), False),
        (Olmo2DecoderLayer, ("post_attention_layernorm", "mlp"), False),
        (CohereDecoderLayer, ("input_layernorm", "mlp"), False),
        (MoshiDecoderLayer, ("post_attention_layernorm", "mlp"), False),
    ],
)
def test_blocks_of_transformers(cls: type, children: tuple[str, ...], adjacent: bool) -> None:
    assert (why_not_adjacent(cls, children) is None) == adjacent, why_not_adjacent(cls, children)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.Identity(), nn.Identity()


class ReadTwice(Block):
    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        return y + self.mlp(y)


class ReadLater(Block):
    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        z = self.mlp(y)
        return z + y


class Changed(Block):
    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        y = y * 2
        return self.mlp(y)


class Branch(Block):
    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        if x is not None:
            return self.mlp(y)
        return y


class Alias(Block):
    def forward(self, x: Any) -> Any:
        norm = self.norm
        return self.mlp(norm(x))


class Extra(Block):
    def forward(self, x: Any) -> Any:
        return self.mlp(self.norm(x), 2)


class Loop(Block):
    def forward(self, x: Any) -> Any:
        y = x
        for _ in range(2):
            x = self.mlp(y)
            y = self.norm(x)
        return x


class Carried(Block):
    def forward(self, x: Any) -> Any:
        y = x
        for _ in range(2):
            x = x + y
            y = self.norm(x)
            x = self.mlp(y)
        return x


class Nested(Block):
    def forward(self, x: Any) -> Any:
        return x + self.mlp(self.norm(x))


class Reassigned(Block):
    def forward(self, x: Any) -> Any:
        residual = x
        x = self.norm(x)
        x = self.mlp(x)
        return residual + x


@pytest.mark.parametrize("cls", [ReadTwice, ReadLater, Changed, Branch, Alias, Extra, Loop, Carried])
def test_no_proof_where_the_norm_s_result_goes_elsewhere(cls: type) -> None:
    assert why_not_adjacent(cls, ("norm", "mlp")) is not None


@pytest.mark.parametrize("cls", [Nested, Reassigned])
def test_a_proof_where_it_goes_to_the_mlp_alone(cls: type) -> None:
    assert why_not_adjacent(cls, ("norm", "mlp")) is None


def test_a_source_that_names_no_model_is_an_error() -> None:
    with pytest.raises(TypeError, match="expected a model, a config or the path"):
        plan(3)
    with pytest.raises(ValueError, match="there is no folder '/nowhere'"):
        plan("/nowhere")
    with pytest.raises(ValueError, match="give one of version and revision"):
        plan(tf.LlamaConfig(**TEXT)).kernel_config(REPO)
    assert pattern_of("model.layers.12.mlp") == "model.layers.*.mlp"


def test_the_command_prints_the_plan(tmp_path: Path) -> None:
    folder = save_family(_family("Gemma3Text"), tmp_path)
    command = [sys.executable, "-m", "layout_kernels", "plan", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": "torch-ext"})
    assert "RMSNormMLPRMSNorm" in done.stdout
    missing = subprocess.run([*command[:-1], str(tmp_path / "no")], capture_output=True, text=True, check=False)
    assert missing.returncode == 1


def test_the_doctor_names_what_would_run() -> None:
    command = [sys.executable, "-m", "layout_kernels", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": "torch-ext"})
    assert "transformers 5.22.2" in done.stdout
    assert "rms_norm_mlp:" in done.stdout
