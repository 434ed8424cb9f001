from __future__ import annotations

import gc
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from layout_kernels import _ops
from layout_kernels.dispatch.custom_ops import library, register_custom_op

_numbers = itertools.count()


@pytest.fixture
def name():
    # Operators cannot be taken back, so each test has one of its own.
    return f"test_operator_{next(_numbers)}"


def double(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


def halve(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x / factor


def like(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


def add_one(x: torch.Tensor) -> None:
    x.add_(1)


def maybe(x: torch.Tensor, size: int | None, weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, x + 2


def test_an_operator_is_defined_in_this_copys_namespace_and_outlives_collection(name):
    operator = register_custom_op(name, double, mutates_args=(), dispatch_key="CPU", fake_impl=like)
    gc.collect()
    assert operator.name() == _ops.add_op_namespace_prefix(name)
    assert str(operator._schema).endswith("(Tensor x, float factor) -> Tensor")
    x = torch.randn(3)
    torch.testing.assert_close(operator(x, 2.0), 2 * x)
    torch.testing.assert_close(getattr(_ops.ops, name)(x, 3.0), 3 * x)
    with FakeTensorMode():
        assert operator(torch.empty(5, 2), 1.0).shape == (5, 2)


def test_the_same_registration_again_changes_nothing(name):
    arguments = {"mutates_args": (), "dispatch_key": "CPU", "fake_impl": like}
    first = register_custom_op(name, double, **arguments)
    assert register_custom_op(name, double, **arguments) is first
    assert register_custom_op(name, fake_impl=like) is first


def test_another_function_under_the_same_name_is_refused(name):
    register_custom_op(name, double, mutates_args=(), dispatch_key="CPU", fake_impl=like)
    with pytest.raises(ValueError, match="already has a kernel for CPU"):
        register_custom_op(name, halve, mutates_args=(), dispatch_key="CPU")
    with pytest.raises(ValueError, match="already has a fake implementation"):
        register_custom_op(name, fake_impl=halve)
    with pytest.raises(ValueError, match="has the schema"):
        register_custom_op(name, maybe, mutates_args=(), dispatch_key="CUDA")
    torch.testing.assert_close(getattr(_ops.ops, name)(torch.ones(2), 2.0), torch.full((2,), 2.0))


def test_a_second_dispatch_key_shares_the_schema(name):
    register_custom_op(name, double, mutates_args=(), dispatch_key="CPU")
    operator = register_custom_op(name, halve, mutates_args=(), dispatch_key="Meta")
    torch.testing.assert_close(operator(torch.ones(2), 2.0), torch.full((2,), 2.0))
    assert operator(torch.ones(2, device="meta"), 2.0).device.type == "meta"


def test_mutation_and_optional_arguments_stand_in_the_schema(name):
    operator = register_custom_op(name, add_one, mutates_args=("x",), dispatch_key="CPU")
    x = torch.zeros(2)
    operator(x)
    assert x.tolist() == [1, 1]
    assert operator._schema.arguments[0].alias_info.is_write
    other = register_custom_op(f"{name}_maybe", maybe, mutates_args=(), dispatch_key="CPU")
    assert "(Tensor x, SymInt? size, Tensor? weight) -> (Tensor, Tensor)" in str(other._schema)


def test_a_fake_is_added_to_a_schema_that_an_extension_defined(name):
    # What TORCH_LIBRARY in a native extension does.
    native = torch.library.Library(_ops.NAMESPACE, "FRAGMENT")
    native.define(f"{name}(Tensor x, float factor) -> Tensor")
    native.impl(name, double, "CPU")
    operator = register_custom_op(name, fake_impl=like)
    with FakeTensorMode():
        assert operator(torch.empty(4), 1.0).shape == (4,)
    torch.testing.assert_close(operator(torch.ones(2), 2.0), torch.full((2,), 2.0))


def test_a_schema_that_is_not_there_is_an_error(name):
    with pytest.raises(RuntimeError, match="has no schema; load the extension that defines it"):
        register_custom_op(name, fake_impl=like)


@pytest.mark.parametrize(
    "given", [{"fn": double}, {"fn": double, "mutates_args": ()}, {"dispatch_key": "CPU"}, {"mutates_args": ()}]
)
def test_half_a_registration_is_refused(name, given):
    with pytest.raises(TypeError, match="give fn, mutates_args and dispatch_key"):
        register_custom_op(name, **given)


def test_errors_of_torch_propagate(name):
    def unannotated(x):
        return x

    with pytest.raises(ValueError, match="type annotation"):
        register_custom_op(name, unannotated, mutates_args=(), dispatch_key="CPU")
    with pytest.raises(Exception, match="NoSuchKey"):
        register_custom_op(name, double, mutates_args=(), dispatch_key="NoSuchKey")
    assert library() is library()
