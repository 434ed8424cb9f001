"""What is timed and how: results are checked first, calls take turns, the limits are measured beside each row."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from layout_kernels.benchmark.limits import last_level_cache

Calls = dict[str, Callable[[], Any]]
# Not results of the operation, so there is nothing to check.
READ = "read"
UNCHECKED = ("clone", READ)
SLOW = 0.25  # seconds; such a call is not repeated to learn how long it takes
LEAST_TURNS = 2


class WrongResultError(RuntimeError):
    """A result that is not stock's; no speed is measured of it."""


def clock() -> Callable[[], float]:
    """With one thread its processor time, which stands still while other processes run; else the wall clock."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def check(case: str, ours: Any, stock: Any) -> None:
    """Whether each tensor of a result is stock's: a few roundings of the dtype apart, in the mean.

    Raises:
        WrongResultError: the results differ by more, or ours is not finite.
    """
    pairs = zip(ours, stock, strict=True) if isinstance(stock, tuple) else [(ours, stock)]
    for got, wanted in pairs:
        error = float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))
        if got.shape != wanted.shape or not error < 4 * torch.finfo(wanted.dtype).eps + 1e-6:
            raise WrongResultError(f"{case}: off by {error:.2e} of stock's result; no speed is measured of it")


def right_ones(case: str, calls: Calls) -> tuple[Calls, dict[str, float]]:
    """The calls whose result is right, with the seconds of one call. A peer that is wrong is left out.

    Raises:
        WrongResultError: ours is wrong.
    """
    now, wanted = clock(), None
    right, once = {}, {}
    for name in sorted(calls, key=lambda name: name != "stock"):
        call, start = calls[name], now()
        result = call()
        took = now() - start
        if wanted is None:
            wanted = result
        elif name not in UNCHECKED:
            try:
                check(f"{case} by {name}", result, wanted)
            except WrongResultError:
                if name == "ours":
                    raise
                continue
        del result
        if took < SLOW:
            start = now()
            call()
            took = now() - start
        right[name], once[name] = call, max(took, 1e-7)
    return right, once


def shortest(calls: Calls, once: dict[str, float], seconds: float) -> dict[str, float]:
    """The shortest time of each call in microseconds, measured in turns for about `seconds` in all, two at least.

    Where turns have several calls the first quarter of each is not timed: it finds in the caches what another turn
    left there, and a shared cache takes some calls to hold what is read now.
    """
    now = clock()
    repeats = {name: max(1, int(seconds / 8 / len(calls) / once[name])) for name in calls}
    best = dict.fromkeys(calls, math.inf)
    end, turns = time.perf_counter() + seconds, 0
    while turns < LEAST_TURNS or time.perf_counter() < end:
        turns += 1
        for name, call in calls.items():
            if max(repeats.values()) > 1:
                for _ in range(-(-repeats[name] // 4)):
                    call()
            start = now()
            for _ in range(repeats[name]):
                call()
            best[name] = min(best[name], (now() - start) / repeats[name] * 1e6)
    return best


def measured(case: str, calls: Calls, seconds: float) -> dict[str, float]:
    """The shortest time of each call whose result is right, in microseconds.

    Raises:
        WrongResultError: ours is wrong.
    """
    return shortest(*right_ones(case, calls), seconds)


def compiled(function: Any, *, dynamic: bool) -> Any:
    """torch.compile of stock, made anew: nothing that was compiled for another shape or thread count is taken."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    inductor_config.fx_graph_cache = False
    functorch_config.enable_autograd_cache = False
    # A backward is timed more than once.
    functorch_config.donated_buffer = False
    torch._dynamo.reset()
    return torch.compile(function, dynamic=dynamic)


@dataclass(frozen=True)
class Limit:
    """What the machine does in a microsecond.

    Attributes:
        bandwidth: bytes read from memory.
        rate: fp32 operations of a product.
        cached: bytes read again and again, as many as the case has; 0 where they do not fit the largest cache.
    """

    bandwidth: float
    rate: float
    cached: float = 0.0

    def of(self, nbytes: float, operations: float) -> dict[str, Any]:
        """The fields of a row that say what bounds work of this size."""
        by_bytes, by_operations = nbytes / max(self.bandwidth, self.cached), operations / self.rate
        if by_bytes > by_operations:
            return {"limit": "bytes", "limit_us": by_bytes, "work": nbytes}
        return {"limit": "fp32 operations", "limit_us": by_operations, "work": operations}


class Limits:
    """Measures the limits before and after a row; the better of the two counts, so that none is understated."""

    def __init__(self) -> None:
        self._cache = last_level_cache("cpu")
        elements = (4 * self._cache + (32 << 20)) // 4
        self._matrix = torch.ones(elements // 8192, 8192)
        self._vector = torch.ones(8192)
        self._squares = [torch.randn(size, size) for size in (1024, 2048)]
        self._products = [torch.empty_like(square) for square in self._squares]
        self._last: tuple[int, Limit] | None = None

    def before(self) -> Limit:
        """The last measurement with as many threads, or a new one."""
        if self._last is None or self._last[0] != torch.get_num_threads():
            self.after()
        assert self._last is not None  # noqa: S101
        return self._last[1]

    def after(self) -> Limit:
        """A new measurement."""
        read = self._best([self._matrix.sum, lambda: torch.mv(self._matrix, self._vector)] * 2)
        rate = max(self._rate(index) for index in (0, 0, 1))
        limit = Limit(self._matrix.nbytes / read, rate)
        self._last = (torch.get_num_threads(), limit)
        return limit

    def _rate(self, index: int) -> float:
        square, product = self._squares[index], self._products[index]
        return 2 * square.shape[0] ** 3 / self._best([lambda: torch.mm(square, square, out=product)])

    @staticmethod
    def _best(calls: list[Callable[[], Any]]) -> float:
        now, best = clock(), math.inf
        with torch.inference_mode():
            for call in calls:
                start = now()
                call()
                best = min(best, (now() - start) * 1e6)
        return best

    def _cached(self, nbytes: int) -> float:
        if nbytes > self._cache:
            return 0.0
        part = self._matrix[: max(1, nbytes // (self._matrix.shape[1] * 4))]
        return part.nbytes / self._best([part.sum, lambda: torch.mv(part, self._vector)] * 5)

    def around(self, measure: Callable[[Calls], dict[str, float]], nbytes: int) -> tuple[dict[str, float], Limit]:
        """What `measure` returns, and the limits of the minute for a case that reads so many bytes.

        The memory's speed changes from one second to the next where others use it too, so `measure` is given the
        reading as a call that takes its turns beside the others. Products are measured before and after.
        """
        before = self.before()
        found = measure({READ: self._read})
        after = self.after()
        read = found.pop(READ, None)
        bandwidth = self._matrix.nbytes / read if read else max(before.bandwidth, after.bandwidth)
        return found, Limit(bandwidth, max(before.rate, after.rate), self._cached(nbytes))

    def _read(self) -> Any:
        return self._matrix.sum()
