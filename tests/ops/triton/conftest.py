"""Triton's kernels: interpreted on the CPU by a process of their own, and on a GPU where there is one.

The interpreter must be asked for before triton is imported, and would change what other tests import. The process
that interprets counts its cases; the tests marked `gpu` that find none are counted as waiting.
"""

from __future__ import annotations

import pytest

from tests.support import triton_interpreter

if not triton_interpreter.is_on():
    collect_ignore = ["interpreted"]

COUNTS = pytest.StashKey[dict[str, int]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; counted as waiting where there is none")
    config.stash[COUNTS] = {"interpreted": 0, "waiting": 0, "ran on a GPU": 0}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    marked = [item for item in items if item.get_closest_marker("gpu")]
    if torch.cuda.is_available():
        config.stash[COUNTS]["ran on a GPU"] = len(marked)
        return
    config.stash[COUNTS]["waiting"] = len(marked)
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="waits for a GPU; its logic is proven in the interpreter"))


@pytest.fixture
def counts(request: pytest.FixtureRequest) -> dict[str, int]:
    return request.config.stash[COUNTS]


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    counts = config.stash[COUNTS]
    if any(counts.values()):
        terminalreporter.write_line("Triton: " + ", ".join(f"{number} {what}" for what, number in counts.items()))
