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
    """Median, p90, median absolute deviation and smallest, with the samples themselves; in the samples' unit."""
    return {
        "median": median(samples),
        "p90": nearest_rank(samples, 0.9),
        "mad": deviation(samples),
        "min": min(samples),
        "samples": list(samples),
    }
