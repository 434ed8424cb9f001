"""Timers by device type, as plugins: `TimerPlugin("cpu")`, `("cuda")`, `("npu")`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..plugin import BasePlugin

# Read at each use, so that a test can put another clock here.
clock = time.perf_counter


def processor_clock() -> Callable[[], float]:
    """With one thread its processor time, which stands still while other processes run; else the wall clock."""
    import torch

    return time.thread_time if torch.get_num_threads() == 1 else clock


def seconds_of(run: Callable[[], Any], now: Callable[[], float]) -> float:
    """How long a call takes by a clock of the host."""
    start = now()
    run()
    return now() - start


@dataclass(frozen=True)
class Sample:
    """Seconds of one call of an operation.

    Attributes:
        enqueue: until the host may go on.
        device: between events on the device's queue, with the gaps that the host leaves there; None where the host
            is the device.
        wall: until the device is done.
    """

    enqueue: float
    device: float | None
    wall: float

    @property
    def own(self) -> float:
        """What is compared: the device's interval where there is one, else the wall's."""
        return self.wall if self.device is None else self.device


@dataclass(frozen=True)
class Burst:
    """What one sample is taken of.

    Attributes:
        run: makes `calls` calls of the operation.
        calls: see there.
        repeats: how often `run` is called between two readings of the clock.
        before: called before each reading, outside of what is timed; None: nothing.
        clock: of the host; None: the wall's.
        waits: whether a device is done with `before` before anything is timed. Otherwise it still works on that while
            the host enqueues the calls, so `device` is without the gaps that a slow host leaves, and `wall` too long.
    """

    run: Callable[[], Any]
    calls: int
    repeats: int = 1
    before: Callable[[], Any] | None = None
    clock: Callable[[], float] | None = None
    waits: bool = True


class TimerPlugin(BasePlugin):
    """Timers by device type. Each is a class with `sample(burst, device)`, which returns a `Sample`."""


@TimerPlugin("cpu").register()
class CpuTimer:
    """The host's clock: a call is done when it returns."""

    @staticmethod
    def sample(burst: Burst, device: str) -> Sample:  # noqa: ARG004, as the other timers
        """Time a burst."""
        if burst.before is not None:
            burst.before()
        now = burst.clock or clock
        start = now()
        for _ in range(burst.repeats):
            burst.run()
        seconds = (now() - start) / (burst.repeats * burst.calls)
        return Sample(seconds, None, seconds)


@TimerPlugin("npu").register()
@TimerPlugin("cuda").register()
class EventTimer:
    """Events on the device's queue, which torch_npu offers as torch does, and the host's clock around them."""

    @staticmethod
    def sample(burst: Burst, device: str) -> Sample:
        """Time a burst."""
        import torch

        module: Any = torch.get_device_module(device)
        first, last = module.Event(enable_timing=True), module.Event(enable_timing=True)
        if not burst.waits:
            module.synchronize(device)
        if burst.before is not None:
            burst.before()
        if burst.waits:
            module.synchronize(device)
        start = clock()
        first.record()
        for _ in range(burst.repeats):
            burst.run()
        last.record()
        enqueued = clock()
        module.synchronize(device)
        done = clock()
        calls = burst.repeats * burst.calls
        return Sample((enqueued - start) / calls, first.elapsed_time(last) / 1e3 / calls, (done - start) / calls)
