"""What is changed in a model after it got its layers changes it as it changes stock: classes, children, settings."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from layout_kernels import kernel_plugins as kp
from tests.support.loads import REPO, load, ref
from tests.support.observed import TREES, close, logits, ours
from tests.support.pairs import TWO_WAYS, Way, pair
from tests.support.tiny import TEXT, randomise, save_family, tokens

LLAMA = TREES["llama"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(LLAMA, tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=TWO_WAYS, ids="-".join)
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


def doubled(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: 2 * forward(self, *args)


@pytest.mark.parametrize("cls", [LlamaMLP, LlamaRMSNorm, nn.Linear, SiLUActivation], ids=lambda cls: cls.__name__)
def test_a_forward_that_is_patched_on_its_class_runs(
    cls: Any, way: Way, kernel: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cls is SiLUActivation and way[0] == "inside":
        pytest.skip("kernels binds stock's own forward to what it has no kernel for, in stock models too")
    stock, model = pair(folder, way, kernel)
    before = logits(stock)
    monkeypatch.setattr(cls, "forward", doubled(cls.forward))
    assert not close(logits(stock), before)
    assert close(logits(model), logits(stock))
    monkeypatch.undo()
    assert close(logits(model), before)


def test_a_patched_call_of_every_module_sees_every_module(
    way: Way, kernel: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    original = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen[-1].append(type(self).__name__)
        return original(self, *args, **kwargs)

    models = pair(folder, way, kernel)
    monkeypatch.setattr(nn.Module, "__call__", call)
    for model in models:
        seen.append([])
        logits(model)
    assert seen[0] == seen[1]


class Doubling(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return 2 * result if function is nn.functional.linear else result


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_function_mode_sees_the_products(is_recorded: bool, way: Way, kernel: Any, folder: Path) -> None:
    stock, model = pair(folder, way, kernel)
    with torch.set_grad_enabled(is_recorded), Doubling():
        expected, found = (each(tokens()).logits for each in (stock, model))
    assert not close(expected, logits(stock, {"input_ids": tokens()}))
    assert close(found, expected)
    with torch.device("cpu"), torch.no_grad():  # which is a mode too, and changes no product
        assert close(model(tokens()).logits, stock(tokens()).logits)


EPSILONS = {
    "tensor": torch.tensor(0.5),
    "parameter": nn.Parameter(torch.tensor(0.5)),
    "numpy": np.float32(0.5),
    "rows": torch.rand(1, 9, 1),
    "integer": 1,
}


@pytest.mark.parametrize("kind", EPSILONS)
def test_an_epsilon_of_another_kind_is_used(kind: str, way: Way, kernel: Any, folder: Path) -> None:
    stock, model = pair(folder, way, kernel)
    for each in (stock, model):
        each.model.norm.variance_epsilon = EPSILONS[kind]
    assert close(logits(model), logits(stock))


@pytest.mark.parametrize("name", ["post_attention_layernorm", "mlp.gate_proj"])
def test_a_weight_that_is_taken_away_is_missed(name: str, way: Way, kernel: Any, folder: Path) -> None:
    messages = []
    for each in pair(folder, way, kernel):
        each.model.layers[0].get_submodule(name).weight = None
        with pytest.raises(TypeError) as error:
            logits(each)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("name", ["mlp", "post_attention_layernorm"])
def test_a_class_that_was_made_of_an_adopted_one_is_kept_by_copies(
    name: str, way: Way, kernel: Any, folder: Path
) -> None:
    for each in pair(folder, way, kernel):
        module = each.model.layers[0].get_submodule(name)
        before = type(module)
        module.__class__ = type("Made", (before,), {"forward": doubled(before.forward)})
        assert type(copy.deepcopy(each).model.layers[0].get_submodule(name)) is type(module)
        assert close(logits(copy.deepcopy(each)), logits(each))


@pytest.mark.parametrize("change", ["p", "hook", "exchange", "forward"])
def test_a_dropout_of_an_mlp_that_begins_to_drop_drops(change: str) -> None:
    config = tf.T5GemmaModuleConfig(**{**TEXT, "dropout_rate": 0.0})
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaMLP

    torch.manual_seed(0)
    stock = T5GemmaMLP(config).train()
    model = nn.ModuleDict({"mlp": copy.deepcopy(stock)})
    kp.apply_kernel("cpu_fused_swiglu", model=model)
    assert ours(model) == {"mlp"}
    x, found = torch.randn(4, 32), []
    assert torch.allclose(model["mlp"](x), stock(x), atol=1e-6)
    for each in (stock, model["mlp"]):
        if change == "p":
            each.dropout.p = 0.5
        elif change == "hook":
            each.dropout.register_forward_hook(lambda module, args, result: 2 * result)
        elif change == "exchange":
            each.dropout = nn.Dropout(0.5)
        else:
            each.dropout.forward = lambda x: 3 * x
        torch.manual_seed(1)
        found.append(each(x))
    assert torch.allclose(found[0], found[1], atol=1e-6)


class Abstract(LlamaMLP, abc.ABC):
    pass


class SaysHow(LlamaMLP):
    def __reduce__(self) -> Any:
        return nn.Identity, ()


@pytest.mark.parametrize("cls", [Abstract, SaysHow])
def test_unusual_classes_get_their_layer_and_are_copied_as_they_say(cls: Any) -> None:
    mlp = cls(tf.LlamaConfig(**TEXT))
    x = torch.randn(2, 32)
    expected = mlp(x)
    model = nn.ModuleDict({"mlp": mlp})
    kp.apply_kernel("cpu_fused_swiglu", model=model)
    assert torch.allclose(mlp(x), expected, atol=1e-6)
    assert type(copy.deepcopy(mlp)) is (nn.Identity if cls is SaysHow else type(mlp))


class TakesMore(LlamaMLP):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return scale * super().forward(x)


class TakesAnything(LlamaMLP):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("cls", [TakesMore, TakesAnything])
def test_an_mlp_that_takes_more_than_its_input_is_left_alone(cls: Any) -> None:
    model = nn.ModuleDict({"mlp": cls(tf.LlamaConfig(**TEXT))})
    with pytest.raises(RuntimeError, match=f"{cls.__name__}.forward takes .*, expected one tensor"):
        kp.apply_kernel("cpu_fused_swiglu", model=model)


def test_classes_are_sub_and_super_as_stock_s(way: Way, kernel: Any, folder: Path) -> None:
    stock, model = pair(folder, way, kernel)
    first, second = type(stock.model.layers[0].mlp), type(model.model.layers[0].mlp)
    assert issubclass(second, first)
    assert issubclass(first, second)
    assert not issubclass(nn.Linear, second)


@pytest.mark.parametrize("change", ["subclass", "copy"])
def test_a_product_that_is_ours_by_its_instance_follows_its_class(change: str) -> None:
    model = nn.ModuleDict({"product": nn.Linear(8, 8)})
    kp.apply_kernel("cpu_linear", model=model)
    x = torch.randn(3, 8)

    class Twice(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    expected = nn.functional.linear(x, model["product"].weight, model["product"].bias)
    if change == "subclass":
        model["product"].__class__ = Twice
        assert torch.allclose(model["product"](x), 2 * expected, atol=1e-6)
    else:
        copied = copy.deepcopy(model["product"])
        copied.weight.data.zero_()
        copied.bias.data.zero_()
        assert torch.equal(copied(x), torch.zeros(3, 8))
        assert torch.allclose(model["product"](x), expected, atol=1e-6)


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj", "act_fn"])
def test_a_compiled_mlp_notices_another_forward_of_a_child(name: str, way: Way, kernel: Any, folder: Path) -> None:
    x, found = torch.randn(2, 32), []
    for each in pair(folder, way, kernel):
        torch._dynamo.reset()
        mlp = each.model.layers[0].mlp
        compiled = torch.compile(mlp, backend="eager")
        compiled(x)
        child = mlp.get_submodule(name)
        before = child.forward
        child.forward = lambda x, before=before: 2 * before(x)
        found.append(compiled(x))
    assert close(found[1], found[0])


def test_a_mismatched_half_is_refused_where_stock_would_keep_the_other(
    folder: Path, kernel: Any, tmp_path: Path
) -> None:
    state = load_file(folder / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"] = torch.ones(40, 32)
    load(LLAMA, folder, None).config.save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with kernel.kernel_loading(), pytest.raises(ValueError, match=r"up_proj.*\(40, 32\).*apply_default_kernels"):
        load(LLAMA, tmp_path, {LLAMA.mlp_class: ref("GatedMLP")}, ignore_mismatched_sizes=True)


def test_names_of_tied_weights_are_stock_s_after_a_load(kernel: Any, tmp_path: Path) -> None:
    config = tf.ZambaConfig(
        **{**TEXT, "num_hidden_layers": 5, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
        n_mamba_heads=2,
        use_mamba_kernels=False,
        attention_head_dim=16,
        attention_hidden_size=64,
    )
    randomise(tf.ZambaForCausalLM(config)).save_pretrained(tmp_path)
    stock = tf.ZambaForCausalLM.from_pretrained(tmp_path)
    plan = kernel.plan(tmp_path).kernel_config(REPO, revision="v1")
    with kernel.kernel_loading():
        model = tf.ZambaForCausalLM.from_pretrained(tmp_path, use_kernels=True, kernel_config=plan)
    assert ours(model)
    assert model.all_tied_weights_keys == stock.all_tied_weights_keys
    model.tie_weights(recompute_mapping=False)


@pytest.mark.parametrize("needs", [True, False])
def test_weights_that_change_before_the_backward_are_an_error_only_where_they_are_needed(
    needs: bool, way: Way, kernel: Any, folder: Path
) -> None:
    for each in pair(folder, way, kernel):
        mlp = each.model.layers[0].mlp
        result = mlp(torch.randn(2, 32, requires_grad=needs)).sum()
        with torch.no_grad():
            mlp.gate_proj.weight.mul_(2)
        with ExitStack() as stack:
            if needs:
                stack.enter_context(pytest.raises(RuntimeError, match="modified by an inplace operation"))
            result.backward()


def test_autocast_leaves_float64_to_stock(way: Way, kernel: Any, folder: Path) -> None:
    messages = []
    for each in pair(folder, way, kernel):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError) as error:
            each.model.layers[0].mlp(torch.randn(2, 32, dtype=torch.float64))
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.fixture(autouse=True)
def _compilers_are_reset() -> Iterator[None]:
    yield
    torch._dynamo.reset()
