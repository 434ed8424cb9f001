"""How much memory a call or a process holds at once, a process that keeps what it has freed, and cold caches."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Parameters of mallopt(3) of the GNU C library.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_memory(device: str) -> bool:
    """Let this process's C allocator keep what is freed, from now on, where timing on the CPU is meant.

    A tensor of over 128 KiB otherwise may get fresh pages from the system at each call, and the system clears them: a
    norm of 256 x 1024 then takes five times as long, or not, as the heap happens to lie. Source: mallopt(3).

    Returns:
        whether that was done: the device is the CPU and the allocator offers it.
    """
    if device.partition(":")[0] != "cpu" or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Off, both: no size is too large for the heap, and no free piece at its end is given back.
    return mallopt is not None and all(mallopt(*setting) == 1 for setting in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1)))


def flusher(nbytes: int, device: str) -> Callable[[], Any]:
    """A call that overwrites so many bytes of the device's memory, and with them what its caches held."""
    import torch

    written = torch.zeros(max(nbytes, 4) // 4, device=device)
    return lambda: written.add_(1)


def process_peak_mib() -> float:
    """Peak of this process's memory in MiB, from Linux's /proc.

    Not ru_maxrss: that one survives exec, so a child of a large process starts with its parent's peak.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


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
