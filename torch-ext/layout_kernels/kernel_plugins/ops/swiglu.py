"""Gated MLPs, with gate and up in one product."""

from __future__ import annotations

from typing import Any

from ..base import BaseKernel, DeviceType
from ..live import apply, find_mlps
from ..registry import register_kernel


class _Kernel(BaseKernel):
    @classmethod
    def apply(cls, **kwargs: Any) -> Any:
        """Put our layers in place; see ``apply_kernel``."""
        cls.require_deps()
        return apply(cls._kernel_id, find_mlps, **kwargs)


@register_kernel
class CpuMlps(_Kernel):
    """For the CPU."""

    _kernel_id = "cpu_fused_swiglu"
    _device = DeviceType.CPU


@register_kernel
class CudaMlps(_Kernel):
    """For CUDA."""

    _kernel_id = "cuda_fused_swiglu"
    _device = DeviceType.CUDA


@register_kernel
class NpuMlps(_Kernel):
    """For Ascend NPUs."""

    _kernel_id = "npu_fused_swiglu"
    _device = DeviceType.NPU
