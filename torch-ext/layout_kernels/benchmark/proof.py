"""Correctness before time: a result is compared with the expected one, and what is wrong is not timed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from .timers import processor_clock, seconds_of

# Seconds; a call that takes longer is not repeated to learn how long it takes.
_SLOW = 0.25


class WrongResultError(RuntimeError):
    """A result that is not the expected one; no speed is measured of it."""


def difference(found: Any, expected: Any) -> float:
    """The largest difference of tensors, or of tuples of them, in parts of the largest expected element."""
    if isinstance(expected, tuple):
        found = found if isinstance(found, tuple) else (found,)
        return max(difference(*pair) for pair in zip(found, expected, strict=True))
    if found.shape != expected.shape:
        return float("inf")
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30))


def check(name: str, found: Any, expected: Any, bound: float) -> float:
    """The difference of a result that is right.

    Raises:
        WrongResultError: it differs by more than the bound, or is not finite.
    """
    error = difference(found, expected)
    if not error <= bound:
        raise WrongResultError(f"{name} is off by {error:.2e} of the largest element; allowed: {bound:.2e}; not timed")
    return error


def right_ones(
    case: str, calls: Mapping[str, Callable[[], Any]], *, ours: str, unchecked: Collection[str] = ()
) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """The calls on the CPU whose result is the first one's, and the seconds of one call; others are left out.

    A few roundings of the result's dtype are allowed.

    Args:
        case: for the message.
        calls: by name; the first is right.
        ours: the name of the one that has to be.
        unchecked: those whose results are none of the operation.

    Raises:
        WrongResultError: ours is wrong.
    """
    now, once = processor_clock(), {}
    expected: Any = None
    for name, call in calls.items():
        results: list[Any] = []
        took = seconds_of(lambda call=call, results=results: results.append(call()), now)  # type: ignore[misc]
        if expected is None:
            (expected,) = results
        elif name not in unchecked:
            try:
                check(f"{case} by {name}", results.pop(), expected, _bound(expected))
            except WrongResultError:
                if name == ours:
                    raise
                continue
        results.clear()
        once[name] = max(1e-7, took if took >= _SLOW else seconds_of(call, now))
    return {name: calls[name] for name in once}, once


def _bound(expected: Any) -> float:
    import torch

    first = expected[0] if isinstance(expected, tuple) else expected
    return 4 * torch.finfo(first.dtype).eps + 1e-6
