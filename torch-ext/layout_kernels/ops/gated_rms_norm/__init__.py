"""`gated_rms_norm`: root mean square norm with a gate, in groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...dispatch.contract import BackendModule, OpContract, Operation, PreparedKernel
from ...dispatch.runtime import prepared
from .. import is_operation

if TYPE_CHECKING:
    from .operator import check_arguments as check_arguments
    from .operator import gated_rms_norm as gated_rms_norm
    from .operator import result_dtype as result_dtype

ACTIVATIONS = ("silu", "sigmoid")
FLAVOURS = ("cast_then_scale", "scale_then_cast")
ORDERS = ("gate_then_norm", "norm_then_gate")

CONTRACT = OpContract(
    operation="gated_rms_norm",
    version=1,
    mutates=(),
    aliases_inputs=False,
    numerical_mode="computed in float32, or float64 for float64; cast_then_scale rounds to the dtype of x before the "
    "scale, and the result is rounded once more",
)
BACKWARD_CONTRACT = OpContract(
    operation="gated_rms_norm_backward",
    version=1,
    mutates=(),
    aliases_inputs=False,
    numerical_mode="sums in float32, or float64 for float64; each gradient rounded once, to its tensor's dtype",
)
_BACKENDS = (
    BackendModule(".reference", "any"),
    BackendModule(".cpu", "cpu", ("extension:cpu",)),
    BackendModule(".triton", "cuda", ("triton",)),
    BackendModule(".npu", "npu", ("torch_npu",)),
)
OPERATION = Operation(CONTRACT, _BACKENDS)
BACKWARD = Operation(BACKWARD_CONTRACT, _BACKENDS, follows=CONTRACT.operation)

_LAZY = dict.fromkeys(("check_arguments", "gated_rms_norm", "result_dtype"), "operator")


def prepare_gated_rms_norm(device: Any = None) -> PreparedKernel:
    """The implementation that is selected for a device; None: the one in use. See `dispatch.runtime.prepared`."""
    return prepared(CONTRACT.operation, device)


is_operation(__name__, _LAZY)
