"""The quick look at an operation's arguments agrees with its check: both take the same."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from layout_kernels.ops.linear import operator as linear
from layout_kernels.ops.rms_norm import operator as rms_norm
from layout_kernels.ops.rms_norm_mlp import operator as rms_norm_mlp

TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32)


def of(*shapes, dtypes=TYPES, devices=("cpu", "meta")):
    """Tensors of every combination."""
    return [torch.ones(s, dtype=t, device=d) for s, t, d in itertools.product(shapes, dtypes, devices)]


INPUTS = of((2, 8), (8,), (2, 0), (), (2, 1))
VECTORS = [None, *of((8,), (7,), (1,), (), (1, 8)), torch.ones(16)[::2]]
NUMBERS = (1e-6, 0.0, -1.0, math.nan, math.inf)
FLAVOURS = ("cast_then_scale", "scale_then_cast", "one_plus_scale", "none", "other")
FEW = (torch.bfloat16, torch.float32, torch.int32)


def passes(check, arguments):
    try:
        check(*arguments)
    except (TypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize(
    ("module", "fits", "choices"),
    [
        (rms_norm, "fits", (INPUTS, VECTORS, (1e-6,), FLAVOURS[:1])),
        (rms_norm, "fits", (INPUTS[:3], VECTORS[:4], NUMBERS, FLAVOURS)),
        (linear, "_fits", (INPUTS, of((3, 8), (3, 7), (0, 8), (3, 0), (8,), (3, 8, 1)), [None])),
        (
            linear,
            "_fits",
            (of((2, 8), dtypes=FEW), of((3, 8), (0, 8), dtypes=FEW), [None, *of((3,), (8,), (1, 3), dtypes=FEW)]),
        ),
    ],
)
def test_a_norm_and_a_product_are_taken_where_their_check_passes(module, fits, choices):
    cases = list(itertools.product(*choices))
    found = [getattr(module, fits)(*case) for case in cases]
    assert found == [passes(module.check_arguments, case) for case in cases]
    assert True in found
    assert False in found


def test_an_mlp_is_taken_where_its_check_passes():
    """In float64 the check alone decides."""
    up = of((6, 8), (7, 8), (0, 8), (6, 7), (8,), dtypes=FEW)
    down = of((5, 3), (0, 3), (5, 4), (5,), dtypes=FEW)
    x, norm, bias = torch.ones(2, 8), torch.ones(8), [None, *of((6,), (5,), (1, 6), dtypes=FEW)]
    good_up, good_down = torch.ones(6, 8), torch.ones(5, 3)
    settings = ((1e-6,), FLAVOURS[:1], ("silu",))
    choices = [
        ([x, torch.ones(2, 0), x.double()], [norm, None], up, down, *settings, [None], [None]),
        ([x, x.bfloat16()], [norm, norm[:5]], [good_up], [good_down], *settings, bias, bias),
        ([x], [None], [good_up], [good_down], NUMBERS, FLAVOURS, ("silu", "gelu", "relu"), [None], [None]),
        ([*INPUTS, x.to("meta")], [norm, None], [good_up], [good_down], (1e-6,), FLAVOURS, ("silu",), [None], [None]),
        ([x, x.bfloat16()], [None], up, down, (0.0,), ("none",), ("silu",), [None], [None]),
    ]
    cases = [case for part in choices for case in itertools.product(*part)]
    found = [rms_norm_mlp._fits(*case) for case in cases]
    assert found == [passes(rms_norm_mlp.check_arguments, case) for case in cases]
    assert {True, False} == set(found)
    for flavour, scale in ((FLAVOURS[0], norm.double()), ("none", None)):
        doubles = (x.double(), scale, good_up.double(), good_down.double(), 1e-6, flavour, "silu", None, None)
        assert passes(rms_norm_mlp.check_arguments, doubles)
        assert not rms_norm_mlp._fits(*doubles)
