"""Where implementations are registered: one registry for each device, each frozen on its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from .contract import ANY_DEVICE, EXECUTION_MODES, KernelSpec, OpContract, device_type

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


def _check_fields(device: Any, priority: Any, **texts: Any) -> None:
    for field, value in texts.items():
        if not isinstance(value, str):
            raise TypeError(f"{field} must be text, not {type(value).__name__} ({value!r})")
        if not value.strip():
            raise ValueError(f"{field} must not be empty; KernelSpec says what it is")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise TypeError(f"priority must be a whole number, not {type(priority).__name__} ({priority!r})")
    if device != ANY_DEVICE and device_type(device) != device:
        raise ValueError(f"device must be a device type; given {device!r}: write {device_type(device)!r}")


def _by_name_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """For `register_kernel`, which a class of kernels by id is given by mistake."""

    @wraps(function)
    def checked(*given: Any, **fields: Any) -> Any:
        if given:
            raise TypeError(
                f"register_kernel(name=..., contract=..., ...) registers an implementation of an operation; given "
                f"{given[0]!r}. For a class of kernels by id, layout_kernels.kernel_plugins.register_kernel is meant"
            )
        return function(module=sys._getframe(1).f_globals.get("__name__", "__main__"), **fields)

    return checked


@_by_name_only
def register_kernel(
    *,
    name: str,
    contract: OpContract,
    device: str,
    execution_modes: tuple[str, ...],
    input_domain: str,
    solution: str,
    priority: int = 0,
    module: str = "",
) -> Callable[[Function], Function]:
    """Register an implementation of an operation: a decorator, or `register_kernel(...)(existing)`.

    The arguments are the fields of `KernelSpec`; ``module`` is the one that declares it, by default the caller's. The
    callable is returned as it is, without a wrapper.

    Raises:
        TypeError: a field is of another type than `KernelSpec` has, or what is registered cannot be called.
        ValueError: an unknown execution mode or device, a device with a number, an empty name, or one that is taken.
        RuntimeError: the device is initialised already.
    """
    if not isinstance(contract, OpContract):
        raise TypeError(
            f"contract must be an OpContract, not {type(contract).__name__}; import the operation's CONTRACT"
        )
    if isinstance(execution_modes, str):
        raise TypeError(f"execution_modes must be a tuple of names, not the text {execution_modes!r}")
    execution_modes = tuple(execution_modes)
    unknown = [mode for mode in execution_modes if mode not in EXECUTION_MODES]
    if unknown or not execution_modes:
        raise ValueError(f"execution_modes must be some of {', '.join(EXECUTION_MODES)}; given {execution_modes}")
    _check_fields(device, priority, name=name, input_domain=input_domain, solution=solution)
    spec = KernelSpec(name, contract, device, execution_modes, input_domain, solution, priority)

    def register(function: Function) -> Function:
        if not callable(function):
            raise TypeError(f"implementation {name!r} must be callable, not {type(function).__name__}")
        REGISTRIES.register(spec, function, module)
        return function

    return register
