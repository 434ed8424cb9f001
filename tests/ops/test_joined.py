"""The gradient of rows that lie one after the other is that of the parameters which they consist of."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from layout_kernels.ops.adjacent import joined, rows_of
from tests.ops.test_adjacent import WIDTH, equal, laid, made


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("sizes", [(3, 3), (5, 2)])
def test_gradients_through_joined_are_those_through_cat(needed, sizes):
    parts = laid(*sizes)
    for part, need in zip(parts, needed, strict=True):
        part.requires_grad_(need)
    x = torch.randn(6, WIDTH, requires_grad=True)
    leaves = [x, *(part for part in parts if part.requires_grad)]

    def gradients(x_, weight):
        result = functional.linear(x_, weight).sin()
        first = torch.autograd.grad(result.sum(), leaves, create_graph=True)
        return result, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    equal(gradients(*joined(x, rows_of(*parts), *parts)), gradients(x, torch.cat(parts)))


def test_gradients_of_several_backwards_are_added_and_do_not_share_elements():
    parts, twins = laid(3, 2), made(3, 2)
    for _ in range(2):
        joined(None, rows_of(*parts), *parts)[1].square().sum().backward()
        torch.cat(twins).square().sum().backward()
    for weights in (parts, twins):
        weights[0].grad.mul_(3)
    equal([part.grad for part in parts], [twin.grad for twin in twins])


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("wanted", ["all", "x"])
def test_a_part_that_changes_in_place_between_forward_and_backward_is_an_error(position, frozen, wanted):
    parts, x = laid(3, 3), torch.randn(2, WIDTH, requires_grad=True)
    for part in parts:
        part.requires_grad_(not frozen)
    through, rows = joined(x, rows_of(*parts), *parts)
    assert rows.requires_grad != frozen  # else the product makes a gradient that nobody asked for
    result = functional.linear(through, rows).square().sum()
    with torch.no_grad():
        parts[position].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward() if wanted == "all" else torch.autograd.grad(result, x)
