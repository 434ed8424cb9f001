"""The layers themselves: stateless, with a forward of their own, and right where a weight cannot be read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from kernels.layer.layer import _validate_layer
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP, Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from layout_kernels import layers
from layout_kernels.ops.rms_norm import operator, reference
from layout_kernels.running import plain
from tests.support.tiny import TEXT

ROOT = Path(__file__).parents[1]
CONFIG = tf.LlamaConfig(**TEXT)
PAIRS = ["CustomRMSNorm", "GatedMLP", "RMSNormMLP"]


@pytest.mark.parametrize("name", PAIRS)
def test_a_layout_has_the_forward_of_its_layer(name: str) -> None:
    layer, layout = getattr(layers, name), getattr(layers, f"{name}Layout")
    assert vars(layout)["forward"] is vars(layer)["forward"]
    _validate_layer(check_cls=layout, cls=layer, repo=name)


def test_the_stateless_norm_passes_the_validator_against_what_it_replaces() -> None:
    _validate_layer(check_cls=LlamaRMSNorm, cls=layers.RMSNorm, repo="RMSNorm")


def test_layers_import_without_transformers() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from layout_kernels import layers; import torch\n"
        "norm = layers.CustomRMSNormLayout(8, eps=1e-5)\n"
        "assert norm(torch.ones(2, 8)).shape == (2, 8) and list(norm.conversion_mapping) == []\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={"PYTHONPATH": "torch-ext"})


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((8,), {}), ((8, 1e-5), {}), ((8,), {"eps": 1e-5}), ((), {"dim": 8, "eps": 1e-5}), ((), {"hidden_size": 8})],
)
def test_norm_layouts_take_the_forms_of_transformers_classes(args: Any, kwargs: Any) -> None:
    layout = layers.CustomRMSNormLayout(*args, **kwargs)
    assert layout.refusal is None
    assert layout.scale.shape == (8,)
    assert layout.variance_epsilon == (1e-5 if 1e-5 in (*args, *kwargs.values()) else 1e-6)


def test_a_constructor_never_raises_and_the_reason_comes_later() -> None:
    for layout in (
        layers.CustomRMSNormLayout(),
        layers.CustomRMSNormLayout("wide"),
        layers.GatedMLPLayout(),
        layers.GatedMLPLayout(object()),
        layers.RMSNormMLPLayout(nn.Identity(), nn.Identity()),
    ):
        with pytest.raises(ValueError, match=type(layout).__name__):
            layout.eval()


def fused(norm: Any, mlp: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A fused layout with the weights of its parts, an input, and what the parts give for it."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in [*norm.parameters(), *mlp.parameters()]:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        x = torch.randn(2, 3, 32, generator=generator)
        layout = layers.RMSNormMLPLayout(norm, mlp).eval()
        layout.scale.copy_(norm.weight)
        if hasattr(mlp, "gate_up_proj"):
            layout.gate_up_proj.load_state_dict(mlp.gate_up_proj.state_dict())
        else:
            merged = {k: torch.cat([v, mlp.up_proj.state_dict()[k]]) for k, v in mlp.gate_proj.state_dict().items()}
            layout.gate_up_proj.load_state_dict(merged)
        layout.down_proj.load_state_dict(mlp.down_proj.state_dict())
        return layout, x, mlp(norm(x))


GELU = tf.GemmaConfig(**{**TEXT, "hidden_act": "gelu_pytorch_tanh"})


@pytest.mark.parametrize(
    ("norm", "mlp"),
    [
        (LlamaRMSNorm(32, 1e-5), LlamaMLP(CONFIG)),
        (LlamaRMSNorm(32, 0.0), Phi3MLP(CONFIG)),
        (Olmo2RMSNorm(32, 1e-5), LlamaMLP(tf.LlamaConfig(**{**TEXT, "mlp_bias": True}))),
        (GemmaRMSNorm(32), GemmaMLP(GELU)),
    ],
)
def test_a_fused_layer_computes_mlp_of_norm(norm: Any, mlp: Any) -> None:
    layout, x, expected = fused(norm, mlp)
    assert layout.refusal is None
    # float32 sums of up to 48 products in another order: a few ulps of the largest intermediate.
    torch.testing.assert_close(layout(x), expected, rtol=1e-5, atol=1e-5)


class Doubling(nn.Module):
    """What LoRA does to a child: another module in its place, which adds to its product."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.base(x)


