"""Times calls: warm and cold, a baseline before and after, watched for drift and for load. Knows no operation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from .load import Load, LoadPlugin
from .memory import flusher
from .statistics import drift, summary
from .timers import Burst, Sample, TimerPlugin
from .turns import in_turns

CACHES = ("warm", "cold")
# A sample of short calls is taken of several, so that the clock's own grain does not show.
_SHORTEST_SAMPLE, _MOST_REPEATS = 2e-4, 64
# Seconds between attempts.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0


@dataclass(frozen=True)
class Settings:
    """How to time.

    Attributes:
        device: where.
        iterations: samples of a turn.
        repeats: rounds, at least; see `turns.in_turns`.
        seconds: how long rounds go on, at least.
        warmup: untimed calls before each turn.
        drift_limit: how far the baseline may move while the others run, see `statistics.drift`.
        load_limit: the share of the CPUs that others may use meanwhile.
        attempts: how often to try again what was disturbed.
        cache_bytes: what is overwritten before each cold call.
    """

    device: str
    iterations: int
    repeats: int
    seconds: float
    warmup: int
    drift_limit: float
    load_limit: float
    attempts: int
    cache_bytes: int


@dataclass(frozen=True)
class Subject:
    """Something to time.

    Attributes:
        name: of the implementation.
        run: makes `calls` calls, on inputs that stay where they are.
        calls: see there.
        run_cold: makes one call; what a graph of several calls cannot show.
        context: in which all of that stands.
    """

    name: str
    run: Callable[[], Any]
    calls: int
    run_cold: Callable[[], Any]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass
class Comparison:
    """What came out: the timing of each subject, and whether it counts.

    Attributes:
        timings: for each name and cache the summaries of `enqueue`, `device` and `wall`, in seconds of one call.
        baseline_turns: for each cache a summary of the medians of the baseline's turns, two a round.
        drift: see `statistics.drift`.
        load: what other processes did.
        invalid_because: why nothing may be concluded; empty: it may.
        discarded: the reasons of attempts that were made before.
    """

    timings: dict[str, dict[str, Any]] = field(default_factory=dict)
    baseline_turns: dict[str, dict[str, Any]] = field(default_factory=dict)
    drift: dict[str, float] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)
    invalid_because: list[str] = field(default_factory=list)
    discarded: list[list[str]] = field(default_factory=list)

    @property
    def valid(self) -> bool:
        """Whether anything may be concluded."""
        return not self.invalid_because


def own_median(timing: Mapping[str, Any]) -> float:
    """The median that is compared: the device's interval where there is one, else the wall's."""
    return float((timing["device"] or timing["wall"])["median"])


class _Recorder:
    """Takes the samples of one subject, turn after turn."""

    def __init__(self, subject: Subject, settings: Settings, flush: Callable[[], Any]) -> None:
        self.subject, self._settings, self._flush = subject, settings, flush
        self._timer = TimerPlugin(settings.device.partition(":")[0])
        self._samples: dict[str, list[Sample]] = {cache: [] for cache in CACHES}
        self._bursts: dict[str, Burst] = {}

    def _choose_bursts(self) -> None:
        """How many calls a sample is taken of; the same in every turn, so that all samples are of one kind."""
        subject = self.subject
        subject.run()
        first = self._timer.sample(Burst(subject.run, subject.calls), self._settings.device)
        often = min(_MOST_REPEATS, math.ceil(_SHORTEST_SAMPLE / max(first.wall * subject.calls, 1e-9)))
        self._bursts["warm"] = Burst(subject.run, subject.calls, often)
        self._bursts["cold"] = Burst(subject.run_cold, 1, 1, self._flush)

    def turn(self) -> dict[str, float]:
        """The median of one turn, for each cache."""
        subject, device = self.subject, self._settings.device
        with subject.context():
            for _ in range(self._settings.warmup):
                subject.run()
            if not self._bursts:
                self._choose_bursts()
            own = {}
            for cache, burst in self._bursts.items():
                taken = [self._timer.sample(burst, device) for _ in range(self._settings.iterations)]
                self._samples[cache] += taken
                own[cache] = median(sample.own for sample in taken)
            return own

    def timing(self) -> dict[str, Any]:
        """The summaries of all turns."""
        return {
            cache: {**_summaries(samples), "calls_per_sample": self._bursts[cache].calls * self._bursts[cache].repeats}
            for cache, samples in self._samples.items()
        }


def _summaries(samples: Sequence[Sample]) -> dict[str, Any]:
    device = [sample.device for sample in samples if sample.device is not None]
    return {
        "enqueue": summary([sample.enqueue for sample in samples]),
        "device": summary(device) if device else None,
        "wall": summary([sample.wall for sample in samples]),
    }


def _once(baseline: Subject, others: Sequence[Subject], settings: Settings, flush: Callable[[], Any]) -> Comparison:
    recorders = [_Recorder(subject, settings, flush) for subject in (baseline, *others)]
    watch = LoadPlugin(settings.device.partition(":")[0])
    reading = watch.start(settings.device)
    taken = in_turns([recorder.turn for recorder in recorders], settings.repeats, settings.seconds)
    load: Load = watch.stop(reading)
    found = Comparison({recorder.subject.name: recorder.timing() for recorder in recorders}, load=load.as_dict())
    for cache in CACHES:
        turns = [turn[cache] for turn in taken[0]]
        found.baseline_turns[cache], found.drift[cache] = summary(turns), drift(turns)
        if abs(found.drift[cache]) > settings.drift_limit:
            found.invalid_because.append(
                f"the baseline drifted by {found.drift[cache]:+.1%} ({cache} cache) while timing; "
                f"the limit is {settings.drift_limit:.1%}"
            )
    disturbance = load.disturbance(settings.load_limit)
    if disturbance is not None:
        found.invalid_because.append(disturbance)
    return found


def compare(baseline: Subject, others: Sequence[Subject], settings: Settings) -> Comparison:
    """Time the baseline, the others, and the baseline again, until nothing disturbed that or the attempts are used up.

    A result that is disturbed to the last is returned as invalid, with every reason. Attempts are further and further
    apart, for what disturbs usually lasts. Whether one counts depends on the baseline and the load alone, so trying
    again favours nobody.
    """
    flush = flusher(settings.cache_bytes, settings.device)
    discarded: list[list[str]] = []
    while True:
        found = _once(baseline, others, settings, flush)
        found.discarded = discarded
        if found.valid or len(discarded) + 1 >= settings.attempts:
            return found
        discarded.append(found.invalid_because)
        time.sleep(min(_FIRST_PAUSE * 2 ** (len(discarded) - 1), _LONGEST_PAUSE))
