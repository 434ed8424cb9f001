"""Parameters laid one after the other stay what they were, and are found as one matrix for as long as they lie so."""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch
from torch import nn
from torch.nn import Parameter, functional

from layout_kernels.ops import adjacent
from layout_kernels.ops.adjacent import divide, gathered, joined, lay, rows_of, why_not_lay

WIDTH = 4


def made(*sizes, dtype=torch.float32, seed=0, **options):
    """Parameters [size, WIDTH] of these sizes."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn((size, WIDTH), generator=generator).to(dtype) for size in sizes]
    return [Parameter(value, **options) for value in values]


def laid(*sizes, **options):
    parts = made(*sizes, **options)
    assert lay(*parts)
    return parts


def equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.fixture(autouse=True)
def _no_record_is_left_behind():
    before = set(adjacent._blocks)
    yield
    if set(adjacent._blocks) - before:
        gc.collect()  # a cycle may hold a parameter for a while
    assert not set(adjacent._blocks) - before


@pytest.mark.parametrize("sizes", [(3, 3), (5, 2), (1, 1, 1), (3, 5, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_parameters_stay_the_same_objects_with_the_same_values_in_storages_of_their_own(sizes, dtype):
    parts = made(*sizes, dtype=dtype)
    before = [(id(part), part.detach().clone(), part.requires_grad) for part in parts]
    parts[0].grad = torch.ones_like(parts[0])
    assert rows_of(*parts) is None
    assert lay(*parts)
    rows = rows_of(*parts)
    equal(rows, torch.cat([values for _, values, _ in before]))
    assert not rows.requires_grad
    offset = rows.data_ptr()
    for part, (number, values, requires_grad) in zip(parts, before, strict=True):
        assert (id(part), part.requires_grad, type(part)) == (number, requires_grad, Parameter)
        equal(part.detach(), values)
        assert part.is_leaf
        assert (part.data_ptr(), part.storage_offset()) == (offset, 0)
        assert part.untyped_storage().nbytes() == part.nbytes
        offset += part.nbytes
    equal(parts[0].grad, torch.ones(sizes[0], WIDTH, dtype=dtype))


def test_laying_what_lies_so_already_moves_nothing():
    parts = laid(3, 3)
    rows = rows_of(*parts)
    assert lay(*parts)
    assert rows_of(*parts) is rows


def test_other_parameters_and_another_order_or_number_are_not_found():
    first, second, third = laid(3, 3, 3)
    assert rows_of(first, second, third) is not None
    assert rows_of(first, second) is None
    assert rows_of(second, third) is None
    assert rows_of(second, first, third) is None
    assert rows_of(first, second, made(3)[0]) is None


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.gate(x).sigmoid() * self.up(x)

    def lay(self):
        assert lay(self.gate.weight, self.up.weight)
        assert lay(self.gate.bias, self.up.bias)
        return self


def test_safetensors_and_torch_save_what_they_saved_before(tmp_path):
    from safetensors.torch import load_file, load_model, save_model

    pair = Pair()
    before = {name: value.clone() for name, value in pair.state_dict().items()}
    pair.lay()
    save_model(pair, tmp_path / "pair.safetensors")
    equal(load_file(tmp_path / "pair.safetensors"), before)
    file = io.BytesIO()
    torch.save(pair.gate.weight, file)
    file.seek(0)
    assert torch.load(file).untyped_storage().nbytes() == pair.gate.weight.nbytes
    other = Pair().lay()
    load_model(other, tmp_path / "pair.safetensors")
    equal(rows_of(other.gate.weight, other.up.weight), torch.cat([before["gate.weight"], before["up.weight"]]))


def test_updates_in_place_are_seen():
    first, second = laid(3, 3)
    with torch.no_grad():
        first.mul_(2)
        second.copy_(torch.ones(3, WIDTH))
        second[1, 2] = 7
    equal(rows_of(first, second), torch.cat([first.detach(), second.detach()]))
    pair, other = Pair().lay(), Pair()
    pair.load_state_dict(other.state_dict())
    equal(rows_of(pair.gate.weight, pair.up.weight), torch.cat([other.gate.weight, other.up.weight]).detach())


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_steps_of_an_optimizer_are_those_without_it_and_are_seen(options):
    torch.manual_seed(0)
    pair, stock, x = Pair(), Pair(), torch.randn(5, WIDTH)
    stock.load_state_dict(pair.state_dict())
    pair.lay()
    for module in (pair, stock):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
    equal(pair.state_dict(), stock.state_dict())
    for kind in ("weight", "bias"):
        ours, theirs = ([getattr(part, kind) for part in (module.gate, module.up)] for module in (pair, stock))
        equal(rows_of(*ours), torch.cat(theirs).detach())


LEAVING = {
    "other memory": lambda part: torch.randn(3, WIDTH),
    "another shape": lambda part: part.view(WIDTH, 3),
    "fewer rows": lambda part: part[:2],
    "another dtype": lambda part: part.view(torch.int32),
    "transposed strides": lambda part: part.as_strided(part.shape, (1, 3)),
    "a converted copy": lambda part: part.to(torch.bfloat16),
}


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("way", LEAVING)
def test_a_parameter_whose_data_was_exchanged_is_not_found(position, way):
    parts = laid(3, 3)
    parts[position].requires_grad_(False)  # an integer dtype cannot require a gradient
    parts[position].data = LEAVING[way](parts[position].data)
    assert rows_of(*parts) is None


def test_a_module_that_was_converted_or_copied_or_loaded_by_assignment_is_not_found():
    pair = Pair().lay()
    copied = copy.deepcopy(pair)
    assert rows_of(copied.gate.weight, copied.up.weight) is None
    assert rows_of(pair.gate.weight, pair.up.weight) is not None
    pair.to(torch.bfloat16)
    assert rows_of(pair.gate.weight, pair.up.weight) is None
    pair.lay().load_state_dict(Pair().state_dict(), assign=True)
    assert rows_of(pair.gate.weight, pair.up.weight) is None


def test_gathered_is_the_memory_of_the_parts_or_a_copy():
    parts = made(3, 2)
    equal(gathered(parts), torch.cat(parts))
    lay(*parts)
    assert gathered(parts) is rows_of(*parts)


def test_parameters_that_are_laid_in_inference_mode_can_be_trained():
    parts = made(3, 3)
    with torch.inference_mode():
        assert lay(*parts)
    assert not rows_of(*parts).is_inference()
    functional.linear(torch.randn(2, WIDTH), joined(None, rows_of(*parts), *parts)[1]).sum().backward()
    torch.optim.SGD(parts, lr=0.1).step()
    equal(rows_of(*parts), torch.cat(parts).detach())


class Wrapped(Parameter):
    pass


def on_meta():
    return Parameter(torch.empty(3, WIDTH, device="meta"))


REFUSED = {
    "shared memory": (lambda: (*made(3), Parameter(torch.randn(3, WIDTH).share_memory_())), "with other processes"),
    "a subclass": (lambda: (*made(3), Wrapped(torch.randn(3, WIDTH))), "Wrapped"),
    "one without memory": (lambda: (*made(3), on_meta()), "not in memory"),
    "none with memory": (lambda: (on_meta(), on_meta()), "not in memory"),
    "made in inference mode": (torch.inference_mode()(lambda: made(3, 3)), "inference mode"),
    "two dtypes": (lambda: (*made(3), *made(3, dtype=torch.float16)), "differ in dtype, device or width"),
    "two widths": (lambda: (*made(3), Parameter(torch.randn(3, 5))), "differ in dtype, device or width"),
    "empty": (lambda: made(3, 0), "a weight is empty"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_memory_that_must_stay_is_left_alone_and_the_reason_is_named(kind):
    make, reason = REFUSED[kind]
    parts = make()
    places = [part.data_ptr() for part in parts]
    assert reason in why_not_lay(*parts)
    assert not lay(*parts)
    assert [part.data_ptr() for part in parts] == places
    assert rows_of(*parts) is None


def test_records_vanish_with_the_first_parameter_and_the_others_keep_their_values():
    first, second = laid(3, 3)
    before, place = second.detach().clone(), first.data_ptr()
    assert place in adjacent._blocks
    del first
    gc.collect()
    assert place not in adjacent._blocks
    equal(second.detach(), before)
    assert lay(*made(3, seed=1), second)
    equal(second.detach(), before)


def test_laying_anew_drops_the_earlier_block():
    first, second = laid(3, 3)
    earlier = first.data_ptr()
    second.data = torch.randn(3, WIDTH)
    assert lay(first, second)
    assert earlier not in adjacent._blocks
    (third,) = made(2)
    assert lay(first, third)
    assert rows_of(first, second) is None
    equal(rows_of(first, third), torch.cat([first, third]).detach())


def test_a_block_is_held_as_long_as_the_memory_of_its_first_part():
    parts, others = laid(3, 3), laid(3, 3)
    gc.collect()  # nobody but torch holds the storages' Python objects
    assert rows_of(*parts) is not None
    place = parts[0].data_ptr()
    parts[0].data = torch.randn(3, WIDTH)  # as whoever shards, offloads or exchanges parameters does
    assert place not in adjacent._blocks
    assert rows_of(*others) is not None
    for part in others:
        part.data.share_memory_()
    assert not lay(*others)
    assert not set(adjacent._blocks) & {part.data_ptr() for part in others}


def test_parameters_of_a_block_can_be_swapped():
    first, second = laid(3, 3)
    other = Parameter(torch.randn(3, WIDTH))
    expected, place = other.detach().clone(), first.data_ptr()
    torch.utils.swap_tensors(first, other)  # refused for tensors that somebody refers to weakly
    equal(first.detach(), expected)
    assert rows_of(first, second) is None
    assert other.data_ptr() == place
    assert rows_of(other, second) is not None


def test_the_rows_of_one_matrix_are_divided_without_a_copy():
    rows, (first, second) = torch.randn(5, WIDTH), made(3, 2)
    divide(rows, first, second)
    assert rows_of(first, second) is rows
    equal(torch.cat([first, second]).detach(), rows)
