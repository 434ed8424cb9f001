"""The kernels of this package, by id: norms, gated MLPs and both in a row for each device, and products for the CPU.

Other devices have products of their own, which leave nothing to gain.
"""

from __future__ import annotations

from typing import Any

from .. import finding, live
from ..base import BaseKernel, DeviceType
from ..registry import register_kernel

EVERYWHERE = (DeviceType.CPU, DeviceType.CUDA, DeviceType.NPU)
# What an id says behind its device, what finds the modules, and for which devices.
TABLE = (
    ("fused_rmsnorm_mlp", finding.find_blocks, EVERYWHERE),
    ("fused_rmsnorm", finding.find_norms, EVERYWHERE),
    ("fused_swiglu", finding.find_mlps, EVERYWHERE),
    ("linear", finding.find_linears, (DeviceType.CPU,)),
)


def _kernel(device: DeviceType, what: str, find: Any) -> type[BaseKernel]:
    @register_kernel
    class Kernel(BaseKernel):
        """Our layers in the modules that ``find`` names; see ``apply_kernel``."""

        _kernel_id = f"{device.value}_{what}"
        _device = device

        @classmethod
        def apply(cls, **kwargs: Any) -> Any:
            """Put our layers in place."""
            cls.require_deps()
            return live.apply(cls._kernel_id, find, **kwargs)

    return Kernel


KERNELS = {
    kernel._kernel_id: kernel
    for what, find, devices in TABLE
    for kernel in (_kernel(device, what, find) for device in devices)
}
