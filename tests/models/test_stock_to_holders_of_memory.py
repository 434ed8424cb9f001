"""Memory that somebody else holds stays where it is; what changes it there changes the model, as with stock."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from layout_kernels import kernel_plugins as kp
from layout_kernels.ops.adjacent import rows_of
from tests.support.loads import load
from tests.support.observed import TREES
from tests.support.pairs import TWO_WAYS, Way, apart, in_one_call, pair, same_gradients, same_logits, weights
from tests.support.tiny import save_family, tokens

LLAMA = TREES["llama"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(LLAMA, tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=TWO_WAYS, ids="-".join)
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


def _flat_buffer(model: Any) -> Any:
    flat, at = torch.cat([p.detach().flatten() for p in model.parameters()]), 0
    for p in model.parameters():
        p.data = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    return [flat]


def _each_in_a_buffer_of_its_size(model: Any) -> Any:
    flats = [p.detach().flatten().clone() for p in model.parameters()]
    for p, flat in zip(model.parameters(), flats, strict=True):
        p.data = flat.view_as(p)
    return flats


def _vector(model: Any) -> Any:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector, model.parameters())
    return [vector]


def _another_model(model: Any) -> Any:
    other = copy.deepcopy(model)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        p.data = q.data
    return list(other.parameters())


def _assigned(model: Any) -> Any:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return list(state.values())


def _state_dict(model: Any) -> Any:
    return list(model.state_dict().values())


def _arrays(model: Any) -> Any:
    return [p.detach().numpy() for p in model.parameters()]


def _storages(model: Any) -> Any:
    return [torch.tensor([]).set_(p.untyped_storage()) for p in model.parameters()]


class Wrapped(nn.Parameter):
    pass


def _subclasses(model: Any) -> Any:
    return [Wrapped(p.detach()) for p in model.parameters()]


HOLDERS = [
    _storages,
    _subclasses,
    _flat_buffer,
    _each_in_a_buffer_of_its_size,
    _vector,
    _another_model,
    _assigned,
    _state_dict,
    _arrays,
]
# What gives no parameter other memory.
CALLS: dict[str, Callable[[Any], Any]] = {
    "train": lambda model: model.train(),
    "eval": lambda model: model.eval(),
    "to": lambda model: model.to("cpu"),
    "float": lambda model: model.float(),
    "requires_grad_": lambda model: model.requires_grad_(True),
    "__setstate__": lambda model: model.model.layers[0].mlp.__setstate__(vars(model.model.layers[0].mlp)),
    "copy": copy.copy,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_others_hold_stays_shared(holder: Any, way: Way, kernel: Any, folder: Path) -> None:
    both = pair(folder, way, kernel)
    held = [holder(each) for each in both]
    for name, call in CALLS.items():
        before = weights(both[1])
        for each, values in zip(both, held, strict=True):
            call(each)
            with torch.no_grad():
                for value in values:
                    value *= 0.9
        assert apart(weights(both[1]), weights(both[0])) == 0, name
        assert apart(before, weights(both[1])) > 0.05, name
        assert same_logits(both[1], both[0]), name


@pytest.mark.parametrize("holder", HOLDERS)
def test_kernels_leave_shared_memory_alone_and_say_so(holder: Any, folder: Path) -> None:
    stock, model = load(LLAMA, folder, None), load(LLAMA, folder, None)
    held = [holder(each) for each in (stock, model)]
    with pytest.warns(UserWarning, match=r"layers\.0\.mlp: something else lies in the same memory"):
        kp.apply_default_kernels(model, "auto")
    for values in held:
        with torch.no_grad():
            for value in values:
                value *= 0.5
    assert apart(weights(model), weights(stock)) == 0
    assert same_logits(model, stock)
    del held, values, value
    if holder is not _flat_buffer and holder is not _vector:  # whose parts are still views of one buffer
        kp.apply_kernel("cpu_fused_swiglu", model=model)
        assert in_one_call(model, kp_report())
        assert same_logits(model, stock)


@pytest.mark.parametrize("kind", ["untyped", "typed", "frozen"])
@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_a_storage_or_what_the_collector_does_not_see_is_a_holder_too(kind: str, folder: Path) -> None:
    model = load(LLAMA, folder, None)
    weight = model.model.layers[0].mlp.gate_proj.weight
    held = weight.detach() if kind == "frozen" else weight.untyped_storage() if kind == "untyped" else weight.storage()
    if kind == "frozen":
        gc.freeze()
    try:
        with pytest.warns(UserWarning, match=r"layers\.0\.mlp: something else lies in the same memory"):
            kp.apply_default_kernels(model, "auto")
    finally:
        gc.unfreeze()
    assert held.data_ptr() == weight.data_ptr()


def kp_report() -> Any:
    import layout_kernels

    return layout_kernels


def test_a_graph_that_is_alive_holds_nothing_back(folder: Path) -> None:
    """Its tensors are autograd's own; what it has saved stays as it was."""
    stock, model = load(LLAMA, folder, None), load(LLAMA, folder, None)
    losses = [each(tokens(), labels=tokens()).loss for each in (stock, model)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kp.apply_default_kernels(model, "auto")
    assert in_one_call(model, kp_report())
    for loss in losses:
        loss.backward()
    for (name, p), q in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize("change", ["to(bfloat16)", "deepcopy", "to_empty"])
def test_new_memory_is_laid_out_at_once(change: str, way: Way, kernel: Any, folder: Path) -> None:
    stock, model = pair(folder, way, kernel)
    state = copy.deepcopy(stock.state_dict())
    if change == "to(bfloat16)":
        stock, model = (each.to(torch.bfloat16) for each in (stock, model))
    elif change == "deepcopy":
        model = copy.deepcopy(model)
    else:
        for layer in model.model.layers:
            layer.mlp.to_empty(device="cpu")
        model.load_state_dict(state)
    assert in_one_call(model, kernel)
    assert same_logits(model, stock, 2e-2 if change == "to(bfloat16)" else 1e-5)  # some roundings of bfloat16


@pytest.mark.parametrize("through", ["pickle", "torch.save"])
def test_a_model_that_comes_from_a_file_is_stock_s_and_can_be_laid_out(through: str, folder: Path) -> None:
    model = kp.apply_default_kernels(load(LLAMA, folder, None), "auto")
    if through == "pickle":
        again = pickle.loads(pickle.dumps(model.model.layers[0].mlp))
    else:
        file = io.BytesIO()
        torch.save(model.model.layers[0].mlp, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    x = torch.randn(2, 3, 32)
    assert torch.allclose(again(x), model.model.layers[0].mlp(x), atol=1e-6)
    assert type(again) is type(model.model.layers[0].mlp)
    kp.apply_kernel("cpu_fused_swiglu", model=nn.ModuleDict({"mlp": again}))
    assert rows_of(again.gate_proj.weight, again.up_proj.weight) is not None


def test_each_gradient_has_memory_of_its_own(way: Way, kernel: Any, folder: Path) -> None:
    stock, model = pair(folder, way, kernel)
    assert same_gradients(model, stock)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    places = [p.grad.untyped_storage() for p in model.parameters()]
    assert len({place.data_ptr() for place in places}) == len(places)
    assert all(place.nbytes() == p.grad.nbytes for place, p in zip(places, model.parameters(), strict=True))
    mlp = model.model.layers[0].mlp
    expected = mlp.up_proj.weight.grad.clone()
    mlp.gate_proj.weight.grad.untyped_storage().resize_(0)  # as whoever offloads gradients does
    assert torch.equal(mlp.up_proj.weight.grad, expected)


def test_a_load_in_inference_mode_can_be_trained(way: Way, kernel: Any, folder: Path) -> None:
    with torch.inference_mode():
        stock, model = pair(folder, way, kernel)
    assert not any(p.is_inference() for p in model.parameters())
    assert same_gradients(model, stock)
