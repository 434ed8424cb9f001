"""How much memory a call holds at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def peak_bytes(function: Callable[[], Any], device: str) -> int:
    """The most that torch's allocator gave out at one time during one call, beyond what was there before it.

    What a kernel takes from elsewhere, such as the stack or a library's own pool, is not in it.
    """
    import torch

    if torch.device(device).type == "cpu":
        return _peak_on_cpu(function)
    module: Any = torch.get_device_module(device)
    module.synchronize(device)
    before = module.memory_allocated(device)
    module.reset_peak_memory_stats(device)
    result = function()
    module.synchronize(device)
    del result
    return max(0, int(module.max_memory_allocated(device)) - before)


def _peak_on_cpu(function: Callable[[], Any]) -> int:
    from torch.profiler import ProfilerActivity, profile

    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        result = function()
        del result
    held = most = 0
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the lines that torch's profiler writes to standard error below Python, past sys.stderr."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
