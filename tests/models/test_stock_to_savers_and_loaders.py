"""Whoever reads or writes a model's weights by name finds the stock model: whole, in part, from stock and for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers as tf
from accelerate import load_checkpoint_and_dispatch, load_checkpoint_in_model
from safetensors.torch import load_file, load_model, save_file, save_model
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import KernelConfig

from tests.support.loads import load
from tests.support.observed import TREES, mapping, ours
from tests.support.pairs import TWO_WAYS, Way, adamw, apart, in_one_call, pair, same_logits, steps, weights
from tests.support.tiny import randomise, save_family

LLAMA = TREES["llama"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(LLAMA, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with other weights, in several files."""
    folder = tmp_path_factory.mktemp("other")
    randomise(LLAMA.build(), seed=7).save_pretrained(folder, max_shard_size="20KB")
    return folder


WAYS = [*TWO_WAYS, ("by hand", "norm and fusion"), ("inside", "MLP"), ("inside", "norm")]


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


@pytest.fixture(scope="module")
def both(way: Way, kernel: Any, folder: Path) -> tuple[Any, Any]:
    """The stock model and ours, for who changes neither."""
    return pair(folder, way, kernel)


def state(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


Reader = Callable[[Any, Path, Path], Any]


def _load_state_dict(model: Any, other: Path, tmp: Path) -> Any:
    return model.load_state_dict(state(other))


def _assign(model: Any, other: Path, tmp: Path) -> Any:
    return model.load_state_dict(state(other), assign=True)


def _distributed(model: Any, other: Path, tmp: Path) -> Any:
    options = StateDictOptions(full_state_dict=True, strict=False)
    return set_model_state_dict(model, state(other), options=options)


def _accelerate(model: Any, other: Path, tmp: Path) -> Any:
    return load_checkpoint_in_model(model, str(other), device_map={"": "cpu"})


def _dispatch(model: Any, other: Path, tmp: Path) -> Any:
    load_checkpoint_and_dispatch(model, str(other), device_map={"": "cpu"})


def _safetensors(model: Any, other: Path, tmp: Path) -> Any:
    save_file(state(other), tmp / "one.safetensors")
    return load_model(model, tmp / "one.safetensors")


def _checkpoint(model: Any, other: Path, tmp: Path) -> Any:
    place = tmp / f"dcp {type(model.model.norm).__mro__[1].__name__}"
    dcp.save(get_model_state_dict(load(LLAMA, other, None)), checkpoint_id=place, no_dist=True)
    found = get_model_state_dict(model)
    dcp.load(found, checkpoint_id=place, no_dist=True)
    return set_model_state_dict(model, found)


def _norms_only(model: Any, other: Path, tmp: Path) -> Any:
    return model.load_state_dict({n: v for n, v in state(other).items() if "norm" in n}, strict=False)


def _mlps_only(model: Any, other: Path, tmp: Path) -> Any:
    return model.load_state_dict({n: v for n, v in state(other).items() if "mlp" in n}, strict=False)


def _gates_only(model: Any, other: Path, tmp: Path) -> Any:
    return model.load_state_dict({n: v for n, v in state(other).items() if "gate_proj" in n}, strict=False)


def _ups_assigned(model: Any, other: Path, tmp: Path) -> Any:
    part = {n: v for n, v in state(other).items() if "up_proj" in n}
    return model.load_state_dict(part, strict=False, assign=True)


def _one_mlp(model: Any, other: Path, tmp: Path) -> Any:
    prefix = "model.layers.1.mlp."
    part = {n.removeprefix(prefix): v for n, v in state(other).items() if n.startswith(prefix)}
    return model.model.layers[1].mlp.load_state_dict(part)


WHOLE: list[Reader] = [_load_state_dict, _assign, _distributed, _accelerate, _dispatch, _safetensors, _checkpoint]
PARTS: list[Reader] = [_norms_only, _mlps_only, _gates_only, _ups_assigned, _one_mlp]
# Each reads what a load has merged and what a kernel was applied to; the other ways in end with the same modules.
READINGS = [(read, way) for read in (*WHOLE, *PARTS) for way in TWO_WAYS]
READINGS += [(read, way) for read in (_load_state_dict, _assign, _ups_assigned) for way in WAYS if way not in TWO_WAYS]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("read", "way"), READINGS, indirect=["way"])
def test_weights_under_stock_s_names_arrive(
    read: Reader, way: Way, kernel: Any, folder: Path, other: Path, tmp_path: Path
) -> None:
    stock, model = pair(folder, way, kernel)
    before = weights(stock)
    told = [read(each, other, tmp_path) for each in (stock, model)]
    assert str(told[1]) == str(told[0])  # what is missing and what was not expected, by name
    assert apart(weights(stock), before) > 0.1
    assert apart(weights(model), weights(stock)) == 0
    assert same_logits(model, stock)
    if ours(model) and not in_one_call(model, kernel):  # gate and up have got other memory, each its own
        assert read in (_assign, _ups_assigned, _accelerate, _dispatch)
        kernel.kernel_plugins.apply_kernel("cpu_fused_swiglu", model=model)
        assert same_logits(model, stock)
    assert in_one_call(model, kernel)


