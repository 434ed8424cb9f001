"""A row for each that looks at a model by name, class or shape: it finds, keeps and writes what it does on stock."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from accelerate import FullyShardedDataParallelPlugin
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules import module as every_module
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers.monkey_patching import clear_patch_mapping

from layout_kernels import kernel_plugins as kp
from tests.support.loads import by_hand, load, ref
from tests.support.observed import TREES, close, logits, mapping, ours, with_layers
from tests.support.tiny import save_family, tokens

LLAMA = TREES["llama"]
BLOCK = 0  # the layer that is looked at


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(LLAMA, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=["norm", "MLP", "norm and fusion", "by hand", "live"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def both(way: str, kernel: Any, folder: Path) -> tuple[Any, Any]:
    """The stock model and ours, for who only looks on."""
    return load(LLAMA, folder, None), with_layers("llama", folder, way, kernel)


@pytest.mark.parametrize("version", [1, 2])
def test_wrapping_by_the_parents_class(version: int, way: str, kernel: Any, folder: Path) -> None:
    model = with_layers("llama", folder, way, kernel)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, auto_wrap_policy="transformer_based_wrap")
    plugin.set_auto_wrap_policy(model)
    assert plugin.auto_wrap_policy.keywords["transformer_layer_cls"] == {type(model.model.layers[BLOCK])}
    assert type(model.model.layers[BLOCK]).__name__ == "LlamaDecoderLayer"


@pytest.mark.parametrize("order", ["quantised first", "kernels first"])
def test_quantising_in_place(order: str, folder: Path) -> None:
    expected = quantised(load(LLAMA, folder, None))
    model = load(LLAMA, folder, None)
    if order == "kernels first":
        kp.apply_default_kernels(model, "auto")
    model = quantised(model)
    if order == "quantised first":
        kp.apply_default_kernels(model, "auto")
    assert [(n, type(p)) for n, p in model.named_parameters()] == [
        (n, type(p)) for n, p in expected.named_parameters()
    ]
    assert len(ours(model)) >= 5
    assert close(logits(model), logits(expected))


def quantised(model: Any) -> Any:
    quantize_(model, Int8WeightOnlyConfig())
    return model


def test_kernels_that_come_and_go_in_inference_mode_leave_a_model_that_trains(folder: Path) -> None:
    model, stock = load(LLAMA, folder, None), load(LLAMA, folder, None)
    for step in (lambda: kp.apply_default_kernels(model, "auto"), lambda: kp.undo(model)):
        with torch.inference_mode():
            step()
            model(tokens())
        for each in (model, stock):
            each.zero_grad()
            each(tokens(), labels=tokens()).loss.backward()
        for (name, p), q in zip(model.named_parameters(), stock.parameters(), strict=True):
            assert close(p.grad, q.grad), name


def test_modules_that_are_called_alone_give_stock_s_result(both: tuple[Any, Any]) -> None:
    stock, model = both
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name in ("mlp", "post_attention_layernorm", "input_layernorm"):
            found, expected = (each.model.layers[BLOCK].get_submodule(name)(x) for each in (model, stock))
            assert close(found, expected), name


Call = Callable[[Any, torch.Tensor], Any]
BYSTANDERS: dict[str, Call] = {
    "an export": lambda layer, x: torch.export.export(layer, (x,)).module()(x),
    "a trace": lambda layer, x: torch.jit.trace(layer, (x,), check_trace=False)(x),
    "fx": lambda layer, x: torch.fx.symbolic_trace(layer)(x),
    "make_fx": lambda layer, x: make_fx(layer)(x)(x),
    "vmap": lambda layer, x: torch.func.vmap(layer)(x),
    "jvp": lambda layer, x: torch.func.jvp(layer, (x,), (x,)),
    "grad": lambda layer, x: torch.func.grad(lambda t: layer(t).sum())(x),
    "a nested tensor": lambda layer, x: layer(torch.nested.nested_tensor([x[0], x[1, :2]])),
    "integers": lambda layer, x: layer((4 * x).long()),
    "another dtype": lambda layer, x: layer(x.bfloat16()),
    "one column": lambda layer, x: layer(x[..., :1]),
    "a fake tensor": lambda layer, x: _faked(layer, x),
    "an argument by name": lambda layer, x: layer(**{next(iter(inspect.signature(layer.forward).parameters)): x}),
}


def _faked(layer: Any, x: torch.Tensor) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return layer(torch.ones(x.shape))


def outcome(call: Call, layer: Any, x: torch.Tensor) -> Any:
    """The result, or the error's type and message."""
    try:
        found = call(layer, x)
    except Exception as error:  # noqa: BLE001 whatever it is, it is to be stock's
        return type(error), str(error)
    first = found if isinstance(found, torch.Tensor) else found[0]
    return first.to_padded_tensor(0.0) if first.is_nested else first


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("name", ["mlp", "post_attention_layernorm"])
@pytest.mark.parametrize("who", BYSTANDERS)
def test_what_is_not_a_plain_call_gives_stock_s_result_or_error(
    who: str, name: str, is_recorded: bool, both: tuple[Any, Any]
) -> None:
    stock, model = both
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    with torch.set_grad_enabled(is_recorded):
        expected, found = (
            outcome(BYSTANDERS[who], each.model.layers[BLOCK].get_submodule(name), x) for each in (stock, model)
        )
    if isinstance(expected, tuple):
        assert found == expected
    elif who == "a fake tensor":
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    else:
        assert found.dtype == expected.dtype
        assert close(found, expected)