def _wrap(layout: Any) -> None:
    layout.down_proj = Doubling(layout.down_proj)


def _hook(layout: Any) -> None:
    layout.down_proj.register_forward_hook(lambda module, args, output: 2 * output)


def _replace_forward(layout: Any) -> None:
    original = layout.down_proj.forward
    layout.down_proj.forward = lambda x: 2 * original(x)


class Doubled(torch.Tensor):
    """A quantised weight, as torchao makes it: the module stays an nn.Linear, the tensor knows how to multiply."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear:
            return 2 * result
        return result.as_subclass(cls) if func is torch.Tensor.detach else result


def _subclass(layout: Any) -> None:
    weight = layout.down_proj.weight.detach().as_subclass(Doubled)
    layout.down_proj.weight = nn.Parameter(weight, requires_grad=False)


@pytest.mark.parametrize("change", [_wrap, _hook, _replace_forward, _subclass])
def test_a_child_that_is_no_plain_linear_is_called_as_a_module(change: Any) -> None:
    layout, x, expected = fused(LlamaRMSNorm(32), LlamaMLP(CONFIG))
    change(layout)
    assert not plain.is_plain_linear(layout.down_proj)
    torch.testing.assert_close(torch.Tensor(layout(x)), 2 * expected, rtol=1e-5, atol=1e-5)  # as above


@pytest.mark.parametrize(("cls", "flavour"), [(LlamaRMSNorm, "cast"), (Olmo2RMSNorm, "scale"), (GemmaRMSNorm, "plus")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_stateless_norm_gives_the_bits_of_the_class_that_it_runs_for(
    cls: Any, flavour: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the reference promises the same bits; a native norm that was built in place may be an ulp off.
    monkeypatch.setitem(operator._forward, "cpu", reference.rms_norm)
    generator = torch.Generator().manual_seed(2)
    norm = cls(24, eps=1e-5).to(dtype)
    norm.weight.data = torch.randn(24, generator=generator).to(dtype)
    x = torch.randn(5, 24, generator=generator).to(dtype)
    expected = norm(x)
    assert torch.equal(layers.RMSNorm.forward(norm, x), expected), flavour


def test_the_stateless_norm_refuses_a_class_that_computes_something_else() -> None:
    class ScaledRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(hidden_states)

    with pytest.raises(ValueError, match="ScaledRMSNorm computes none of"):
        layers.RMSNorm.forward(ScaledRMSNorm(8), torch.ones(2, 8))


class FlaggedRMSNorm(nn.Module):
    """What it computes is a setting of the instance."""

    def __init__(self, dim: int, eps: float = 1e-6, zero_centered: bool = False, with_weight: bool = True) -> None:
        super().__init__()
        self.dim, self.eps, self.zero_centered = dim, eps, zero_centered
        self.weight = nn.Parameter(torch.randn(dim)) if with_weight else None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            x = x * (1.0 + self.weight.float() if self.zero_centered else self.weight.float())
        return x.to(hidden_states.dtype)


SETTINGS: list[dict[str, Any]] = [{}, {"zero_centered": True}, {"with_weight": False}, {"eps": 0.5}, {"dim": 24}]


@pytest.mark.parametrize("settings", [SETTINGS, SETTINGS[::-1]])
def test_the_stateless_norm_decides_by_the_settings_of_an_instance(settings: list[dict[str, Any]]) -> None:
    cls = type("Flagged", (FlaggedRMSNorm,), {})
    for given in settings:
        norm = cls(**{"dim": 8, **given})
        x = torch.randn(3, norm.dim)
        expected = norm(x)
        norm.forward = layers.RMSNorm.forward.__get__(norm)
        torch.testing.assert_close(norm(x), expected)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(norm, fullgraph=True, backend="eager")(x), expected)


def test_a_compiled_norm_whose_settings_nobody_has_seen_says_to_run_it_once() -> None:
    norm = type("Unseen", (FlaggedRMSNorm,), {})(8, zero_centered=True)
    norm.forward = layers.RMSNorm.forward.__get__(norm)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="run the model once before compiling it"):
        torch.compile(norm, fullgraph=True, backend="eager")(torch.randn(3, 8))


@pytest.mark.parametrize("cls", [LlamaRMSNorm, Olmo2RMSNorm])
def test_the_stateless_norm_compiles_without_having_run(cls: Any) -> None:
    fresh = type(f"Fresh{cls.__name__}", (cls,), {})
    norm, x = fresh(24), torch.randn(3, 24, generator=torch.Generator().manual_seed(3))
    expected = norm(x)
    norm.forward = layers.RMSNorm.forward.__get__(norm)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(norm, fullgraph=True, backend="eager")(x), expected)


class Halved(nn.Module):
    """A parametrisation."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value / 2


