"""Threads come from torch's pool, and what they compute does not depend on how many there are."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch


def with_threads(count: int, call: Callable[[], Any]) -> list[torch.Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        result = call()
    finally:
        torch.set_num_threads(before)
    return list(result) if isinstance(result, (tuple, list)) else [result]


def calls(operators: Any) -> dict[str, Callable[[], Any]]:
    source = torch.Generator().manual_seed(1)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=source).bfloat16()

    x, grad, weight = make(2000, 96), make(2000, 96), make(96)
    gate_up, down = make(320, 96), make(96, 160)
    many = make(1100, 96)  # columns for a wide tile with one thread, a narrow one with more
    return {
        "rms_norm": lambda: operators.cpu_rms_norm(x, weight, 1e-6, 0),
        "rms_norm_backward": lambda: operators.cpu_rms_norm_backward(grad, x, weight, 1e-6, 0, True, True),
        "gated_activation": lambda: operators.cpu_gated_activation(x, 0),
        "gated_rms_norm_backward": lambda: operators.cpu_gated_rms_norm_backward(
            grad, x, x, weight, 1e-6, 0, 0, 0, 0, True
        ),
        "linear": lambda: operators.cpu_linear(x, gate_up, None),
        "linear of many columns": lambda: operators.cpu_linear(x, many, None),
        "rms_norm_mlp": lambda: operators.cpu_rms_norm_mlp(x, weight, gate_up, down, 1e-6, 0, 0, None, None),
    }


@pytest.mark.parametrize("name", list(calls(None)))
def test_the_bits_do_not_depend_on_the_number_of_threads(native: ModuleType, level: str, name: str) -> None:
    call = calls(native.operators)[name]
    alone = with_threads(1, call)
    for count in (2, 3):
        for one, other in zip(alone, with_threads(count, call), strict=True):
            assert torch.equal(one, other)


def test_no_second_openmp_is_loaded(native: ModuleType) -> None:
    """A second OpenMP run-time library would spin against torch's."""
    with open("/proc/self/maps") as file:
        libraries = {line.split()[-1].rpartition("/")[2] for line in file if ".so" in line}
    assert native.levels()
    assert len([name for name in libraries if name.startswith(("libgomp", "libomp", "libiomp"))]) <= 1, libraries
