"""A machine on which nobody else works and whose clock is ours: tests prove the rules, not this machine's speed."""

from __future__ import annotations

import pytest

from layout_kernels.benchmark import cli, measure, timers
from layout_kernels.benchmark.load import Load, LoadPlugin


class Clock:
    """Each reading is `step` seconds after the one before; `growth` makes the steps longer each time."""

    def __init__(self, growth: float = 0.0) -> None:
        self.now, self.step, self.growth = 0.0, 1e-3, growth

    def __call__(self) -> float:
        self.now += self.step
        self.step *= 1 + self.growth
        return self.now


class QuietLoad:
    """What others do is `load`."""

    load = Load(0.0, None, 1.0)

    @staticmethod
    def start(device):  # noqa: ARG004, as the real watch
        return None

    @classmethod
    def stop(cls, reading):  # noqa: ARG003, as the real watch
        return cls.load


@pytest.fixture
def clock(monkeypatch):
    """A steady clock; set its `growth` for another."""
    clock = Clock()
    monkeypatch.setattr(timers, "clock", clock)
    return clock


@pytest.fixture
def load(monkeypatch):
    """A machine without other work; `load(...)` sets what others do."""
    monkeypatch.setitem(LoadPlugin._registry, "cpu", QuietLoad)
    monkeypatch.setattr(cli, "last_level_cache", lambda device: 1024)
    monkeypatch.setattr(
        cli, "machine_limits", lambda device, dtypes: {"copy_bytes_per_second": 1e9, "flops_per_second": {}}
    )
    monkeypatch.setattr(QuietLoad, "load", Load(0.0, None, 1.0))
    monkeypatch.setattr(measure, "_FIRST_PAUSE", 0.0)
    return lambda *values: monkeypatch.setattr(QuietLoad, "load", Load(*values))


@pytest.fixture
def settings():
    """Settings of a short measurement."""
    return measure.Settings("cpu", 5, 2, 0.0, 0, 0.05, 0.05, 2, 64)
