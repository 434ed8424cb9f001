"""`rms_norm_mlp`: a norm and the gated MLP behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...dispatch.contract import BackendModule, OpContract, Operation, PreparedKernel
from ...dispatch.runtime import prepared

if TYPE_CHECKING:
    from .operator import check_arguments as check_arguments
    from .operator import rms_norm_mlp as rms_norm_mlp

CONTRACT = OpContract(
    operation="rms_norm_mlp",
    version=1,
    mutates=(),
    aliases_inputs=False,
    numerical_mode="the norm as in rms_norm, then rounded to the projections' dtype after each of: the norm, gate, "
    "up, the activation, the product, down; products are accumulated in float32 or wider",
)
_BACKENDS = (
    BackendModule(".reference", "any"),
    BackendModule(".cpu", "cpu", ("extension:cpu",)),
    BackendModule(".triton", "cuda", ("triton",)),
    BackendModule(".npu", "npu", ("torch_npu",)),
)
OPERATION = Operation(CONTRACT, _BACKENDS)

_LAZY = ("check_arguments", "rms_norm_mlp")


def prepare_rms_norm_mlp(device: Any = None) -> PreparedKernel:
    """The implementation that is selected for a device; None: the one in use. See `dispatch.runtime.prepared`."""
    return prepared(CONTRACT.operation, device)


def __getattr__(name: str) -> Any:
    """What needs torch: the public function and the argument check."""
    if name in _LAZY:
        from . import operator

        return getattr(operator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
