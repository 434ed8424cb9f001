"""`gated_activation`: act(gate) * up of a packed tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...dispatch.contract import BackendModule, OpContract, Operation, PreparedKernel
from ...dispatch.runtime import prepared
from .. import is_operation

if TYPE_CHECKING:
    from .operator import check_arguments as check_arguments
    from .operator import gated_activation as gated_activation

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

CONTRACT = OpContract(
    operation="gated_activation",
    version=1,
    mutates=(),
    aliases_inputs=False,
    numerical_mode="rounded to the dtype of the input after the activation, and after the product",
)
BACKWARD_CONTRACT = OpContract(
    operation="gated_activation_backward",
    version=1,
    mutates=(),
    aliases_inputs=False,
    numerical_mode="computed in float32, or float64 for float64, with the activation rounded as in the forward; "
    "rounded once",
)
_BACKENDS = (
    BackendModule(".reference", "any"),
    BackendModule(".cpu", "cpu", ("extension:cpu",)),
    BackendModule(".triton", "cuda", ("triton",)),
    BackendModule(".npu", "npu", ("torch_npu",)),
)
OPERATION = Operation(CONTRACT, _BACKENDS)
BACKWARD = Operation(BACKWARD_CONTRACT, _BACKENDS, follows=CONTRACT.operation)

_LAZY = dict.fromkeys(("check_arguments", "gated_activation"), "operator")


def prepare_gated_activation(device: Any = None) -> PreparedKernel:
    """The implementation that is selected for a device; None: the one in use. See `dispatch.runtime.prepared`."""
    return prepared(CONTRACT.operation, device)


is_operation(__name__, _LAZY)
