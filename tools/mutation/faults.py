"""All faults."""

from __future__ import annotations

from tools.mutation import in_dispatch, in_kernels, in_models, in_modules, in_operations, in_tools
from tools.mutation.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *in_operations.FAULTS,
    *in_kernels.FAULTS,
    *in_dispatch.FAULTS,
    *in_models.FAULTS,
    *in_modules.FAULTS,
    *in_tools.FAULTS,
)
