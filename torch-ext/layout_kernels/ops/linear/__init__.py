"""`linear`: the matrix product of a linear layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...dispatch.contract import BackendModule, OpContract, Operation, PreparedKernel
from ...dispatch.runtime import prepared
from .. import is_operation

if TYPE_CHECKING:
    from .operator import check_arguments as check_arguments
    from .operator import linear as linear

CONTRACT = OpContract(
    operation="linear",
    version=1,
    mutates=(),
    aliases_inputs=False,
    numerical_mode="accumulated in float32 or wider, the bias added before the one rounding to the common dtype",
)
_BACKENDS = (
    BackendModule(".reference", "any"),
    BackendModule(".cpu", "cpu", ("extension:cpu",)),
)
OPERATION = Operation(CONTRACT, _BACKENDS)

_LAZY = dict.fromkeys(("check_arguments", "linear"), "operator")


def prepare_linear(device: Any = None) -> PreparedKernel:
    """The implementation that is selected for a device; None: the one in use. See `dispatch.runtime.prepared`."""
    return prepared(CONTRACT.operation, device)


is_operation(__name__, _LAZY)
