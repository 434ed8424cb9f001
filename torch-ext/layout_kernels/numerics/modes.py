"""How a call is run in each execution mode: as it is, compiled, or as a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

from ..dispatch.catalog import missing_requirement
from ..plugin import BasePlugin

GRAPH_CALLS = 64


class CaptureError(RuntimeError):
    """A call could not be compiled or captured. It is never run in another mode instead."""


@dataclass(frozen=True)
class Runner:
    """A call made ready to be repeated.

    Attributes:
        run: makes all of the calls once.
        calls: how many calls of the operation that is.
        outputs: the results of all calls of the last run.
        is_graph: whether the outputs are memory that each run writes to.
    """

    run: Callable[[], Any]
    calls: int
    outputs: Callable[[], Sequence[Any]]
    is_graph: bool = False


class ModePlugin(BasePlugin):
    """Execution modes by name. Each is a class with `device`, the only device type that has it (None: all), and
    `prepare(function, device, calls)`, which returns a `Runner`; only graphs make more than one call.
    """


def _single(function: Callable[[], Any]) -> Runner:
    last: list[Any] = [None]

    def run() -> Any:
        last[0] = function()
        return last[0]

    return Runner(run, 1, lambda: tuple(last))


@ModePlugin("eager").register()
class Eager:
    """The function as it is."""

    device = None

    @staticmethod
    def prepare(function: Callable[[], Any], device: str, calls: int = GRAPH_CALLS) -> Runner:  # noqa: ARG004
        """One call of the function."""
        return _single(function)


@ModePlugin("compile").register()
class Compile:
    """torch.compile, in one graph."""

    device = None

    @staticmethod
    def prepare(function: Callable[[], Any], device: str, calls: int = GRAPH_CALLS) -> Runner:  # noqa: ARG004
        """One call of the compiled function; a graph break is an error.

        Raises:
            CaptureError: it does not compile.
        """
        import torch

        # Each case compiles anew: what was compiled for others counts towards a limit, after which nothing is.
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True)
        try:
            compiled()
        except Exception as error:
            raise CaptureError(f"torch.compile: {type(error).__name__}: {error}") from error
        return _single(compiled)


def _capture(function: Callable[[], Any], device: str, calls: int, graph_type: str) -> Runner:
    import torch

    module: Any = torch.get_device_module(device)
    try:
        # The first calls, which may allocate and compile, run on a stream of their own before anything is recorded.
        stream = module.Stream()
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            for _ in range(3):
                function()
        module.current_stream().wait_stream(stream)
        graph = getattr(module, graph_type)()
        outputs: list[Any] = []
        with module.graph(graph):
            outputs += [function() for _ in range(calls)]
        module.synchronize()
    except Exception as error:
        raise CaptureError(f"capture of {calls} calls: {type(error).__name__}: {error}") from error
    return Runner(graph.replay, calls, lambda: outputs, is_graph=True)


@ModePlugin("cudagraph").register()
class CudaGraph:
    """A captured CUDA graph."""

    device = "cuda"

    @staticmethod
    def prepare(function: Callable[[], Any], device: str, calls: int = GRAPH_CALLS) -> Runner:
        """Capture independent calls, each with a result of its own.

        Raises:
            CaptureError: the capture fails.
        """
        return _capture(function, device, calls, "CUDAGraph")


@ModePlugin("aclgraph").register()
class AclGraph:
    """A captured graph of Ascend's ACL; torch_npu offers it as torch does CUDA's."""

    device = "npu"

    @staticmethod
    def prepare(function: Callable[[], Any], device: str, calls: int = GRAPH_CALLS) -> Runner:
        """Capture independent calls, each with a result of its own.

        Raises:
            CaptureError: the capture fails.
        """
        return _capture(function, device, calls, "NPUGraph")


def check_target(mode: str, device: str) -> None:
    """Refuse a device that is not there, and a mode that it does not have.

    Raises:
        ValueError: it names both.
    """
    import torch

    kind = device.partition(":")[0]
    needed = ModePlugin(mode).device
    if needed is not None and needed != kind:
        raise ValueError(f"mode {mode} runs on {needed}, not on {kind}; use --device {needed}, or another --mode")
    if kind == "npu" and missing_requirement(("torch_npu",)) is not None:
        raise ValueError("device npu needs torch_npu, which is not installed; pip install it, or use another --device")
    try:
        available = kind == "cpu" or bool(torch.get_device_module(device).is_available())
    except RuntimeError as error:
        # torch says for some names that it knows none such, for others that no module is there.
        raise ValueError(f"unknown device {device!r}: {error}".splitlines()[0]) from error
    if not available:
        raise ValueError(f"device {device} is not there, says torch {torch.__version__}; use another --device")


def current_device(device: str) -> AbstractContextManager[Any]:
    """A context in which streams, events and graphs are those of the device, which may be any of several."""
    import torch

    target = torch.device(device)
    if target.type == "cpu" or target.index is None:
        return nullcontext()
    module: Any = torch.get_device_module(device)
    return cast("AbstractContextManager[Any]", module.device(target))
