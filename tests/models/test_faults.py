"""Faults that a reviewer planted or found, each as an input and the right answer."""

from __future__ import annotations

import threading
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file
from torch import nn
from transformers.models.gemma import modeling_gemma
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel, LlamaPreTrainedModel, LlamaRMSNorm

from layout_kernels.recognition import mlps, norms
from layout_kernels.recognition.adjacency import why_not_adjacent
from layout_kernels.running import plain
from tests.support.loads import Loading, load, ref
from tests.support.tiny import FAMILIES, LAYERS, TEXT, save_family, tokens

LLAMA = FAMILIES["llama"]
FUSION = LLAMA.fusion_key()
BOTH = {"RMSNorm": ref("CustomRMSNorm"), FUSION: ref("RMSNormMLP")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_family(LLAMA, tmp_path / "llama")


def test_a_model_inside_the_loaded_one_saves_original_names_too(
    loading: Loading, folder: Path, tmp_path: Path
) -> None:
    expected = load(LLAMA, folder, None).model(tokens()).last_hidden_state
    with loading():
        model = load(LLAMA, folder, BOTH)
    model.model.save_pretrained(tmp_path / "inner")
    stock = tf.LlamaModel.from_pretrained(tmp_path / "inner")
    assert torch.equal(stock(tokens()).last_hidden_state, expected)


def test_a_kernel_config_serves_several_loads_inside_the_context(kernel: Any, folder: Path) -> None:
    config = tf.KernelConfig(dict(BOTH))
    before = dict(config.kernel_mapping)
    with kernel.kernel_loading():
        for _ in range(2):
            model = LLAMA.auto.from_pretrained(folder, use_kernels=True, kernel_config=config)
            assert config.kernel_mapping == before
            assert type(model.model.norm).is_adopted


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_a_model_built_from_a_config_in_the_context_has_and_saves_stock_names(
    name: str, kernel: Any, folder: Path, tmp_path: Path
) -> None:
    """Mixtral's own rules turn the checkpoint's experts into tensors of another form, and back."""
    config = getattr(tf, f"{name}Config")(**TEXT)
    cls = getattr(tf, f"{name}ForCausalLM")
    with kernel.kernel_loading():
        load(LLAMA, folder, BOTH)
        built = tf.AutoModelForCausalLM.from_config(config)
    stock = cls(config)
    assert type(built.model.norm).is_adopted
    assert list(built.state_dict()) == list(stock.state_dict())
    stock.load_state_dict(built.state_dict())  # the layers drew other random numbers
    for kind, model in (("built", built), ("stock", stock)):
        model.save_pretrained(tmp_path / kind)
    saved, expected = (load_file(tmp_path / kind / "model.safetensors") for kind in ("built", "stock"))
    assert sorted(saved) == sorted(expected)
    assert all(torch.equal(saved[key], expected[key]) for key in expected)


class Tripling(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


def test_a_subclass_of_linear_is_seen_where_a_plain_one_was_before() -> None:
    usual, other = LlamaMLP(tf.LlamaConfig(**TEXT)), LlamaMLP(tf.LlamaConfig(**TEXT))
    other.config = usual.config
    other.gate_proj = Tripling(32, 48, bias=False)
    assert mlps.mlp_kind(usual).activation == "silu"
    assert "Tripling" in mlps.mlp_kind(other).reason


def test_a_class_that_is_patched_after_it_was_examined_is_examined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = LlamaRMSNorm(16)
    assert norms.norm_flavour(norm).flavour == "cast_then_scale"
    assert norms.norm_class_flavour(norm)[0] == "cast_then_scale"
    original = LlamaRMSNorm.forward
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: 2 * original(self, x))
    assert norms.norm_flavour(norm).flavour is None
    with pytest.raises(ValueError, match="computes none of"):
        norms.norm_class_flavour(norm)


class Conditional(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() > 1:
            h = self.norm(x)
            y = self.mlp(h)
        return y + h


class Scoped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            h = self.norm(x)
            y = self.mlp(h)
        return y + h


class Enclosed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            h = self.norm(x)
            h = self.mlp(h)
        return h + 1


def test_a_result_that_is_read_outside_of_its_block_is_seen() -> None:
    for cls in (Conditional, Scoped):
        assert why_not_adjacent(cls, ("norm", "mlp")) is not None
    assert why_not_adjacent(Enclosed, ("norm", "mlp")) is None


def test_a_stock_load_of_another_thread_leaves_no_class_replaced(kernel: Any, folder: Path) -> None:
    stop, errors = threading.Event(), []

    def stock_loads() -> None:
        while not stop.is_set():
            try:
                load(LLAMA, folder, None)
            except Exception as error:  # noqa: BLE001 it may get our layers half way: documented
                errors.append(error)

    thread = threading.Thread(target=stock_loads)
    with kernel.kernel_loading():
        thread.start()
        try:
            for _ in range(6):
                load(LLAMA, folder, BOTH)
        except ValueError as error:  # the two loads replaced each other's classes: an error, never a wrong model
            errors.append(error)
        finally:
            stop.set()
            thread.join()
    assert modeling_llama.LlamaRMSNorm is LlamaRMSNorm
    assert modeling_llama.LlamaDecoderLayer.__name__ == "LlamaDecoderLayer"
    assert type(load(LLAMA, folder, None).model.norm) is LlamaRMSNorm


def test_copies_of_the_package_share_one_lock(kernel: Any) -> None:
    from transformers.utils import kernel_config

    import layout_kernels

    order: list[str] = []

    def other_copy() -> None:
        with layout_kernels.kernel_loading():
            order.append("other")

    thread = threading.Thread(target=other_copy)
    with kernel.kernel_loading():
        thread.start()
        thread.join(0.3)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]
    assert "cpu" not in kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES


@pytest.mark.parametrize(
    ("key", "layer"),
    [
        ("RMSNorm", "RMSNormMLP"),
        ((("MLP", f"{LAYERS}.mlp"),), "RMSNormMLP"),
        (FUSION, "RMSNormMLPRMSNorm"),
    ],
)
def test_a_fused_layer_under_a_wrong_key_names_the_right_one(
    key: Any, layer: str, loading: Loading, folder: Path
) -> None:
    with loading(), pytest.raises(ValueError, match=r"use the tuple key \(\("):
        load(LLAMA, folder, {key: ref(layer)})
    assert modeling_llama.LlamaRMSNorm is LlamaRMSNorm


class Headed(LlamaPreTrainedModel):
    """A user's head with a norm of its own, named as the body's."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.model(ids).last_hidden_state)


def test_a_head_with_a_norm_of_its_own_loads(loading: Loading, tmp_path: Path) -> None:
    model = Headed(tf.LlamaConfig(**TEXT)).eval()
    with torch.no_grad():
        model.norm.weight.uniform_()
        model.model.norm.weight.uniform_()
    model.save_pretrained(tmp_path)
    with loading():
        fast = Headed.from_pretrained(
            tmp_path, use_kernels=True, kernel_config=tf.KernelConfig({"RMSNorm": ref("CustomRMSNorm")})
        )
    # float32 sums of the norm in another order
    assert (fast(tokens()) - model(tokens())).abs().max() <= 1e-5 * model(tokens()).abs().max().clamp(min=1)


@pytest.mark.parametrize("mapping", [{"LlamaMLP": ref("GatedMLP")}, {FUSION: ref("RMSNormMLP")}])
def test_mismatched_sizes_are_ignored_when_asked_for_as_in_stock(mapping: Any, loading: Loading, folder: Path) -> None:
    config = tf.AutoConfig.from_pretrained(folder)
    config.intermediate_size = 40
    with loading(), pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(LLAMA, folder, mapping, config=config)
    with loading():
        model = load(LLAMA, folder, mapping, config=config, ignore_mismatched_sizes=True)
    assert model(tokens()).logits.isfinite().all()


def test_a_zero_centred_layout_starts_with_a_factor_of_one() -> None:
    from layout_kernels.layers import CustomRMSNormLayout, ZeroCenteredRMSNormLayout

    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ZeroCenteredRMSNormLayout(8)(x), modeling_gemma.GemmaRMSNorm(8)(x))
    torch.testing.assert_close(CustomRMSNormLayout(8)(x), LlamaRMSNorm(8)(x))


def test_global_hooks_see_every_product() -> None:
    linear = nn.Linear(2, 2)
    assert plain.is_plain_linear(linear)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        assert not plain.is_plain_linear(linear)
    finally:
        handle.remove()
    linear.forward = MethodType(nn.Linear.forward, linear)
    assert plain.is_plain_linear(linear)


@pytest.mark.parametrize("container", [lambda x: nn.ModuleList([x]), lambda x: nn.Sequential(nn.ModuleList([x]))])
def test_a_norm_in_a_container_is_judged_by_the_module_that_built_it(container: Any) -> None:
    from layout_kernels.layers import CustomRMSNormLayout

    class Seeing(CustomRMSNormLayout):
        def inspect(self, parent: nn.Module) -> None:
            seen.append(parent)

    seen: list[nn.Module] = []
    block, model = nn.Module(), nn.Module()
    model.block = block
    norm = Seeing(8)
    block.norms = container(norm)
    (path,) = (name for name, module in model.named_modules() if module is norm)
    norm.verify(model, path)
    assert seen == [block]
