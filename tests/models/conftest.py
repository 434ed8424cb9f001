from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.loads import Loading, by_hand
from tests.support.tiny import FAMILIES, Family, save_family


@pytest.fixture(params=["kernel_loading", "by_hand"])
def loading(request: pytest.FixtureRequest, kernel: Any) -> Loading:
    """Both ways to load: inside our context, and as on CUDA or NPU, where only the clean-up may be missing."""
    return kernel.kernel_loading if request.param == "kernel_loading" else by_hand


@pytest.fixture(scope="session", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


_folders: dict[tuple[int, torch.dtype], Path] = {}


@pytest.fixture(scope="session")
def checkpoint(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint of the family, written once."""
    key = (id(family), torch.float32)
    if key not in _folders:
        _folders[key] = save_family(family, tmp_path_factory.mktemp("checkpoint"))
    return _folders[key]
