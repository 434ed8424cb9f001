"""Times calls side by side, round-robin: the shortest time of each, or medians with drift. Knows no operation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from .load import Load, LoadPlugin
from .statistics import drift, summary
from .timers import Burst, TimerPlugin, processor_clock

Call = Callable[[], Any]
T = TypeVar("T")
# Of the drift and of the share of the CPUs that others may use.
LIMIT = 0.05


def in_turns(turns: Sequence[Callable[[], T]], rounds: int, seconds: float = 0.0) -> list[list[T]]:
    """What each returned, turn after turn, for so many rounds and so long at least.

    In a round the first has its turn, then the others, then the first again, then the others in the opposite order:
    the preceding call affects a time, so the first, with which others are compared, never follows itself.
    """
    found: list[list[T]] = [[] for _ in turns]
    indices = list(range(len(turns)))
    end, done = time.monotonic() + seconds, 0
    while done < rounds or time.monotonic() < end:
        for index in (*indices, *indices[:1], *indices[:0:-1]):
            found[index].append(turns[index]())
        done += 1
    return found


def shortest(calls: Mapping[str, Call], once: Mapping[str, float], seconds: float) -> dict[str, float]:
    """The shortest time of each call on the CPU: what the code takes, also on a machine that others use.

    Where turns have several calls the first quarter of each is not timed: it finds in the caches what another turn
    left there, and a shared cache takes some calls to hold what is read now.

    Args:
        calls: by name.
        once: about how long one call of each takes.
        seconds: for all of them, about; slow calls take longer.
    """
    now = processor_clock()
    repeats = {name: max(1, int(seconds / 8 / len(calls) / once[name])) for name in calls}
    warm = max(repeats.values()) > 1

    def turn(name: str, call: Call) -> float:
        for _ in range(-(-repeats[name] // 4) if warm else 0):
            call()
        return float(TimerPlugin("cpu").sample(Burst(call, 1, repeats[name], clock=now), "cpu").own)

    taken = in_turns([lambda name=name, call=call: turn(name, call) for name, call in calls.items()], 1, seconds)  # type: ignore[misc]
    return {name: min(times) for name, times in zip(calls, taken, strict=True)}


@dataclass(frozen=True)
class Medians:
    """Seconds of a call of each, turn after turn, and what else happened meanwhile."""

    samples: dict[str, list[float]]
    load: Load

    def summary(self, name: str) -> dict[str, Any]:
        """Of the samples of one."""
        return summary(self.samples[name])

    def ratio(self, first: str, second: str) -> float:
        """The median of the turns' own ratios: what slows the machine for a while slows both."""
        pairs = zip(self.samples[first], self.samples[second], strict=True)
        return median(one / other for one, other in pairs)

    @property
    def drift(self) -> float:
        """See `statistics.drift`; the first is the baseline."""
        return drift(next(iter(self.samples.values())))

    def disturbance(self) -> str | None:
        """Why the times do not count, or None."""
        if abs(self.drift) > LIMIT:
            return f"{next(iter(self.samples))} drifted by {self.drift:+.1%} while timing; the limit is {LIMIT:.1%}"
        return self.load.disturbance(LIMIT)


def medians(
    bursts: Mapping[str, Burst], device: str, *, rounds: int, seconds: float = 0.0, warmup: int = 1
) -> Medians:
    """Time bursts in turns, after `warmup` untimed runs of each; the first one is the baseline."""
    kind = device.partition(":")[0]
    timer, watch = TimerPlugin(kind), LoadPlugin(kind)
    for burst in bursts.values():
        for _ in range(warmup):
            burst.run()
    reading = watch.start(device)
    turns = [lambda burst=burst: float(timer.sample(burst, device).own) for burst in bursts.values()]  # type: ignore[misc]
    taken = in_turns(turns, rounds, seconds)
    return Medians(dict(zip(bursts, taken, strict=True)), watch.stop(reading))
