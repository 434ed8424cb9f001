"""Counts, in the interpreter, the bytes that a call moves beside the least that it can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from tools.check_cuda.calls import DTYPES, STRICT_WIDTH, Call
from tools.triton_interpreter import Traffic, counting

_ROWS = 3


class Moved(NamedTuple):
    """Bytes of rows read and written, the least possible, and those of partial sums; each beside nothing else."""

    rows: int
    least: int
    sums: int


def moved(call: Call) -> Moved:
    """Run a call and count. Weights of a row's width, which stay in the cache, count with neither.

    Sums are what is stored beside the results.
    """

    def make(*shape: int) -> torch.Tensor:
        return torch.full(shape, 0.5, dtype=DTYPES[call.dtype])

    tensors, run = call.run(make, _ROWS)
    traffic = Traffic(tensors)
    with counting(traffic):
        result = run()
    results = [item for item in (result if isinstance(result, tuple) else (result,)) if item is not None]
    written = sum(item.numel() * item.element_size() for item in results)
    read = sum(item.numel() * item.element_size() for item in tensors.values())
    if call.name.startswith("rms_norm_mlp"):
        # The product and what follows it are PyTorch's.
        return Moved(sum(traffic.loaded.values()), read, 0)
    sums = traffic.all_stored - written
    return Moved(sum(traffic.loaded.values()) + written, read + written, sums)


def checked(calls: Iterator[Call]) -> Iterator[tuple[Call, Moved]]:
    """The calls that are counted: one of each width up to the strict one, to be had in seconds."""
    for call in calls:
        if call.width <= STRICT_WIDTH and not (call.name.startswith("rms_norm_mlp") and call.width > 1024):
            yield call, moved(call)