@pytest.mark.parametrize("name", ["mlp", "post_attention_layernorm"])
def test_what_is_exported_or_traced_has_stock_s_weights_and_operators(name: str, both: tuple[Any, Any]) -> None:
    x, found = torch.randn(2, 32), []
    for model in both:
        layer = model.model.layers[BLOCK].get_submodule(name)
        program = torch.export.export(layer, (x,))
        assert not program.constants
        traced = torch.jit.trace(layer, (x,), check_trace=False)
        found.append(
            (
                sorted(program.state_dict),
                [str(node.target) for node in program.graph.nodes],
                sorted(traced.state_dict()),
                [node.kind() for node in traced.inlined_graph.nodes()],
            )
        )
    assert found[0] == found[1]


Hook = Callable[..., Any]
HOOKS = (
    every_module.register_module_forward_hook,
    every_module.register_module_forward_pre_hook,
    every_module.register_module_full_backward_hook,
    every_module.register_module_full_backward_pre_hook,
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("register", HOOKS, ids=lambda register: register.__name__)
def test_hooks_of_every_module_see_what_they_see_of_stock(register: Hook, both: tuple[Any, Any]) -> None:
    seen: list[list[str]] = []
    for model in both:
        paths = {id(module): path for path, module in model.named_modules()}
        seen.append([])
        handle = register(lambda module, *_, paths=paths: seen[-1].append(paths.get(id(module), "?")))
        try:
            model(tokens(), labels=tokens()).loss.backward()
        finally:
            handle.remove()
    assert sorted(seen[0]) == sorted(seen[1])
    assert f"model.layers.{BLOCK}.mlp.gate_proj" in seen[0]


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_every_module_is_in_the_mode_that_stock_s_is_in(family: str, way: str, kernel: Any, tmp_path: Path) -> None:
    stock = load(TREES[family], save_family(TREES[family], tmp_path), None)
    model = with_layers(family, tmp_path, way, kernel)
    for first, second in ((stock, model), (stock.train(), model.train())):
        assert [m.training for m in first.modules()] == [m.training for m in second.modules()]


@pytest.mark.parametrize("refused", [False, True])
def test_later_models_record_what_stock_records_after_loads_by_hand(refused: bool, folder: Path) -> None:
    with by_hand():
        load(LLAMA, folder, mapping("llama", "norm and fusion"))
        if refused:
            with pytest.raises(ValueError, match="Use CustomRMSNorm"):
                load(LLAMA, folder, {LLAMA.norm_class: ref("FP32RMSNorm")})
            clear_patch_mapping()
        for model in (LLAMA.build(), load(LLAMA, folder, None if refused else mapping("llama", "norm and fusion"))):
            assert len(model(tokens(), output_hidden_states=True).hidden_states) == 3
            found = [r for m in model.modules() for r in (getattr(m, "_can_record_outputs", None) or {}).values()]
            classes = [getattr(r, "target_class", r) for r in found]
            assert {c.__name__ for c in classes if isinstance(c, type)} == {"LlamaDecoderLayer", "LlamaAttention"}


@pytest.mark.parametrize("name", ["mlp", "post_attention_layernorm"])
@pytest.mark.parametrize("wrap", ["accelerate", "by hand"])
def test_undo_refuses_where_a_forward_was_wrapped_since(wrap: str, name: str, folder: Path) -> None:
    model = kp.apply_default_kernels(load(LLAMA, folder, None), "auto")
    layer, expected = model.model.layers[BLOCK].get_submodule(name), logits(model)
    if wrap == "accelerate":
        add_hook_to_module(layer, ModelHook())
    else:
        before = layer.forward
        layer.forward = lambda *args: before(*args)
    with pytest.raises(RuntimeError, match="its forward was replaced after the kernel was applied"):
        kp.undo(model)
    assert torch.equal(logits(model), expected)
    if wrap == "accelerate":
        remove_hook_from_module(layer)
    else:
        del layer.forward
    stock = load(LLAMA, folder, None)
    assert not ours(kp.undo(model))
    assert torch.equal(logits(model), logits(stock))


def test_a_quantised_load_has_stock_s_names_and_results(folder: Path, kernel: Any) -> None:
    options = {"quantization_config": tf.TorchAoConfig(Int8WeightOnlyConfig()), "dtype": torch.bfloat16}
    stock = load(LLAMA, folder, None, **options)
    with kernel.kernel_loading():
        model = load(LLAMA, folder, {LLAMA.mlp_class: ref("GatedMLP")}, **options)
    assert torch.equal(logits(model), logits(stock))
