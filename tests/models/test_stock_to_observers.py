"""A row for each that looks at a model by name, class or shape: it finds, keeps and writes what it does on stock."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers as tf
from accelerate import FullyShardedDataParallelPlugin, load_checkpoint_in_model
from safetensors.torch import load_file, load_model, save_model
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from layout_kernels import kernel_plugins as kp
from tests.support.loads import load, ref
from tests.support.observed import TREES, close, logits, ours, with_layers
from tests.support.tiny import randomise, save_family, tokens

LLAMA = TREES["llama"]
BLOCK = 0  # the layer that is looked at


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(LLAMA, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    randomise(LLAMA.build(), seed=7).save_pretrained(folder)
    return folder


@pytest.fixture(params=["norm", "MLP", "norm and fusion", "by hand", "live"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def part(folder: Path, pattern: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in load_file(folder / "model.safetensors").items() if pattern in name}


# Each takes a model and the folder of another checkpoint, changes the model's weights by names, and returns it.
def _load_state_dict(model: Any, other: Path, tmp: Path) -> Any:
    model.load_state_dict(load(LLAMA, other, None).state_dict())


def _assign(model: Any, other: Path, tmp: Path) -> Any:
    model.load_state_dict(load(LLAMA, other, None).state_dict(), assign=True)


def _set_model_state_dict(model: Any, other: Path, tmp: Path) -> Any:
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, dict(load(LLAMA, other, None).state_dict()), options=options)


def _load_checkpoint_in_model(model: Any, other: Path, tmp: Path) -> Any:
    load_checkpoint_in_model(model, str(other), device_map={"": "cpu"})


def _load_model(model: Any, other: Path, tmp: Path) -> Any:
    load_model(model, other / "model.safetensors")


def _norms_only(model: Any, other: Path, tmp: Path) -> Any:
    model.load_state_dict(part(other, "norm"), strict=False)


def _mlps_only(model: Any, other: Path, tmp: Path) -> Any:
    model.load_state_dict(part(other, "mlp"), strict=False)


def _gates_only(model: Any, other: Path, tmp: Path) -> Any:
    model.load_state_dict(part(other, "gate_proj.weight"), strict=False)


def _data(model: Any, other: Path, tmp: Path) -> Any:
    for name, value in part(other, "mlp").items():
        model.get_parameter(name).data = value


def _vector(model: Any, other: Path, tmp: Path) -> Any:
    vector = torch.nn.utils.parameters_to_vector(load(LLAMA, other, None).parameters())
    torch.nn.utils.vector_to_parameters(vector, model.parameters())


def _checkpoint_of_torch(model: Any, other: Path, tmp: Path) -> Any:
    dcp.save(get_model_state_dict(load(LLAMA, other, None)), checkpoint_id=tmp / "dcp", no_dist=True)
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=tmp / "dcp", no_dist=True)
    set_model_state_dict(model, state)


LOADERS: list[Callable[..., Any]] = [
    _load_state_dict,
    _assign,
    _set_model_state_dict,
    _load_checkpoint_in_model,
    _load_model,
    _norms_only,
    _mlps_only,
    _gates_only,
    _data,
    _vector,
    _checkpoint_of_torch,
]


@pytest.mark.parametrize("loader", LOADERS)
def test_weights_that_are_given_by_name_arrive(
    loader: Callable[..., Any], way: str, kernel: Any, folder: Path, other: Path, tmp_path: Path
) -> None:
    stock, model = load(LLAMA, folder, None), with_layers("llama", folder, way, kernel)
    before = logits(stock)
    for each in (stock, model):
        loader(each, other, tmp_path)
    assert not close(logits(stock), before)
    assert close(logits(model), logits(stock))
    model.eval()  # which lays the rows side by side again
    assert close(logits(model), logits(stock))
    # In one call again; also said of layers that another copy of the package put in.
    assert not any("called as modules" in row.fallback for row in kernel.report(model).rows)


def test_decay_freezing_and_selection_by_name(way: str, kernel: Any, folder: Path) -> None:
    stock, model = load(LLAMA, folder, None), with_layers("llama", folder, way, kernel)
    trainer = tf.Trainer.__new__(tf.Trainer)
    counts = []
    for each in (stock, model):
        decayed = set(trainer.get_decay_parameter_names(each))
        frozen = [p.requires_grad_(False) for n, p in each.named_parameters() if "mlp" in n]
        trained = sum(p.numel() for p in each.parameters() if p.requires_grad)
        counts.append((sum(p.numel() for n, p in each.named_parameters() if n in decayed), len(frozen), trained))
    assert counts[0] == counts[1]
    assert counts[0][1] == 12
    for each in (stock, model):
        each(tokens(), labels=tokens()).loss.backward()
    grads = [{n: p.grad for n, p in each.named_parameters()} for each in (stock, model)]
    assert all((grads[0][n] is None) == (grads[1][n] is None) for n in grads[0])


@pytest.mark.parametrize("version", [1, 2])
def test_wrapping_by_the_parents_class(version: int, way: str, kernel: Any, folder: Path) -> None:
    model = with_layers("llama", folder, way, kernel)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, auto_wrap_policy="transformer_based_wrap")
    plugin.set_auto_wrap_policy(model)
    assert plugin.auto_wrap_policy.keywords["transformer_layer_cls"] == {type(model.model.layers[BLOCK])}
    assert type(model.model.layers[BLOCK]).__name__ == "LlamaDecoderLayer"


def _accelerator(model: Any, file: Path) -> None:
    accelerate.Accelerator(cpu=True).save_model(model, file.parent)


def _save_model(model: Any, file: Path) -> None:
    save_model(model, str(file))


def _torch_save(model: Any, file: Path) -> None:
    torch.save(model.state_dict(), file)


@pytest.mark.parametrize("save", [_accelerator, _save_model, _torch_save])
def test_files_that_others_write_are_stock_s(
    save: Callable[..., None], way: str, kernel: Any, folder: Path, tmp_path: Path
) -> None:
    models = {"stock": load(LLAMA, folder, None), "ours": with_layers("llama", folder, way, kernel)}
    found = {}
    for kind, model in models.items():
        file = tmp_path / kind / ("model.pt" if save is _torch_save else "model.safetensors")
        file.parent.mkdir()
        save(model, file)
        found[kind] = torch.load(file) if save is _torch_save else load_file(file)
    assert list(found["ours"]) == list(found["stock"])
    assert all(torch.equal(found["ours"][name], value) for name, value in found["stock"].items())


@pytest.mark.parametrize("resumed", ["stock", "ours"])
def test_an_optimizer_s_state_goes_both_ways(resumed: str, way: str, kernel: Any, folder: Path) -> None:
    stock, model = load(LLAMA, folder, None).train(), with_layers("llama", folder, way, kernel).train()
    first, then = (stock, model) if resumed == "ours" else (model, stock)
    steady = copy.deepcopy(load(LLAMA, folder, None)).train()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, weight_decay=0.1) for each in (first, then, steady)]

    def step(each: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        each(tokens(), labels=tokens()).loss.backward()
        optimizer.step()

    for _ in range(2):
        step(first, optimizers[0])
        step(steady, optimizers[2])
    then.load_state_dict(first.state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    step(then, optimizers[1])
    step(steady, optimizers[2])
    for (name, found), expected in zip(then.named_parameters(), steady.parameters(), strict=True):
        # Adam divides by the size of the gradient, so a float32 rounding of it may move a weight by a part of lr.
        assert (found - expected).abs().max() <= 1e-4, name


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


def test_modules_that_are_called_alone_give_stock_s_result(way: str, kernel: Any, folder: Path) -> None:
    stock, model = load(LLAMA, folder, None), with_layers("llama", folder, way, kernel)
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name in ("mlp", "post_attention_layernorm", "input_layernorm"):
            found, expected = (each.model.layers[BLOCK].get_submodule(name)(x) for each in (model, stock))
            assert close(found, expected), name


def test_the_guide_s_names_give_the_tensors(way: str, kernel: Any, folder: Path) -> None:
    layer = with_layers("llama", folder, way, kernel).model.layers[BLOCK]
    if way != "MLP":
        assert layer.input_layernorm.scale is layer.input_layernorm.weight
    if way != "norm":
        for kind in ("weight", "bias"):
            whole = torch.cat([getattr(layer.mlp.gate_proj, kind), getattr(layer.mlp.up_proj, kind)])
            assert torch.equal(getattr(layer.mlp.gate_up_proj, kind), whole)


def test_an_exported_program_has_stock_s_weights(folder: Path, kernel: Any) -> None:
    mlp = with_layers("llama", folder, "MLP", kernel).model.layers[BLOCK].mlp
    x = torch.randn(2, 32)
    program = torch.export.export(mlp, (x,))
    assert set(program.state_dict) == set(mlp.state_dict())
    assert not program.constants
    assert close(program.module()(x), mlp(x))


def test_a_quantised_load_has_stock_s_names_and_results(folder: Path, kernel: Any) -> None:
    options = {"quantization_config": tf.TorchAoConfig(Int8WeightOnlyConfig()), "dtype": torch.bfloat16}
    stock = load(LLAMA, folder, None, **options)
    with kernel.kernel_loading():
        model = load(LLAMA, folder, {LLAMA.mlp_class: ref("GatedMLP")}, **options)
    assert torch.equal(logits(model), logits(stock))
