"""Binds the implementations of all operations to a device, once, before the model runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .catalog import Entry, discover, import_backends
from .contract import ANY_DEVICE, EXECUTION_MODES, PreparedKernel, device_type
from .registry import REGISTRIES, Registries
from .selection import parse_overrides, select

# What a device is bound for when nobody called initialize(): layers may be compiled later, and the choice stands.
DEFAULT_MODES = ("eager", "compile")


class _Table(dict[str, Callable[..., Any]]):
    """The selected callable of an operation by device type; asking for a device that is not bound binds it."""

    def __init__(self, bind: Callable[[str], Any]) -> None:
        super().__init__()
        self._bind = bind

    def __missing__(self, device: str) -> Callable[..., Any]:
        self._bind(device)
        return self[device]


@dataclass(frozen=True)
class _Binding:
    modes: tuple[str, ...]
    overrides: Mapping[str, str]
    kernels: Mapping[str, PreparedKernel]


class Runtime:
    """The bindings of every device, over one catalog and its registries."""

    def __init__(self, registries: Registries, catalog: Callable[[], Mapping[str, Entry]] = discover) -> None:
        self._registries = registries
        self._catalog = catalog
        self._bindings: dict[str, _Binding] = {}
        self._functions: dict[str, _Table] = {}
        self._prepare: dict[str, Callable[[], Any]] = {}
        # Reentrant: a backend that is being imported may use another operation.
        self._lock = threading.RLock()

    def initialize(
        self, device: Any, execution_mode: str = "eager", overrides: Mapping[str, str] | None = None
    ) -> Mapping[str, PreparedKernel]:
        """See the function `initialize`."""
        if execution_mode not in EXECUTION_MODES:
            raise ValueError(f"execution_mode must be one of {', '.join(EXECUTION_MODES)}; given {execution_mode!r}")
        with self._lock:
            bound = self._bind(device_type(device), (execution_mode,), overrides)
        prepare = self._prepare.get(device_type(device))
        if prepare is not None:
            prepare()
        return bound

    def on_initialize(self, device: str, prepare: Callable[[], Any]) -> None:
        """Let ``prepare`` run whenever a device type is initialised: what must not wait until a forward."""
        self._prepare[device] = prepare

    def functions(self, operation: str) -> dict[str, Callable[..., Any]]:
        """An operation's selected callables by device type: the same table always, filled by binding devices."""
        # Without the lock: modules ask while they are imported, perhaps by a thread that the lock's holder waits for.
        return self._functions.setdefault(operation, _Table(self._default))

    def prepared(self, operation: str, device: Any = None) -> PreparedKernel:
        """The selected implementation of an operation; a device that is not bound yet is bound with the defaults.

        Args:
            operation: its name.
            device: device or device type; None: the one in use, or torch's default device when there is none.

        Raises:
            ValueError: an unknown operation, or no device given while several are in use.
        """
        kernels = self._default(self._only_device() if device is None else device_type(device))
        if operation not in kernels:
            raise ValueError(f"unknown operation {operation!r}; there are {', '.join(kernels)}")
        return kernels[operation]

    def bound_devices(self) -> tuple[str, ...]:
        """The device types that are in use."""
        return tuple(self._bindings)

    def _only_device(self) -> str:
        if len(self._bindings) > 1:
            raise ValueError(f"name the device: {', '.join(self._bindings)} are all in use")
        if self._bindings:
            return next(iter(self._bindings))
        import torch

        return torch.get_default_device().type

    def _default(self, device: str) -> Mapping[str, PreparedKernel]:
        with self._lock:
            binding = self._bindings.get(device)
            return binding.kernels if binding is not None else self._bind(device, DEFAULT_MODES, None)

    def _bind(
        self, device: str, modes: tuple[str, ...], overrides: Mapping[str, str] | None
    ) -> Mapping[str, PreparedKernel]:
        entries = self._catalog()
        targets = parse_overrides(os.environ, overrides, entries)
        if device == "meta":
            # Nothing is computed there, and an override for a real device must not stop a shape from being asked for.
            targets = {}
        bound = self._bindings.get(device)
        if bound is not None and bound.modes == modes and bound.overrides == targets:
            return bound.kernels
        try:
            excluded = {name: import_backends(entry, device) for name, entry in entries.items()}
        except BaseException:
            self._registries.drop_unloaded()
            raise
        kernels = self._select_all(entries, device, modes, targets, excluded)
        if bound is not None:
            return _unchanged(device, bound, modes, targets, kernels)
        self._registries.of(device).freeze()
        self._registries.of(ANY_DEVICE).freeze()
        binding = _Binding(modes, targets, MappingProxyType(kernels))
        for name, kernel in kernels.items():
            self.functions(name)[device] = kernel.function
        self._bindings[device] = binding
        return binding.kernels

    def _select_all(
        self,
        entries: Mapping[str, Entry],
        device: str,
        modes: tuple[str, ...],
        targets: Mapping[str, str],
        excluded: Mapping[str, Mapping[str, str]],
    ) -> dict[str, PreparedKernel]:
        candidates = self._registries.candidates(device)
        kernels: dict[str, PreparedKernel] = {}
        # Those that follow another come after it.
        for name in sorted(entries, key=lambda key: entries[key].operation.follows is not None):
            operation = entries[name].operation
            leader = kernels.get(operation.follows) if operation.follows else None
            kernels[name] = select(
                operation.contract,
                candidates,
                device,
                modes,
                target=targets.get(name),
                preferred_solution=leader.spec.solution if leader else None,
                excluded=excluded[name],
            )
        return {name: kernels[name] for name in entries}


