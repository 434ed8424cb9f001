"""The references against the classes that they are taken from: bit for bit on the CPU."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from transformers.activations import ACT2FN

from layout_kernels.numerics.cases import lay_out
from layout_kernels.ops.gated_activation.reference import activate, gated_activation
from layout_kernels.ops.gated_rms_norm.reference import gated_rms_norm
from layout_kernels.ops.rms_norm.reference import rms_norm
from layout_kernels.ops.rms_norm_mlp.reference import rms_norm_mlp

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 7, 48, 100, 576)


def stock(model: str, name: str) -> type[torch.nn.Module]:
    return getattr(import_module(f"transformers.models.{model}.modeling_{model}"), name)


def module(cls, *args, dtype, **kwargs):
    made = cls(*args, **kwargs)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made.to(dtype).requires_grad_(False)


def rows(shape, dtype, seed=0, layout="contiguous"):
    generator = torch.Generator().manual_seed(seed)
    return lay_out((torch.randn(shape, generator=generator) * 3).to(dtype), layout)


def assert_equal(found, expected):
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


NORMS = [
    ("llama", "LlamaRMSNorm", "cast_then_scale", {}),
    ("qwen3", "Qwen3RMSNorm", "cast_then_scale", {}),
    ("mistral", "MistralRMSNorm", "cast_then_scale", {}),
    ("phi3", "Phi3RMSNorm", "cast_then_scale", {}),
    ("olmo2", "Olmo2RMSNorm", "scale_then_cast", {}),
    ("gpt_oss", "GptOssRMSNorm", "scale_then_cast", {}),
    ("gemma3n", "Gemma3nRMSNorm", "scale_then_cast", {}),
    ("gemma3n", "Gemma3nRMSNorm", "scale_then_cast", {"with_scale": False}),
    ("gemma4", "Gemma4RMSNorm", "scale_then_cast", {}),
    ("gemma", "GemmaRMSNorm", "one_plus_scale", {}),
    ("gemma3", "Gemma3RMSNorm", "one_plus_scale", {}),
    ("qwen3_next", "Qwen3NextRMSNorm", "one_plus_scale", {}),
]


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("model", "name", "flavour", "options"), NORMS)
def test_norms(model, name, flavour, options, dtype, layout):
    for width in WIDTHS:
        norm = module(stock(model, name), width, eps=1e-5, dtype=dtype, **options)
        x = rows((5, width), dtype, layout=layout)
        assert_equal(rms_norm(x, getattr(norm, "weight", None), 1e-5, flavour), norm(x))


@pytest.mark.parametrize(("model", "name", "flavour", "options"), NORMS)
def test_norms_with_a_weight_in_another_dtype_keep_the_flavours_result_dtype(model, name, flavour, options):
    for x_dtype, weight_dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.float16)):
        norm = module(stock(model, name), 48, eps=1e-6, dtype=weight_dtype, **options)
        x = rows((5, 48), x_dtype)
        assert_equal(rms_norm(x, getattr(norm, "weight", None), 1e-6, flavour), norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("model", "name", "flavour", "options"), NORMS)
def test_norms_of_zeros_and_of_values_that_are_not_finite(model, name, flavour, options, dtype):
    norm = module(stock(model, name), 48, eps=0.0, dtype=dtype, **options)
    x = rows((5, 48), dtype)
    x[0], x[1, 3], x[2, 4], x[3] = 0, torch.inf, torch.nan, 60000
    assert_equal(rms_norm(x, getattr(norm, "weight", None), 0.0, flavour), norm(x))


MAMBA = ("gate_then_norm", "cast_then_scale", "silu")
QWEN = ("norm_then_gate", "cast_then_scale", "silu")
KIMI = ("norm_then_gate", "scale_then_cast", "sigmoid")
GATED = [
    ("mamba2", "MambaRMSNormGated", {}, None, MAMBA),
    ("bamba", "BambaRMSNormGated", {}, None, MAMBA),
    ("granitemoehybrid", "GraniteMoeHybridRMSNormGated", {}, None, MAMBA),
    ("zamba2", "Zamba2RMSNormGated", {"group_size": 16}, 16, MAMBA),
    ("nemotron_h", "NemotronHRMSNormGated", {"group_size": 16}, 16, MAMBA),
    ("qwen3_next", "Qwen3NextRMSNormGated", {}, None, QWEN),
    ("qwen3_5", "Qwen3_5RMSNormGated", {}, None, QWEN),
    ("olmo_hybrid", "OlmoHybridRMSNormGated", {}, None, QWEN),
    ("kimi_linear", "KimiLinearRMSNormGated", {}, None, KIMI),
    ("falcon_h1", "FalconH1RMSNormGated", {"n_groups": 3}, 16, ("norm_then_gate", "scale_then_cast", "silu")),
    (
        "falcon_h1",
        "FalconH1RMSNormGated",
        {"n_groups": 3, "norm_before_gate": False},
        16,
        ("gate_then_norm", "scale_then_cast", "silu"),
    ),
]


@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("model", "name", "options", "group_size", "named"), GATED)
def test_gated_norms(model, name, options, group_size, named, dtype, weight_dtype):
    order, flavour, activation = named
    norm = module(stock(model, name), 48, eps=1e-5, dtype=weight_dtype or dtype, **options)
    x, gate = rows((2, 3, 48), dtype), rows((2, 3, 48), dtype, seed=1)
    found = gated_rms_norm(x, gate, norm.weight, 1e-5, flavour, order, group_size, activation)
    assert_equal(found, norm(x, gate))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("silu", "silu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh"), ("sigmoid", "sigmoid")],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(ours, theirs, dtype):
    x = rows((7, 100), dtype)
    assert_equal(activate(x, ours), ACT2FN[theirs](x))


class _Config:
    def __init__(self, act, bias):
        self.hidden_size, self.intermediate_size, self.hidden_act, self.mlp_bias = 48, 37, act, bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("ours", "theirs"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh")])
def test_a_norm_and_its_mlp_and_the_mlp_alone(dtype, bias, ours, theirs):
    norm = module(stock("llama", "LlamaRMSNorm"), 48, dtype=dtype)
    mlp = module(stock("llama", "LlamaMLP"), _Config(theirs, bias), dtype=dtype)
    gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    gate_up_bias = torch.cat([mlp.gate_proj.bias, mlp.up_proj.bias]) if bias else None
    for shape in ((1, 48), (2, 9, 48)):
        x = rows(shape, dtype)
        weights = (x, norm.weight, gate_up, mlp.down_proj.weight)
        found = rms_norm_mlp(*weights, 1e-6, "cast_then_scale", ours, gate_up_bias, mlp.down_proj.bias)
        assert_equal(found, mlp(norm(x)))
        weights = (x, None, gate_up, mlp.down_proj.weight)
        assert_equal(rms_norm_mlp(*weights, 0.0, "none", ours, gate_up_bias, mlp.down_proj.bias), mlp(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activation_is_the_middle_of_an_mlp(dtype):
    gate, up = rows((5, 37), dtype), rows((5, 37), dtype, seed=1)
    assert_equal(gated_activation(torch.cat([gate, up], -1), "silu"), torch.nn.functional.silu(gate) * up)


def test_half_precision_products_are_infinite_where_stock_is_and_finite_where_it_is_finite():
    gate, up = torch.tensor([[300.0, 60.0, -300.0]]).half(), torch.tensor([[300.0, 60.0, 300.0]]).half()
    found = gated_activation(torch.cat([gate, up], -1), "silu")
    assert_equal(found, torch.nn.functional.silu(gate) * up)
    assert found.isinf().tolist() == [[True, False, False]]
