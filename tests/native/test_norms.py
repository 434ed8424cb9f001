"""What the compiled norms do with unusual values and sizes: nothing that PyTorch's formula does not."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from layout_kernels.benchmark.limits import last_level_cache
from layout_kernels.ops.rms_norm import FLAVOURS
from layout_kernels.ops.rms_norm.reference import rms_norm as reference

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Larger caches than this are not filled by a test.
MOST_BYTES = 512 << 20


def operator(package: Any) -> Any:
    return import_module(f"{package.__name__}.ops.native").operators.cpu_rms_norm.default


def assert_equal(found: torch.Tensor, expected: torch.Tensor, rtol: float = 0.0) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0, equal_nan=True)


@pytest.mark.parametrize("flavour", range(3))
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_rounded_with_more_care(package: Any, level: str, dtype: str, flavour: int) -> None:
    """Subnormals, infinities and NaN, in the value, after the scale and in the scale, wherever in a row they stand."""
    norm, tiny = operator(package), torch.finfo(torch.float32).tiny
    # In float32 the root's own rounding is seen, which is made from float64 here.
    rtol = 2 * torch.finfo(torch.float32).eps if dtype == "float32" else 0.0
    for width in (31, 32, 96, 101):
        for at in (0, 15, 16, width - 1):
            x, scale = torch.ones(7, width), torch.full((width,), 1.0 if flavour < 2 else 0.0)
            x[1, at], x[2, at], x[3, at], x[4, at] = tiny / 3, torch.inf, torch.nan, 1e-20
            x[5] = 1e-20
            for value in (1.0, 1e-30, tiny / 5, torch.inf, torch.nan, -torch.inf):
                scale[at] = value
                arguments = (x.to(DTYPES[dtype]), scale.to(DTYPES[dtype]))
                for eps in (1e-6, 1e-12):
                    found = norm(*arguments, eps, flavour)
                    assert_equal(found, reference(*arguments, eps, FLAVOURS[flavour]), rtol)


def test_a_nan_whose_bits_would_round_to_zero(package: Any, level: str) -> None:
    scale = torch.ones(96)
    scale[70] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    for flavour in (1, 2):
        found = operator(package)(torch.ones(2, 96, dtype=torch.bfloat16), scale, 1e-6, flavour)
        assert found.dtype == torch.bfloat16
        assert found.isnan().sum(0).tolist() == [0] * 70 + [2] + [0] * 25


@pytest.mark.parametrize("width", [1, 40, 64, 600])
def test_a_row_whose_squares_nearly_vanish(package: Any, level: str, width: int) -> None:
    """With an eps of zero nothing hides them; a square that is subnormal has few bits, at most 1e-4 is lost."""
    x = (torch.randn(9, width) + 3).mul(torch.logspace(-20, -12, 9)[:, None]).bfloat16()
    found = operator(package)(x, None, 0.0, 0)
    torch.testing.assert_close(found.double(), reference(x.double(), None, 0.0, FLAVOURS[0]), rtol=5e-3, atol=0)


def test_a_wide_row_of_one_value_is_not_further_off_than_a_narrow_one(package: Any, level: str) -> None:
    """Every rounding of its sum goes the same way: sums over all of it in float32 would be 1e-5 off and more."""
    x = torch.full((1, 1 << 18), 1.3)
    found = operator(package)(x, torch.ones(x.shape[1]), 0.0, 0)
    # A block is 64 additions deep, each at most half a rounding off, 6e-8 of the sum, and the root halves it.
    assert (found.double() - 1).abs().max() < 3e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_result_that_no_cache_holds(package: Any, level: str, threads: int, dtype: str) -> None:
    """It is written past the caches: the same bits as in small parts, and also where rows cannot be so written."""
    norm, cache = operator(package), last_level_cache("cpu")
    if cache > MOST_BYTES:
        pytest.skip(f"the cache of {cache >> 20} MiB is larger than what a test fills")
    for width in (4096, 4096 + 8):
        rows = cache // (2 * width * DTYPES[dtype].itemsize) + 3
        x = torch.empty(rows, width, dtype=DTYPES[dtype]).normal_()
        x[rows // 2, 77] = torch.nan
        scale = torch.empty(width, dtype=x.dtype).normal_()
        parts = [norm(part, scale, 1e-6, 0) for part in x.split(100)]
        assert_equal(norm(x, scale, 1e-6, 0), torch.cat(parts))
