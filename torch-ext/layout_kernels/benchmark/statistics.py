"""What is said of some samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any


def nearest_rank(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least this share of all samples does not exceed; always one of them."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def deviation(samples: Sequence[float]) -> float:
    """The median absolute deviation from the median, as it is (not scaled to a standard deviation)."""
    middle = median(samples)
    return median(abs(sample - middle) for sample in samples)


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Count, median, p10, p90, median absolute deviation, smallest and largest, in the samples' unit."""
    return {
        "count": len(samples),
        "median": median(samples),
        "p10": nearest_rank(samples, 0.1),
        "p90": nearest_rank(samples, 0.9),
        "mad": deviation(samples),
        "min": min(samples),
        "max": max(samples),
    }


def drift(turns: Sequence[float]) -> float:
    """How far a baseline moved while the others ran: the median over all rounds of its change in one.

    The change in a round is that of its turn after the others from its turn before them, relative to that. A kernel
    that leaves the machine slower shows, and so does a clock that runs away. What changes from one second to the next,
    as a shared machine's memory does, moves the others as it moves the baseline beside them.

    Args:
        turns: the time of each turn in their order, before and after the others by turns.
    """
    return median(_change(before, after) for before, after in zip(turns[::2], turns[1::2], strict=True))


def _change(earlier: float, later: float) -> float:
    # A clock too coarse to see the call shows no time at all: any time after that is infinitely far from it.
    if earlier == 0:
        return math.inf if later else 0.0
    return later / earlier - 1
