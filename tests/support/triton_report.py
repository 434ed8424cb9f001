"""Marks tests that need a GPU, and counts at the end of a run what Triton's kernels were proven by.

A plugin of the whole run: with several processes only reports reach the one that prints.
"""

from __future__ import annotations

import pytest

INTERPRETED = "triton cases interpreted"
_WAITS = "waits for a GPU"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; counted as waiting where there is none")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    for item in marked:
        item.user_properties.append(("gpu", 1))
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=f"{_WAITS}; the kernels' logic is proven in the interpreter"))


def pytest_terminal_summary(terminalreporter) -> None:
    interpreted = waiting = ran = 0
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            properties = dict(getattr(report, "user_properties", ()))
            interpreted += properties.get(INTERPRETED, 0)
            waiting += outcome == "skipped" and "gpu" in properties
            ran += outcome != "skipped" and "gpu" in properties
    if interpreted or waiting or ran:
        terminalreporter.write_line(
            f"Triton: {interpreted} cases ran in the interpreter, {waiting} tests wait for a GPU, {ran} ran on one"
        )
