"""Times calls on a GPU with events, each on a cold cache, or as a CUDA graph; on a CPU with a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

# Written between calls: more than the L2 cache of any GPU here.
_COLD_BYTES = 256 * 2**20
_WARM_UPS, _LEAST, _SECONDS = 3, 10, 0.08
# Bytes a second, by a part of the device's name: the maker's figures. Others are compared with copying alone.
_PEAKS = {"H200": 4.8e12, "H100 PCIe": 2.0e12, "H100 NVL": 3.9e12, "H100": 3.35e12, "A100-SXM4-80GB": 2.039e12}


def peak_bandwidth(name: str) -> float | None:
    """The maker's figure for a device's memory, or None where it is not known here."""
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


def graphed(function: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a CUDA graph, after one warm-up; it returns what the graph writes to."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def seconds(function: Callable[[], Any], device: str) -> float:
    """The median time of a call."""
    for _ in range(_WARM_UPS if device == "cuda" else 1):
        function()
    if device != "cuda":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    flush = torch.empty(_COLD_BYTES, dtype=torch.int8, device="cuda")
    samples: list[tuple[Any, Any]] = []
    end_at = time.perf_counter() + _SECONDS
    while len(samples) < _LEAST or (time.perf_counter() < end_at and len(samples) < 200):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.zero_()
        before.record()
        function()
        after.record()
        samples.append((before, after))
    torch.cuda.synchronize()
    return median(before.elapsed_time(after) for before, after in samples) / 1e3


def copy_bandwidth(device: str) -> float:
    """Bytes a second, read and written, of a large copy: what this machine's memory gives in practice."""
    size = 2**30 if device == "cuda" else 2**22
    source = torch.ones(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device)