def test_a_parametrised_weight_is_read_through_its_parametrisation() -> None:
    norm, linear, x = layers.CustomRMSNormLayout(8), nn.Linear(8, 8), torch.randn(3, 8)
    expected = norm(x) / 2, nn.functional.linear(x, linear.weight / 2, linear.bias)
    for module, name in ((norm, "scale"), (linear, "weight")):
        nn.utils.parametrize.register_parametrization(module, name, Halved())
    torch.testing.assert_close((norm(x), layers.Linear.forward(linear, x)), expected)


def _unregister_bias(child: nn.Linear) -> None:
    bias = child.bias.data
    del child.bias
    child.bias = bias * 2


def _shadow_weight(child: nn.Linear) -> None:
    child.__dict__["weight"] = nn.Parameter(child.weight.data * 2)


@pytest.mark.parametrize("change", [_unregister_bias, _shadow_weight])
def test_what_is_no_registered_parameter_is_read_all_the_same(change: Any) -> None:
    layout, x, _ = fused(LlamaRMSNorm(32), LlamaMLP(tf.LlamaConfig(**TEXT, mlp_bias=True)))
    change(layout.down_proj)
    product = gated(layout, x)
    expected = nn.functional.linear(product, layout.down_proj.weight, layout.down_proj.bias)
    torch.testing.assert_close(layout(x), expected)


@pytest.mark.parametrize("given", [lambda norm: norm, lambda norm: layers.ZeroCenteredRMSNormLayout(32, norm.eps)])
def test_the_norms_before_and_after_an_mlp_have_an_epsilon_each(given: Any) -> None:
    before, after, mlp = Gemma2RMSNorm(32, eps=0.3), Gemma2RMSNorm(32, eps=2.0), Gemma2MLP(tf.Gemma2Config(**TEXT))
    layout = layers.RMSNormMLPRMSNormLayout(given(before), mlp, given(after))
    with torch.no_grad():
        layout.gate_up_proj.weight.copy_(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        layout.down_proj.weight.copy_(mlp.down_proj.weight)
        x = torch.randn(3, 32)
        torch.testing.assert_close(layout(x), after(mlp(before(x))))


def test_a_child_that_is_no_registered_module_is_called_all_the_same() -> None:
    layout, x, expected = fused(LlamaRMSNorm(32), LlamaMLP(CONFIG))
    child = layout.down_proj
    del layout.down_proj
    layout.down_proj = lambda product: 2 * child(product)
    torch.testing.assert_close(layout(x), 2 * expected, rtol=1e-5, atol=1e-5)


def gated(layout: Any, x: torch.Tensor) -> torch.Tensor:
    normed = nn.functional.rms_norm(x, (x.shape[-1],), layout.scale, layout.variance_epsilon)
    gate, up = nn.functional.linear(normed, layout.gate_up_proj.weight, layout.gate_up_proj.bias).chunk(2, dim=-1)
    return nn.functional.silu(gate) * up
