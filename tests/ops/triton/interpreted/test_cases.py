"""Every case of every operation, and those at which the Triton kernels change their path."""

from __future__ import annotations

import pytest

from layout_kernels.numerics.cases import Case
from layout_kernels.ops.rms_norm import FLAVOURS
from tests.ops.triton.interpreted.calls import (
    OPERATIONS,
    WITH_BACKWARD,
    backward_difference,
    forward_difference,
    suite,
)


def cases(operations):
    found = [(operation, case) for operation in operations for case in suite(operation).CASES]
    return [pytest.param(operation, case, id=f"{operation}-{case.case_id}") for operation, case in found]


@pytest.mark.parametrize(("operation", "case"), cases(OPERATIONS))
def test_the_forward_is_within_the_suite_s_bound(operation, case):
    assert forward_difference(operation, case) is None


@pytest.mark.parametrize(("operation", "case"), cases(WITH_BACKWARD))
def test_the_backward_is_within_the_suite_s_bound(operation, case):
    assert backward_difference(operation, case) is None


# Widths on both sides of each change of path, and rows that leave the last tile ragged.
NORM_PATHS = [
    *(Case((37, width), dtype) for width in (16, 24, 128, 130) for dtype in ("bfloat16", "float32")),
    *(
        Case((9, 64), "bfloat16", settings={"flavour": f, "weight_dtype": w})
        for f in FLAVOURS
        for w in (None, "float32")
    ),
    *(Case((3, width), "bfloat16") for width in (4097, 16384, 16385, 33000)),
    *(Case((3, width), "float32", settings={"flavour": "one_plus_scale"}) for width in (8193, 16384, 20000, 32769)),
    Case((3, 16390), "bfloat16", "strided"),
    Case((2, 3, 16390), "float32", "sliced", settings={"weight_dtype": None}),
    Case((2, 262144), "bfloat16"),
    Case((3, 5, 2, 7, 16), "float32", "transposed"),
    Case((3, 5, 2, 7, 16), "bfloat16", "heads"),
]


@pytest.mark.parametrize("case", NORM_PATHS, ids=lambda case: case.case_id)
def test_rms_norm_on_every_path(case):
    assert forward_difference("rms_norm", case) is None
    assert backward_difference("rms_norm", case) is None


GATED_PATHS = [
    Case((2, 8192), "bfloat16"),
    Case((2, 4096), "float32", settings={"order": "norm_then_gate"}),
    Case((5, 384), "bfloat16", settings={"group_size": 128, "order": "norm_then_gate", "gate_dtype": "float32"}),
    Case((33, 96), "float16", settings={"group_size": 8}),
    Case((3, 16400), "float16"),
]


@pytest.mark.parametrize("case", GATED_PATHS, ids=lambda case: case.case_id)
def test_gated_rms_norm_on_every_path_the_reference_s_included(case):
    assert forward_difference("gated_rms_norm", case) is None
    assert backward_difference("gated_rms_norm", case) is None


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9])
@pytest.mark.parametrize("settings", [{"size": 1536}, {"size": 37, "out": 11, "bias": True}])
@pytest.mark.parametrize("flavour", ["cast_then_scale", "none"])
def test_rms_norm_mlp_on_both_sides_of_few_rows(rows, settings, flavour):
    case = Case((rows, 144), "bfloat16", settings={**settings, "flavour": flavour})
    assert forward_difference("rms_norm_mlp", case) is None


def test_rms_norm_mlp_of_many_outputs_takes_wider_programs():
    assert forward_difference("rms_norm_mlp", Case((3, 32), "float16", settings={"size": 8200})) is None


def test_no_case_is_without_an_operation():
    assert {operation for operation, _ in (p.values for p in cases(OPERATIONS))} == set(OPERATIONS)
