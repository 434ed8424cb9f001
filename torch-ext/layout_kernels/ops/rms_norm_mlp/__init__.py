"""`rms_norm_mlp`: a norm and the gated MLP behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...dispatch.contract import BackendModule, OpContract, Operation, PreparedKernel
from ...dispatch.runtime import prepared
from .. import is_operation
from ..rms_norm import FLAVOURS as _NORM_FLAVOURS

if TYPE_CHECKING:
    from .of_parts import mlp_of_parts as mlp_of_parts
    from .operator import check_arguments as check_arguments
    from .operator import rms_norm_mlp as rms_norm_mlp

# Those of the norm, and "none": x goes into the products as it is, for an MLP whose norm runs in its own module.
FLAVOURS = (*_NORM_FLAVOURS, "none")

CONTRACT = OpContract(
    operation="rms_norm_mlp",
    version=2,
    mutates=(),
    aliases_inputs=False,
    numerical_mode="the norm, if there is one, as in rms_norm, then rounded to the projections' dtype after each of: "
    "the norm, gate, up, the activation, the product, down; products are accumulated in float32 or wider",
)
_BACKENDS = (
    BackendModule(".reference", "any"),
    BackendModule(".cpu", "cpu", ("extension:cpu",)),
    BackendModule(".triton", "cuda", ("triton",)),
    BackendModule(".npu", "npu", ("torch_npu",)),
)
OPERATION = Operation(CONTRACT, _BACKENDS)

_LAZY = {"check_arguments": "operator", "rms_norm_mlp": "operator", "mlp_of_parts": "of_parts"}


def prepare_rms_norm_mlp(device: Any = None) -> PreparedKernel:
    """The implementation that is selected for a device; None: the one in use. See `dispatch.runtime.prepared`."""
    return prepared(CONTRACT.operation, device)


is_operation(__name__, _LAZY)
