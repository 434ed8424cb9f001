"""Products of plain linear layers, on the CPU."""

from __future__ import annotations

from typing import Any

from ..base import BaseKernel, DeviceType
from ..live import apply, find_linears
from ..registry import register_kernel


@register_kernel
class CpuLinear(BaseKernel):
    """For the CPU: other devices have products of their own that leave nothing to gain."""

    _kernel_id = "cpu_linear"
    _device = DeviceType.CPU

    @classmethod
    def apply(cls, **kwargs: Any) -> Any:
        """Bind our forward to plain ``nn.Linear`` modules; see ``apply_kernel``."""
        cls.require_deps()
        return apply(cls._kernel_id, find_linears, **kwargs)
