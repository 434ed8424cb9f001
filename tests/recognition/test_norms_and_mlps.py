"""What a norm or an MLP computes is found by running it, whatever it is called and wherever it is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from layout_kernels.recognition import mlps, norms
from tests.support.tiny import TEXT

NORMS = [
    (LlamaRMSNorm, "cast_then_scale", "variance_epsilon"),
    (Olmo2RMSNorm, "scale_then_cast", "variance_epsilon"),
    (GptOssRMSNorm, "scale_then_cast", "variance_epsilon"),
    (GemmaRMSNorm, "one_plus_scale", "eps"),
    (Qwen3NextRMSNorm, "one_plus_scale", "eps"),
]


@pytest.mark.parametrize(("cls", "flavour", "eps_name"), NORMS)
@pytest.mark.parametrize("eps", [1e-6, 0.0, 1e-2])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_norm_classes_of_transformers(cls: Any, flavour: str, eps_name: str, eps: float, device: str) -> None:
    with torch.device(device):
        finding = norms.norm_flavour(cls(20, eps=eps))
    assert (finding.flavour, finding.eps_name) == (flavour, eps_name), finding.reason


def test_the_answer_is_the_class_s_own_where_the_name_says_otherwise() -> None:
    class GemmaRMSNorm(LlamaRMSNorm):
        pass

    class LlamaLikeRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return 1.01 * super().forward(hidden_states)

    assert norms.norm_flavour(GemmaRMSNorm(16)).flavour == "cast_then_scale"
    assert norms.norm_flavour(LlamaLikeRMSNorm(16)).flavour is None


class CenteredRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * F.layer_norm(x, x.shape[-1:])


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (CenteredRMSNorm(), "computes none of"),
        (T5LayerNorm(16), "computes none of"),  # like Llama's, but does not round before a float32 weight
        (nn.LayerNorm(16), "besides `weight`"),
        (MambaRMSNormGated(16), "computes none of"),
        (nn.Linear(4, 4), "none of the attributes"),
        (nn.Identity(), "none of the attributes"),
    ],
)
def test_what_is_no_known_norm_has_a_reason(norm: nn.Module, reason: str) -> None:
    finding = norms.norm_flavour(norm)
    if isinstance(norm, MambaRMSNormGated):
        # Without a gate it is a plain norm: the same class is asked for both, and only this form is ours.
        assert finding.flavour in (None, "cast_then_scale")
        return
    assert finding.flavour is None
    assert reason in finding.reason


def test_an_attribute_that_the_forward_lacks_is_named() -> None:
    norm = LlamaRMSNorm(16)
    del norm.variance_epsilon
    assert "variance_epsilon" in norms.norm_flavour(norm).reason


def test_nothing_of_the_caller_s_random_state_or_contexts_leaks() -> None:
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.device("meta"):
            finding = norms.norm_flavour(LlamaRMSNorm(11))
    finally:
        torch.set_default_dtype(torch.float32)
    assert finding.flavour == "cast_then_scale"
    assert torch.equal(torch.get_rng_state(), state)


CONFIG = tf.LlamaConfig(**TEXT)


class ClampingMLP(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x).clamp(max=7.0)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class DroppingMLP(LlamaMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(super().forward(x))


class MultiplyingMLP(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(x)


class SwappedMLP(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class NormedMLP(LlamaMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.ffn_layernorm = LlamaRMSNorm(config.intermediate_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.ffn_layernorm(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


@pytest.mark.parametrize("cls", [ClampingMLP, DroppingMLP, MultiplyingMLP, SwappedMLP, NormedMLP])
def test_an_mlp_that_does_more_is_not_ours(cls: Any) -> None:
    finding = mlps.mlp_kind(cls(CONFIG))
    assert finding.activation is None
    assert cls.__name__ in finding.reason


@pytest.mark.parametrize(
    ("given", "activation"),
    [("silu", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("relu", None), ("quick_gelu", None)],
)
@pytest.mark.parametrize("cls", [LlamaMLP, Phi3MLP])
def test_activations_of_plain_and_packed_mlps(cls: Any, given: str, activation: str | None) -> None:
    with torch.device("meta"):
        finding = mlps.mlp_kind(cls(tf.LlamaConfig(**{**TEXT, "hidden_act": given, "mlp_bias": True})))
    assert (finding.activation, finding.packed) == (activation, cls is Phi3MLP and activation is not None)


@pytest.mark.parametrize("cls", [LlamaMLP, DroppingMLP])
@pytest.mark.parametrize("training", [True, False])
def test_what_is_examined_stays_in_its_mode(cls: Any, training: bool) -> None:
    """A dropout that were left in training mode would draw at random in a model that is in use."""
    mlp = type("Fresh", (cls,), {})(CONFIG).train(training)
    mlps.mlp_kind(mlp)
    assert {module.training for module in mlp.modules()} == {training}


def test_an_answer_is_not_shared_by_modules_with_other_settings() -> None:
    first = mlps.mlp_kind(LlamaMLP(tf.LlamaConfig(**{**TEXT, "hidden_act": "gelu"})))
    second = mlps.mlp_kind(LlamaMLP(tf.LlamaConfig(**{**TEXT, "hidden_act": "silu"})))
    assert (first.activation, second.activation) == ("gelu", "silu")
