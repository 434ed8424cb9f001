"""What the machine can do, measured: how fast it copies, and how fast it multiplies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from .timers import Burst, TimerPlugin

_ATTEMPTS = 7
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def last_level_cache(device: str) -> int:
    """Bytes of the largest cache in front of the device's memory; a guess of 64 MiB where it is not told."""
    import torch

    kind = torch.device(device).type
    if kind == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [64 << 20] if kind != "cpu" else []
    for file in _CACHE.glob("index*/size") if kind == "cpu" else ():
        text = file.read_text(encoding="ascii").strip()
        sizes.append(int(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else int(text))
    return max(sizes, default=64 << 20)


def machine_limits(device: str, dtypes: Iterable[str]) -> dict[str, Any]:
    """The rates that no implementation can pass by much: the best of some attempts.

    Args:
        device: where.
        dtypes: those whose products are measured.

    Returns:
        `copy_bytes_per_second`: bytes read and written by copying a buffer of four times the cache; and
        `flops_per_second`: for each dtype that of a square product; without those that the device does not multiply.
    """
    import torch

    kind = torch.device(device).type
    elements = max(4 * last_level_cache(device), 64 << 20) // 4
    copy = partial(torch.empty(elements, device=device).copy_, torch.ones(elements, device=device))
    found: dict[str, Any] = {"copy_bytes_per_second": 2 * 4 * elements / _best(copy, device), "flops_per_second": {}}
    del copy
    size = 1024 if kind == "cpu" else 8192
    for name in dict.fromkeys(dtypes):
        try:
            square = torch.ones(size, size, dtype=getattr(torch, name), device=device)
            found["flops_per_second"][name] = 2 * size**3 / _best(partial(torch.mm, square, square), device)
        except (AttributeError, TypeError, RuntimeError):
            continue
    return found


def _best(run: Callable[[], Any], device: str) -> float:
    timer = TimerPlugin(device.partition(":")[0])
    return float(min(timer.sample(Burst(run, 1), device).own for _ in range(_ATTEMPTS)))
