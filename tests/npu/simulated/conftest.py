"""Installs the simulated device before anything else is imported, and hands tests what they watch it with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import fake_npu

SIMULATION = fake_npu.install()


@pytest.fixture
def npu() -> Iterator[fake_npu.Simulation]:
    """The device, with what a test changed about it put back."""
    from layout_kernels.ops import ascend

    product = SIMULATION.product
    ascend._product.cache_clear()
    yield SIMULATION
    SIMULATION.product = product
    SIMULATION.refuse_synchronisation = False
    ascend._product.cache_clear()