def _unchanged(
    device: str,
    bound: _Binding,
    modes: tuple[str, ...],
    targets: Mapping[str, str],
    kernels: Mapping[str, PreparedKernel],
) -> Mapping[str, PreparedKernel]:
    """The present binding, where a new configuration chooses the same implementations."""
    if all(kernel.spec == bound.kernels[name].spec for name, kernel in kernels.items()):
        return bound.kernels
    raise RuntimeError(
        f"{device} is in use with mode {' and '.join(bound.modes)} and overrides {dict(bound.overrides)}; it cannot "
        f"change to mode {' and '.join(modes)} and overrides {dict(targets)}. Call initialize({device!r}, ...) before "
        "the first use of an operation on it, or start a new process"
    )


RUNTIME = Runtime(REGISTRIES)


def initialize(
    device: Any, execution_mode: str = "eager", overrides: Mapping[str, str] | None = None
) -> Mapping[str, PreparedKernel]:
    """Select and bind the implementation of every operation for a device, before the model runs.

    Imports the backends of that device whose requirements are present, freezes its registry, and publishes one
    read-only mapping when every operation is prepared; until then nothing changes. Devices are bound independently.
    Without a call, the first use of an operation on a device binds it, among implementations that declare both eager
    and compile.

    Args:
        device: "cpu", "cuda", "npu", another type that torch knows, or a torch.device; an index is left aside.
        execution_mode: "eager", "compile", "cudagraph" or "aclgraph".
        overrides: for an operation, the full name of an implementation or a solution. The environment variable
            `LAYOUT_KERNELS_OVERRIDE_<OPERATION>` comes before it.

    Returns:
        The selected implementation of each operation by name; the same mapping for the same configuration.

    Raises:
        TypeError, ValueError: an unknown device, mode, operation or target, or an override that is not compatible.
        RuntimeError: the device is in use with another configuration.
        Exception: a backend whose requirements are present, but which fails to import, raises its own error.
    """
    return RUNTIME.initialize(device, execution_mode, overrides)


def prepared(operation: str, device: Any = None) -> PreparedKernel:
    """The selected implementation of an operation on a device; see `Runtime.prepared`."""
    return RUNTIME.prepared(operation, device)
