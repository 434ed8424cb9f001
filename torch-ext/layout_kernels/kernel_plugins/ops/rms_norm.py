"""Norms of the known RMSNorm flavours."""

from __future__ import annotations

from typing import Any

from ..base import BaseKernel, DeviceType
from ..live import apply, find_norms
from ..registry import register_kernel


class _Kernel(BaseKernel):
    @classmethod
    def apply(cls, **kwargs: Any) -> Any:
        """Put our layers in place; see ``apply_kernel``."""
        cls.require_deps()
        return apply(cls._kernel_id, find_norms, **kwargs)


@register_kernel
class CpuNorms(_Kernel):
    """For the CPU."""

    _kernel_id = "cpu_fused_rmsnorm"
    _device = DeviceType.CPU


@register_kernel
class CudaNorms(_Kernel):
    """For CUDA."""

    _kernel_id = "cuda_fused_rmsnorm"
    _device = DeviceType.CUDA


@register_kernel
class NpuNorms(_Kernel):
    """For Ascend NPUs."""

    _kernel_id = "npu_fused_rmsnorm"
    _device = DeviceType.NPU
