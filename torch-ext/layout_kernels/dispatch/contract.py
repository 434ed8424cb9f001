"""What operations promise and what implementations declare: plain data, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

EXECUTION_MODES = ("eager", "compile", "cudagraph", "aclgraph")
ANY_DEVICE = "any"
_KNOWN_DEVICES = ("cpu", "cuda", "npu", "meta")


@dataclass(frozen=True)
class OpContract:
    """What an operation promises, whichever implementation runs.

    Attributes:
        operation: its name, as in the catalog and in `LAYOUT_KERNELS_OVERRIDE_<OPERATION>`.
        version: raised when the meaning changes; implementations of another version are not selected.
        mutates: names of the arguments that are written to.
        aliases_inputs: whether a result may share memory with an argument.
        numerical_mode: where results are rounded, and in which dtype sums are made.
    """

    operation: str
    version: int
    mutates: tuple[str, ...]
    aliases_inputs: bool
    numerical_mode: str


@dataclass(frozen=True)
class KernelSpec:
    """What an implementation declares about itself.

    Attributes:
        name: unique, for example "cpu.native.rms_norm".
        contract: the contract that it fulfils.
        device: device type, for example "cpu", or "any".
        execution_modes: those of `EXECUTION_MODES` in which it works.
        input_domain: which arguments it takes, in words; dispatch does not read it, the implementation checks.
        solution: what it is made with, for example "reference", "native", "triton"; an override may name it.
        priority: the highest compatible one is selected, then the first name.
    """

    name: str
    contract: OpContract
    device: str
    execution_modes: tuple[str, ...]
    input_domain: str
    solution: str
    priority: int = 0


@dataclass(frozen=True)
class PreparedKernel:
    """The implementation of an operation that was selected for a device.

    Attributes:
        spec: what it declares.
        function: the callable, to be kept and called with every argument in the operation's order. It does not check
            them, which is what the operation's `check_arguments` is for, and may read pointers: give it plain tensors
            only, outside every dispatch mode and functorch transform.
        excluded: the implementations that could not be selected, each with its reason.
    """

    spec: KernelSpec
    function: Callable[..., Any]
    excluded: Mapping[str, str]


@dataclass(frozen=True)
class BackendModule:
    """A module whose import registers implementations of an operation.

    Attributes:
        module: its name, relative to the operation's package, for example ".cpu".
        device: the device type for which it is imported, or "any".
        requires: what must be present: the name of an installed top-level package ("triton"), or "extension:<kind>", a
            native extension of this package. What is absent is recorded in `PreparedKernel.excluded`; what is present
            but does not load is an error.
    """

    module: str
    device: str
    requires: tuple[str, ...] = ()


@dataclass(frozen=True)
class Operation:
    """An entry of the catalog.

    Attributes:
        contract: what it promises.
        backends: the modules with its implementations.
        follows: another operation whose solution this one takes where it has an implementation of that solution; so
            a backward runs beside its forward.
    """

    contract: OpContract
    backends: tuple[BackendModule, ...]
    follows: str | None = None


def device_type(device: Any) -> str:
    """ "cuda" for "cuda", "cuda:1" or a torch.device.

    Raises:
        TypeError: neither text nor a device.
        ValueError: a device type that torch does not know.
    """
    name = getattr(device, "type", device)
    if not isinstance(name, str):
        raise TypeError(f"device must be a name such as 'cpu' or a torch.device, not {type(device).__name__}")
    name = name.partition(":")[0]
    if name not in _KNOWN_DEVICES:
        import torch

        try:
            torch.device(name)
        except RuntimeError as error:
            raise ValueError(
                f"unknown device {device!r}; {', '.join(_KNOWN_DEVICES)}, or another of torch's"
            ) from error
    return name
