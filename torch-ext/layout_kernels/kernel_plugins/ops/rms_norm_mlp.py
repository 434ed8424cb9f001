"""Norm and gated MLP that follow one another."""

from __future__ import annotations

from typing import Any

from ..base import BaseKernel, DeviceType
from ..live import apply, find_blocks
from ..registry import register_kernel


class _Kernel(BaseKernel):
    @classmethod
    def apply(cls, **kwargs: Any) -> Any:
        """Put our layers in place; see ``apply_kernel``."""
        cls.require_deps()
        return apply(cls._kernel_id, find_blocks, **kwargs)


@register_kernel
class CpuBlocks(_Kernel):
    """For the CPU."""

    _kernel_id = "cpu_fused_rmsnorm_mlp"
    _device = DeviceType.CPU


@register_kernel
class CudaBlocks(_Kernel):
    """For CUDA."""

    _kernel_id = "cuda_fused_rmsnorm_mlp"
    _device = DeviceType.CUDA


@register_kernel
class NpuBlocks(_Kernel):
    """For Ascend NPUs."""

    _kernel_id = "npu_fused_rmsnorm_mlp"
    _device = DeviceType.NPU