def test_a_wrong_state_dict_is_the_same_error(way: Way, kernel: Any, folder: Path) -> None:
    stock, model = pair(folder, way, kernel)  # which it changes in part
    wrong = state(folder) | {
        "model.layers.0.mlp.gate_up_proj.weight": torch.ones(3),
        "model.norm.scale": torch.ones(2),
    }
    wrong["model.layers.0.mlp.up_proj.weight"] = torch.ones(7, 32)
    del wrong["model.layers.1.mlp.gate_proj.weight"]
    messages = []
    for each in (stock, model):
        with pytest.raises(RuntimeError) as error:
            each.load_state_dict(wrong)
        messages.append(str(error.value))
    assert messages[1] == messages[0]


Writer = Callable[[Any, Path], None]


def _save_pretrained(model: Any, place: Path) -> None:
    model.save_pretrained(place)


def _in_shards(model: Any, place: Path) -> None:
    model.save_pretrained(place, max_shard_size="20KB")


def _accelerator(model: Any, place: Path) -> None:
    accelerate.Accelerator(cpu=True).save_model(model, place)


def _accelerator_in_shards(model: Any, place: Path) -> None:
    accelerate.Accelerator(cpu=True).save_model(model, place, max_shard_size="20KB")


def _save_model(model: Any, place: Path) -> None:
    save_model(model, str(place / "model.safetensors"))


def _save_file(model: Any, place: Path) -> None:
    save_file(model.state_dict(), place / "model.safetensors")


def _torch_save(model: Any, place: Path) -> None:
    torch.save(model.state_dict(), place / "model.pt")


WRITERS: list[Writer] = [_save_pretrained, _in_shards, _accelerator, _accelerator_in_shards]
WRITERS += [_save_model, _save_file, _torch_save]


@pytest.mark.parametrize("write", WRITERS)
def test_files_are_stock_s_byte_for_byte(write: Writer, both: tuple[Any, Any], tmp_path: Path) -> None:
    for kind, model in zip(("stock", "ours"), both, strict=True):
        (tmp_path / kind).mkdir()
        write(model, tmp_path / kind)
    files = sorted(file.name for file in (tmp_path / "stock").iterdir())
    assert files
    assert sorted(file.name for file in (tmp_path / "ours").iterdir()) == files
    for file in files:
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "stock" / file).read_bytes(), file


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("written_by", ["stock", "ours"])
def test_torch_s_checkpoints_of_model_and_optimizer_go_both_ways(
    written_by: str, way: Way, kernel: Any, folder: Path, tmp_path: Path
) -> None:
    stock, model = pair(folder, way, kernel)
    first, then = (stock, model) if written_by == "stock" else (model, stock)
    optimizers = {id(each): adamw(each) for each in (first, then)}
    steps(first, optimizers[id(first)])
    parts = {"model": get_model_state_dict(first), "optim": get_optimizer_state_dict(first, optimizers[id(first)])}
    dcp.save(parts, checkpoint_id=tmp_path, no_dist=True)
    # A fresh optimizer gets its state from zero gradients and a rate of zero: nothing moves.
    found = {"model": get_model_state_dict(then), "optim": get_optimizer_state_dict(then, optimizers[id(then)])}
    assert list(found["model"]) == list(parts["model"])
    assert list(found["optim"]["state"]) == list(parts["optim"]["state"])
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    set_model_state_dict(then, found["model"])
    set_optimizer_state_dict(then, optimizers[id(then)], found["optim"])
    assert apart(weights(then), weights(first)) == 0
    for each in (first, then):
        steps(each, optimizers[id(each)])
    # Three steps that start from equal states: float32 roundings, in units of the largest weight.
    assert apart(weights(then), weights(first)) <= 1e-5
    assert apart(weights(first), weights(load(LLAMA, folder, None))) > 1e-2


@pytest.mark.parametrize("kind", ["norm", "MLP", "norm and fusion"])
@pytest.mark.parametrize("auto", [tf.AutoModelForCausalLM, tf.AutoModelForSequenceClassification])
def test_what_a_load_says_is_missing_is_what_stock_says(
    auto: Any, kind: str, loading: Any, folder: Path, tmp_path: Path
) -> None:
    tensors = state(folder) | {"model.layers.7.mlp.up_proj.weight": torch.ones(2), "more.norm.weight": torch.ones(3)}
    del tensors["lm_head.weight"]
    load(LLAMA, folder, None).config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _, expected = auto.from_pretrained(tmp_path, output_loading_info=True)
    with loading():
        config = KernelConfig(mapping("llama", kind))
        found = auto.from_pretrained(tmp_path, output_loading_info=True, use_kernels=True, kernel_config=config)
    assert ours(found[0])
    assert found[1] == expected
    assert expected["missing_keys"]
    assert expected["unexpected_keys"]


@pytest.mark.parametrize("is_copy", [False, True])
def test_a_model_around_it_that_initialises_what_is_new_leaves_loaded_weights_alone(
    is_copy: bool, way: Way, kernel: Any, folder: Path
) -> None:
    """``post_init()``, which the constructor of a model that is built around loaded ones calls."""
    for each in pair(folder, way, kernel):
        before = weights(each)
        around = tf.LlamaPreTrainedModel(tf.LlamaConfig())
        around.part = copy.deepcopy(each) if is_copy else each
        around.new = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.zeros_(around.new.weight)
        torch.manual_seed(0)
        around.post_init()
        assert around.new.weight.abs().max() > 0
        assert [n for n, value in weights(around.part).items() if not torch.equal(value, before[n])] == []
