"""What the machine can do, measured: how fast it copies, reads and multiplies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .timers import Burst, TimerPlugin, processor_clock

_ATTEMPTS = 7
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
# The name of the call that reads memory beside others.
READ = "read"
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
    found: dict[str, Any] = {
        "copy_bytes_per_second": 2 * 4 * elements / _best([copy] * _ATTEMPTS, device),
        "flops_per_second": {},
    }
    del copy
    size = 1024 if kind == "cpu" else 8192
    for name in dict.fromkeys(dtypes):
        try:
            square = torch.ones(size, size, dtype=getattr(torch, name), device=device)
            found["flops_per_second"][name] = (
                2 * size**3 / _best([partial(torch.mm, square, square)] * _ATTEMPTS, device)
            )
        except (AttributeError, TypeError, RuntimeError):
            continue
    return found


def _best(runs: Iterable[Callable[[], Any]], device: str, now: Callable[[], float] | None = None) -> float:
    timer = TimerPlugin(device.partition(":")[0])
    return float(min(timer.sample(Burst(run, 1, clock=now), device).own for run in runs))


@dataclass(frozen=True)
class Limit:
    """What a CPU does in a second.

    Attributes:
        bandwidth: bytes read from memory.
        rate: fp32 operations of a product.
        cached: bytes read again and again, as many as the case has; 0 where they do not fit the largest cache.
    """

    bandwidth: float
    rate: float
    cached: float = 0.0

    def of(self, nbytes: float, operations: float) -> tuple[str, float, float]:
        """What bounds work of this size, `bytes` or `fp32 operations`; the seconds that it takes; how much it is."""
        by_bytes, by_operations = nbytes / max(self.bandwidth, self.cached), operations / self.rate
        if by_bytes > by_operations:
            return "bytes", by_bytes, nbytes
        return "fp32 operations", by_operations, operations


class Limits:
    """Measures a CPU's limits beside a case, by the clock of `processor_clock`; the better of several counts."""

    def __init__(self) -> None:
        import torch

        self._cache = last_level_cache("cpu")
        self._matrix = torch.ones((4 * self._cache + (32 << 20)) // 4 // 8192, 8192)
        self._vector = torch.ones(8192)
        self._products: list[tuple[int, Callable[[], Any]]] = []
        for size in (1024, 1024, 2048):
            square = torch.randn(size, size)
            multiply = partial(torch.mm, square, square, out=torch.empty_like(square))
            self._products.append((2 * size**3, multiply))
        self._last: tuple[int, Limit] | None = None

    def _now(self) -> Limit:
        import torch

        rate = max(operations / _best([multiply], "cpu", processor_clock()) for operations, multiply in self._products)
        limit = Limit(self._read_rate(self._matrix, 2), rate)
        self._last = (torch.get_num_threads(), limit)
        return limit

    def _read_rate(self, matrix: Any, attempts: int) -> float:
        import torch

        runs = [matrix.sum, partial(torch.mv, matrix, self._vector)] * attempts
        return float(matrix.nbytes / _best(runs, "cpu", processor_clock()))

    def around(
        self, measure: Callable[[Mapping[str, Callable[[], Any]]], dict[str, float]], nbytes: int
    ) -> tuple[dict[str, float], Limit]:
        """What `measure` returns, seconds by name, and the limits meanwhile for a case that reads so many bytes.

        The memory's speed changes from one second to the next where others use it too, so `measure` is given the
        reading as a call that may take its turns beside the others. All is measured before and after, too.
        """
        import torch

        before = self._last[1] if self._last and self._last[0] == torch.get_num_threads() else self._now()
        found = measure({READ: self._matrix.sum})
        after = self._now()
        read = found.pop(READ, None)
        bandwidth = self._matrix.nbytes / read if read else max(before.bandwidth, after.bandwidth)
        part = self._matrix[: max(1, nbytes // (self._matrix.shape[1] * 4))]
        cached = self._read_rate(part, 5) if nbytes <= self._cache else 0.0
        return found, Limit(bandwidth, max(before.rate, after.rate), cached)
