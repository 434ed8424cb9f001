from __future__ import annotations

import math
from importlib import import_module

import pytest
import torch

from layout_kernels.numerics import gated_activation, gated_rms_norm, rms_norm, rms_norm_mlp
from layout_kernels.numerics.cases import LAYOUTS, Case, lay_out
from layout_kernels.numerics.tolerance import explain, ulp

SUITES = (rms_norm, gated_activation, rms_norm_mlp, gated_rms_norm)


def _reference(suite, arguments, suffix=""):
    operation = suite.__name__.rpartition(".")[2]
    module = import_module(f"layout_kernels.ops.{operation}.reference")
    return getattr(module, operation + suffix)(*arguments)


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_result_that_is_off_in_one_element_is_refused(suite, dtype):
    # A percent of the largest, or eight steps of bfloat16. The bound of a product follows from the sizes of its terms,
    # which in half precision are not far from the result's own.
    factor = {"float32": 0.01, "float16": 0.01, "bfloat16": 0.064}[dtype]
    if suite is rms_norm_mlp and dtype != "float32":
        factor *= 50
    arguments = suite.arguments(Case((4, 64), dtype))
    result = _reference(suite, arguments)
    assert suite.compare(result, arguments) is None
    wrong = result.clone()
    at = (result.abs() == result.abs().max()).nonzero()[0].tolist()
    wrong[tuple(at)] *= 1 + factor
    assert str(at) in suite.compare(wrong, arguments)


@pytest.mark.parametrize("suite", SUITES)
def test_shape_dtype_strides_and_missing_infinities_are_refused(suite):
    arguments = suite.arguments(Case((4, 64), "float32", values="nonfinite"))
    result = _reference(suite, arguments)
    assert suite.compare(result, arguments) is None
    assert "the reference gives torch.float32" in suite.compare(result.double(), arguments)
    assert "the reference gives torch.float32 (4, " in suite.compare(result[:3], arguments)
    assert "must be contiguous" in suite.compare(result.t().contiguous().t(), arguments)
    assert "the reference gives nan" in suite.compare(torch.where(result.isnan(), 0.0, result), arguments)
    poisoned = result.clone()
    poisoned[1, 3] = math.nan
    assert "result[1, 3] is nan" in suite.compare(poisoned, arguments)


@pytest.mark.parametrize("suite", [rms_norm, gated_rms_norm])
def test_a_gradient_that_is_a_percent_off_is_refused(suite):
    arguments = suite.backward_arguments(Case((4, 64), "float32"))
    grads = _reference(suite, arguments, "_backward")
    assert suite.compare_backward(grads, arguments) is None
    for index, grad in enumerate(grads):
        wrong = list(grads)
        wrong[index] = grad * 1.01
        assert suite.compare_backward(tuple(wrong), arguments) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ulp_is_the_distance_to_the_next_number(dtype):
    values = torch.tensor([1.0, 1.5, 3.0, 1024.0, 0.1, 1e-3], dtype=dtype)
    integers = values.view(torch.int32 if dtype is torch.float32 else torch.int16)
    following = (integers + 1).view(dtype)
    torch.testing.assert_close(ulp(values.double(), dtype), following.double() - values.double(), rtol=0, atol=0)


def test_the_bound_is_beyond_the_error_of_the_reference():
    exact, reference = torch.tensor([1.0], dtype=torch.float64), torch.tensor([1.25])
    bound = torch.tensor([0.5], dtype=torch.float64)
    assert explain("y", torch.tensor([1.75]), reference, exact, bound) is None
    assert explain("y", torch.tensor([0.25]), reference, exact, bound) is None
    assert explain("y", torch.tensor([1.8]), reference, exact, bound) is not None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_keep_the_values_and_poison_the_gaps(layout):
    tensor = torch.arange(24.0).view(2, 3, 4)
    laid = lay_out(tensor, layout)
    torch.testing.assert_close(laid, tensor[:1].expand(2, 3, 4) if layout == "expanded" else tensor)
    if layout in ("sliced", "strided", "offset"):
        assert torch.tensor([]).set_(laid.untyped_storage()).isnan().any()
    assert laid.is_contiguous() == (layout in ("contiguous", "offset"))
    if layout == "offset":
        assert laid.storage_offset() == 1


def test_a_layout_that_needs_more_dimensions_is_refused():
    with pytest.raises(ValueError, match="'heads' needs 3 dimensions, not 2"):
        lay_out(torch.zeros(2, 3), "heads")
    with pytest.raises(ValueError, match="layout must be one of"):
        lay_out(torch.zeros(2, 3), "sideways")


def test_a_bound_that_is_not_a_number_bounds_nothing():
    ones = torch.ones(2)
    bound = torch.tensor([0.0, float("nan")], dtype=torch.float64)
    assert "result[1]" in explain("result", ones, ones, ones.double(), bound)
