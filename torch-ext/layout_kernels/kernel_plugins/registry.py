"""The table of kernels by id."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ..plugin import BasePlugin
from . import ops
from .base import BaseKernel, DeviceType, current_device

Kernel = TypeVar("Kernel", bound=type[BaseKernel])


class KernelPlugin(BasePlugin):
    """``KernelPlugin("cpu_fused_rmsnorm").apply(model=model)``: kernels by id, over the table of :class:`Registry`."""

    def register(self) -> Callable[[Any], Any]:
        """A decorator that registers a kernel class under this id, with the checks of :meth:`Registry.register`.

        Raises:
            ValueError: no id, or the class has another one.
        """
        name = self.name
        if not name:
            raise ValueError("KernelPlugin().register() needs an id: KernelPlugin('<id>').register()")

        def register(cls: Any) -> Any:
            given = getattr(cls, "_kernel_id", "")
            if given and given != name:
                raise ValueError(f"{cls.__name__} has the id {given!r}, registered as {name!r}: give one id")
            if isinstance(cls, type) and issubclass(cls, BaseKernel):
                cls._kernel_id = name
            return Registry.register(cls)

        return register


class Registry:
    """Kernels by id, for the current device."""

    _elsewhere: ClassVar[dict[str, DeviceType]] = {}  # ids of kernels of other devices, for the error that names them

    @classmethod
    def register(cls, kernel_cls: Kernel) -> Kernel:
        """Register a kernel class and return it. One for another device than the current is returned, not registered.

        Raises:
            TypeError: ``kernel_cls`` is no subclass of BaseKernel, or its ``_device`` is no DeviceType.
            ValueError: it has no id, or the id is taken by another class.
        """
        if not (isinstance(kernel_cls, type) and issubclass(kernel_cls, BaseKernel)):
            raise TypeError(f"expected a subclass of BaseKernel, got {kernel_cls!r}")
        name = kernel_cls._kernel_id
        if not isinstance(name, str) or not name:
            raise ValueError(f"{kernel_cls.__name__} has no id: set _kernel_id = '<device>_<what it does>'")
        if not isinstance(kernel_cls._device, DeviceType):
            raise TypeError(
                f"{kernel_cls.__name__}._device is {kernel_cls._device!r}, expected one of {list(DeviceType)}"
            )
        taken = KernelPlugin._registry.get(name)
        if taken is not None and taken is not kernel_cls:
            raise ValueError(f"the id {name!r} is taken by {taken.__module__}.{taken.__qualname__}")
        if kernel_cls._device != current_device():
            cls._elsewhere[name] = kernel_cls._device
            return kernel_cls
        KernelPlugin._registry[name] = kernel_cls
        return kernel_cls

    @classmethod
    def get(cls, kernel_id: str) -> type[BaseKernel] | None:
        """The kernel class with this id, or None."""
        return KernelPlugin._registry.get(kernel_id)

    @classmethod
    def ids(cls) -> tuple[str, ...]:
        """The ids for the current device, sorted: those of this package, and what else was registered."""
        scan_all_kernels()
        return KernelPlugin.names()

    @classmethod
    def unknown(cls, kernel_id: str) -> ValueError:
        """The error for an id that is not registered."""
        if kernel_id in cls._elsewhere:
            return ValueError(
                f"kernel {kernel_id!r} is for {cls._elsewhere[kernel_id].value}, the current device is "
                f"{current_device().value}; kernels for it: {', '.join(cls.ids()) or 'none'}"
            )
        return ValueError(f"no kernel with the id {kernel_id!r}; there are: {', '.join(cls.ids()) or 'none'}")


def scan_all_kernels() -> None:
    """Import every ``.py`` below ``kernel_plugins/ops``, which registers its kernels. An import error surfaces."""
    for folder in map(Path, ops.__path__):
        for file in sorted(folder.rglob("*.py")):  # also in folders without an __init__.py
            parts = file.relative_to(folder).with_suffix("").parts
            importlib.import_module(".".join((ops.__name__, *(part for part in parts if part != "__init__"))))


register_kernel = Registry.register
