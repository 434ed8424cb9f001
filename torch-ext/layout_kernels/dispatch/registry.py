"""Where implementations are registered: one registry for each device, each frozen on its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from .contract import ANY_DEVICE, EXECUTION_MODES, KernelSpec, OpContract

Function = TypeVar("Function", bound=Callable[..., Any])


class RegisteredKernel(NamedTuple):
    """A specification, its callable, and the module that registered it."""

    spec: KernelSpec
    function: Callable[..., Any]
    module: str


class KernelRegistry:
    """The implementations for one device type, by name."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.frozen = False
        self._kernels: dict[str, RegisteredKernel] = {}

    def get(self, name: str) -> RegisteredKernel:
        """The implementation called `name`.

        Raises:
            ValueError: there is none; the message lists those that are there.
        """
        if name not in self._kernels:
            known = ", ".join(sorted(self._kernels)) or "none"
            raise ValueError(f"no implementation {name!r} is registered for {self.device}; registered: {known}")
        return self._kernels[name]

    def __contains__(self, name: str) -> bool:
        return name in self._kernels

    def __iter__(self) -> Iterator[RegisteredKernel]:
        return iter(tuple(self._kernels.values()))

    def register(self, spec: KernelSpec, function: Callable[..., Any], module: str) -> None:
        """Add an implementation that `module` declares.

        Raises:
            ValueError: the name is taken.
            RuntimeError: the registry is frozen.
        """
        if self.frozen:
            raise RuntimeError(
                f"cannot register {spec.name!r}: {self.device} is initialised and its registry frozen; "
                "register before initialize() and before the first use of an operation on that device"
            )
        if spec.name in self._kernels:
            raise ValueError(f"an implementation {spec.name!r} is already registered for {self.device}; rename one")
        self._kernels[spec.name] = RegisteredKernel(spec, function, module)

    def freeze(self) -> None:
        """Refuse registrations from now on."""
        self.frozen = True

    def drop_unloaded(self) -> None:
        """Forget what modules registered whose import failed: a second attempt registers it again."""
        self._kernels = {name: kernel for name, kernel in self._kernels.items() if kernel.module in sys.modules}


class Registries:
    """A registry for each device type, and one for the implementations that run on any."""

    def __init__(self) -> None:
        self._by_device: dict[str, KernelRegistry] = {}

    def of(self, device: str) -> KernelRegistry:
        """The registry of a device type, made on first use."""
        return self._by_device.setdefault(device, KernelRegistry(device))

    def register(self, spec: KernelSpec, function: Callable[..., Any], module: str) -> None:
        """Add an implementation to its device's registry; names are unique over all devices."""
        for registry in self._by_device.values():
            if registry.device != spec.device and spec.name in registry:
                raise ValueError(
                    f"an implementation {spec.name!r} is already registered for {registry.device}; rename one"
                )
        self.of(spec.device).register(spec, function, module)

    def candidates(self, device: str) -> list[RegisteredKernel]:
        """What is registered for the device type, and for any."""
        return [*self.of(device), *self.of(ANY_DEVICE)]

    def drop_unloaded(self) -> None:
        """Forget what modules registered whose import failed."""
        for registry in self._by_device.values():
            registry.drop_unloaded()


REGISTRIES = Registries()


def register_kernel(
    *,
    name: str,
    contract: OpContract,
    device: str,
    execution_modes: tuple[str, ...],
    input_domain: str,
    solution: str,
    priority: int = 0,
) -> Callable[[Function], Function]:
    """Register an implementation of an operation: a decorator, or `register_kernel(...)(existing)`.

    The arguments are the fields of `KernelSpec`. The callable is returned as it is, without a wrapper.

    Raises:
        TypeError: the contract is no `OpContract`, or the modes are no sequence of names, or what is registered
            cannot be called.
        ValueError: an unknown execution mode, or a name that is taken.
        RuntimeError: the device is initialised already.
    """
    if not isinstance(contract, OpContract):
        raise TypeError(
            f"contract must be an OpContract, not {type(contract).__name__}; import the operation's CONTRACT"
        )
    if isinstance(execution_modes, str):
        raise TypeError(f"execution_modes must be a tuple of names, not the text {execution_modes!r}")
    unknown = [mode for mode in execution_modes if mode not in EXECUTION_MODES]
    if unknown or not execution_modes:
        raise ValueError(
            f"execution_modes must be some of {', '.join(EXECUTION_MODES)}; given {tuple(execution_modes)}"
        )
    spec = KernelSpec(name, contract, device, tuple(execution_modes), input_domain, solution, priority)
    module = sys._getframe(1).f_globals.get("__name__", "__main__")

    def register(function: Function) -> Function:
        if not callable(function):
            raise TypeError(f"implementation {name!r} must be callable, not {type(function).__name__}")
        REGISTRIES.register(spec, function, module)
        return function

    return register
