"""What every test shares. Nothing here is imported by the package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ("tests.support.triton_report",)

# huggingface_hub reads this when it is imported. No test needs the network; one that tries fails at once.
os.environ["HF_HUB_OFFLINE"] = "1"
# Which product runs decides the last bits of a result, and a measurement takes time: the shipped limits hold.
os.environ["LAYOUT_KERNELS_CPU_TUNING"] = "off"
# Two copies of a test run must not answer each other through a folder that a developer named for local use.
os.environ.pop("LOCAL_KERNELS", None)


@pytest.fixture(scope="session")
def built_kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Hub variants of the tree under test."""
    from tools.build_variants import build

    folder = tmp_path_factory.mktemp("build")
    build(folder)
    return folder


@pytest.fixture(scope="session")
def kernel(built_kernel: Path) -> Iterator[Any]:
    """The built kernel as `kernels` loads it; KernelConfig finds the same files, offline."""
    import kernels

    from tests.support.loads import REPO

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_KERNELS", f"{REPO}={built_kernel}")
        yield kernels.get_local_kernel(built_kernel)
