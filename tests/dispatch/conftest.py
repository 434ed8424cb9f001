from __future__ import annotations

import os

import pytest

from .world import World


@pytest.fixture
def world(tmp_path, monkeypatch):
    for variable in [name for name in os.environ if name.startswith("LAYOUT_KERNELS_OVERRIDE_")]:
        monkeypatch.delenv(variable)
    return World(tmp_path, monkeypatch)
