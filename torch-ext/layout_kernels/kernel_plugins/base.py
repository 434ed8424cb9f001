"""The protocol of a kernel that is applied to a loaded model, as LLaMA-Factory's plugins have it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, ClassVar

from ..plugin import ensure_methods_implemented


class DeviceType(str, Enum):
    """Kinds of device that a kernel may be for."""

    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"
    XPU = "xpu"
    MPS = "mps"


def current_device() -> DeviceType:
    """The accelerator that torch has here, or the CPU where there is none."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    try:
        return DeviceType(accelerator.type if accelerator is not None else "cpu")
    except ValueError:
        return DeviceType.CPU


class BaseKernel(ABC):
    """A kernel with an id and a device. Never instantiated: its methods are class methods.

    A subclass sets ``_kernel_id`` and ``_device`` and implements ``apply``.
    """

    _kernel_id: ClassVar[Any] = ""
    _device: ClassVar[DeviceType] = DeviceType.CPU

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ensure_methods_implemented(cls)

    @classmethod
    def check_deps(cls) -> bool:
        """Whether what the kernel needs is there; by default, whether the current device is the kernel's."""
        return cls._device == current_device()

    @classmethod
    def require_deps(cls) -> None:
        """What ``apply`` asks first.

        Raises:
            RuntimeError: :meth:`check_deps` is false.
        """
        if not cls.check_deps():
            here = current_device()
            why = "" if cls._device == here else f": it is for {cls._device.value}, the current device is {here.value}"
            raise RuntimeError(
                f"the dependencies of {cls._kernel_id!r} are not met: {cls.__name__}.check_deps() is false{why}"
            )

    @classmethod
    @abstractmethod
    def apply(cls, **kwargs: Any) -> Any:
        """Apply the kernel to ``kwargs["model"]`` and return the model."""
