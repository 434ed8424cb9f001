from __future__ import annotations

from typing import Any

import pytest

from tests.support.loads import Loading, by_hand


@pytest.fixture(params=["kernel_loading", "by_hand"])
def loading(request: pytest.FixtureRequest, kernel: Any) -> Loading:
    """Both ways to load: inside our context, and as on CUDA or NPU, where only the clean-up may be missing."""
    return kernel.kernel_loading if request.param == "kernel_loading" else by_hand
