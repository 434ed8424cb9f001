"""Checkpoints that bring the code of their model (``trust_remote_code``): planned and loaded as all others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import KernelConfig

from layout_kernels import kernel_plugins as kp
from layout_kernels.__main__ import main
from layout_kernels.models.plan import plan
from tests.support.loads import REPO, by_hand, ref
from tests.support.observed import close, logits, ours
from tests.support.tiny import TEXT, randomise

CODE = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class RemoteConfig(LlamaConfig):
    model_type = "remote_tiny"


class RemoteRMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(width)), eps
        self.eps = eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class RemoteMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class RemoteLayer(LlamaDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.mlp = RemoteMLP(config)
        self.input_layernorm = RemoteRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RemoteRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class RemoteForCausalLM(LlamaForCausalLM):
    config_class = RemoteConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.layers = nn.ModuleList(RemoteLayer(config, i) for i in range(config.num_hidden_layers))
        self.model.norm = RemoteRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()
"""
FUSION = (("RMSNorm", "model.layers.*.post_attention_layernorm"), ("MLP", "model.layers.*.mlp"))
MAPPINGS: dict[str, dict[Any, Any]] = {
    "norm": {"RemoteRMSNorm": ref("CustomRMSNorm")},
    "hub name's pattern": {"RMSNorm": ref("CustomRMSNorm")},
    "MLP": {"RemoteMLP": ref("GatedMLP")},
    "fusion": {FUSION: ref("RMSNormMLP")},
    "norm and fusion": {"RemoteRMSNorm": ref("CustomRMSNorm"), FUSION: ref("RMSNormMLP")},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remote")
    (folder / "modeling_remote.py").write_text(CODE)
    config = tf.LlamaConfig(**TEXT).to_dict() | {
        "model_type": "remote_tiny",
        "architectures": ["RemoteForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_remote.RemoteConfig",
            "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    model = tf.AutoModelForCausalLM.from_config(
        tf.AutoConfig.from_pretrained(folder, trust_remote_code=True), trust_remote_code=True
    )
    torch.save(randomise(model).state_dict(), folder / "pytorch_model.bin")
    return folder


def read(folder: Path, mapping: dict[Any, Any] | None = None) -> Any:
    options = {} if mapping is None else {"use_kernels": True, "kernel_config": KernelConfig(dict(mapping))}
    return tf.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)


@pytest.mark.parametrize("kind", MAPPINGS)
@pytest.mark.parametrize("place", ["inside", "by hand"])
def test_loads_equal_stock(place: str, kind: str, folder: Path, kernel: Any) -> None:
    stock = read(folder)
    with kernel.kernel_loading() if place == "inside" else by_hand():
        model = read(folder, MAPPINGS[kind])
    assert len(ours(model)) >= 2
    assert not any(row.fallback for row in kernel.report(model).rows)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in stock.named_parameters()]
    assert close(logits(model), logits(stock))


def test_the_plan_names_the_layers_and_loads(folder: Path, kernel: Any) -> None:
    found = plan(folder, trust_remote_code=True)
    assert found.model_class == "RemoteForCausalLM"
    assert found.mapping == {"RemoteRMSNorm": "CustomRMSNorm", FUSION: "RMSNormMLP"}
    with kernel.kernel_loading():
        model = tf.AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=True, use_kernels=True, kernel_config=found.kernel_config(REPO, revision="v1")
        )
    assert len(ours(model)) == 7
    assert close(logits(model), logits(read(folder)))
    assert plan(read(folder)).mapping == found.mapping


def test_without_trust_no_code_of_a_checkpoint_runs(folder: Path) -> None:
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        plan(folder)


@pytest.mark.parametrize("trust", [True, False])
def test_the_command_line_asks_for_trust(trust: bool, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(folder), *(["--trust-remote-code"] * trust)]
    assert main(arguments) == (0 if trust else 1)
    told = capsys.readouterr()
    assert ("RMSNormMLP" in told.out) if trust else ("--trust-remote-code" in told.err)


def test_a_live_model_gets_layers(folder: Path) -> None:
    model = kp.apply_default_kernels(read(folder), "auto")
    assert len(ours(model)) == 7
    assert close(logits(model), logits(read(folder)))
