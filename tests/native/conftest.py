"""The compiled kernels under test: of a build made for this run, or of the one that `make sanitize` names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BUILD_VARIABLE = "LAYOUT_KERNELS_BUILD_UNDER_TEST"


@pytest.fixture(scope="session")
def package(request: pytest.FixtureRequest) -> Any:
    """The variant with the compiled kernels, as `kernels` loads it."""
    import kernels

    folder = os.environ.get(BUILD_VARIABLE) or request.getfixturevalue("built_kernel")
    package = kernels.get_local_kernel(Path(folder))
    assert package.initialize("cpu")["rms_norm"].spec.name == "cpu.native.rms_norm"
    return package


@pytest.fixture(scope="session")
def native(package: Any) -> ModuleType:
    """`ops.native` of that variant."""
    return import_module(f"{package.__name__}.ops.native")


@pytest.fixture(params=["portable", "avx2", "avx512", "avx512_bf16"])
def level(request: pytest.FixtureRequest, native: ModuleType) -> Iterator[str]:
    """Each instruction set that this processor has; the best afterwards."""
    if request.param not in native.levels():
        pytest.skip(f"this processor lacks {request.param}")
    before = native.level()
    native.select_level(request.param)
    yield request.param
    native.select_level(before)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Numbers of threads; the former one afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
