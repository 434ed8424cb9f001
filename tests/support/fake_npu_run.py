"""What runs on the simulated device, and what may not: launches, synchronisation, streams, captured graphs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.support.fake_npu_memory import DEVICE, describe, host, is_device, layout_of, to_device

# What is computed, its arguments and keyword arguments, its results.
Launch = tuple[Callable[..., Any], Any, Any, Any]


class Simulation:
    """What happened on the device, and what is not allowed at the moment."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.synchronisations = 0
        self.refuse_synchronisation = False
        self.recording: list[Launch] | None = None
        self.current_device = 0
        self.product = "Ascend910B3"

    def synchronise(self, what: str) -> None:
        self.synchronisations += 1
        if self.refuse_synchronisation or self.recording is not None:
            raise RuntimeError(f"{what} synchronises the host with the simulated npu, which is not allowed here")

    @contextlib.contextmanager
    def asynchronous(self) -> Iterator[None]:
        """Refuse whatever makes the host wait for the device."""
        self.refuse_synchronisation = True
        try:
            yield
        finally:
            self.refuse_synchronisation = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[str]]:
        """The names of the operators that run on the device inside."""
        self.calls, before = [], self.calls
        seen = self.calls
        try:
            yield seen
        finally:
            self.calls = before


SIMULATION = Simulation()


def to_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == DEVICE:
        return torch.device("cpu")
    return value


def map_values(function: Callable[[Any], Any], value: Any) -> Any:
    """`tree_map` over what operators take and give; several times faster, and it runs at every launch."""
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)([map_values(function, item) for item in value])
    if isinstance(value, dict):
        return {key: map_values(function, item) for key, item in value.items()}
    return function(value)


def snapshot(value: Any) -> Any:
    """A device tensor as it is now, on the CPU; what is done to the tensor itself later does not change it."""
    return host(value) if is_device(value) else to_cpu(value)


def alias(value: Any) -> Any:
    """Another tensor over the same memory."""
    return value.as_strided(value.size(), value.stride(), value.storage_offset()) if torch.is_tensor(value) else value


def run(name: str, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run what takes CPU tensors on device tensors: results share memory where the CPU's do."""
    originals: list[tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]] = []
    known: dict[int, torch.UntypedStorage] = {}

    def lend(value: Any) -> Any:
        if not is_device(value):
            return to_cpu(value)
        twin = host(value)
        known.setdefault(twin.untyped_storage()._cdata, value.untyped_storage())
        originals.append((value, twin, layout_of(twin)))
        return twin

    lent_args, lent_kwargs = map_values(lend, args), map_values(lend, kwargs)
    result = compute(*lent_args, **lent_kwargs)
    for original, twin, before in originals:
        if layout_of(twin) != before:
            storage = known.get(twin.untyped_storage()._cdata)
            grown = storage is None or storage.nbytes() != twin.untyped_storage().nbytes()
            fresh = to_device(twin, {} if grown else known)
            known[twin.untyped_storage()._cdata] = fresh.untyped_storage()
            describe(original, twin, fresh.untyped_storage())
    back = {id(twin): original for original, twin, _ in originals}

    def give_back(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return back[id(value)] if id(value) in back else to_device(value, known)

    results = map_values(give_back, result)
    SIMULATION.calls.append(name)
    if SIMULATION.recording is not None:
        remember = (map_values(snapshot, args), map_values(snapshot, kwargs), map_values(snapshot, results))
        SIMULATION.recording.append((compute, *remember))
    return results


class Stream:
    """A queue of launches. There is one in the simulation, in which all runs in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if SIMULATION.refuse_synchronisation or SIMULATION.recording is not None:
            raise RuntimeError("a stream of one's own is not allowed here: launches belong on the current stream")

    def wait_stream(self, other: Stream) -> None:
        """All runs in order already."""

    def synchronize(self) -> None:
        """Wait for what was launched."""
        SIMULATION.synchronise("Stream.synchronize")


CURRENT_STREAM = Stream()


class Event:
    """A mark in the stream, with the host's time."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Mark now."""
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        """Wait for the mark."""
        SIMULATION.synchronise("Event.synchronize")

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this mark to another."""
        return (end.time - self.time) * 1e3


class Graph:
    """A captured sequence of launches: replayed on the same memory, as an NPUGraph is."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def replay(self) -> None:
        """Launch all again, each on the memory, sizes and strides that it had when it was captured."""
        for compute, args, kwargs, results in self.launches:
            again = compute(*map_values(alias, args), **map_values(alias, kwargs))
            for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@contextlib.contextmanager
def capture(graph: Graph, **_: Any) -> Iterator[None]:
    SIMULATION.recording = graph.launches
    try:
        yield
    finally:
        SIMULATION.recording = None
