"""`gated_rms_norm` for torch: argument check, operators, autograd and the public function."""

from __future__ import annotations

from typing import Any

import torch

from ...dispatch.launch import define_operator, is_direct
from ...dispatch.runtime import RUNTIME
from ..arguments import check_choice, check_eps, check_grad, check_rows, check_tensor, check_vector
from . import ACTIVATIONS, BACKWARD_CONTRACT, CONTRACT, FLAVOURS, ORDERS, reference

_forward = RUNTIME.functions(CONTRACT.operation)


def check_arguments(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    flavour: str,
    order: str,
    group_size: int | None,
    activation: str,
) -> None:
    """What every launch, fake implementation and suite asks of the arguments.

    Raises:
        TypeError, ValueError: they name the argument, what was given and what is allowed.
    """
    check_rows("x", x)
    check_tensor("gate", gate, x)
    if gate.shape != x.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)}; it must be {tuple(x.shape)}, the shape of x")
    if gate.dtype is torch.float64 and x.dtype is not torch.float64:
        raise TypeError(f"gate is float64 and x {x.dtype}; convert gate to float32 or x to float64")
    if weight is not None:
        check_vector("weight", weight, x.shape[-1], x)
    check_eps(eps)
    check_choice("flavour", flavour, FLAVOURS)
    check_choice("order", order, ORDERS)
    check_choice("activation", activation, ACTIVATIONS)
    if group_size is not None and (isinstance(group_size, bool) or not isinstance(group_size, (int, torch.SymInt))):
        raise TypeError(f"group_size must be an int or None, not {type(group_size).__name__}")
    if group_size is not None and (group_size < 1 or x.shape[-1] % group_size):
        raise ValueError(f"group_size must divide the width {x.shape[-1]}; given {group_size}")


def result_dtype(x: torch.dtype, weight: torch.dtype | None, flavour: str, order: str) -> torch.dtype:
    """The dtype of the result: that of x, or the wider of x's and weight's where the scale comes last."""
    if weight is None or flavour != "cast_then_scale" or order != "gate_then_norm":
        return x
    return torch.promote_types(x, weight)


def _result(
    x: torch.Tensor, _: torch.Tensor, weight: torch.Tensor | None, __: float, flavour: str, order: str, *___: Any
) -> torch.Tensor:
    dtype = result_dtype(x.dtype, None if weight is None else weight.dtype, flavour, order)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _check_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    flavour: str,
    order: str,
    group_size: int | None,
    activation: str,
    need_x: bool,  # noqa: ARG001
    need_gate: bool,  # noqa: ARG001
    need_weight: bool,  # noqa: ARG001
) -> None:
    check_arguments(x, gate, weight, eps, flavour, order, group_size, activation)
    check_grad(grad, x.shape, x)


def _result_of_backward(_: torch.Tensor, *args: Any) -> tuple[torch.Tensor | None, ...]:
    needed = (tensor if need else None for tensor, need in zip(args[:3], args[-3:], strict=True))  # x, gate, weight
    form = torch.contiguous_format
    return tuple(None if tensor is None else torch.empty_like(tensor, memory_format=form) for tensor in needed)


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        flavour: str,
        order: str,
        group_size: int | None,
        activation: str,
    ) -> torch.Tensor:
        return FORWARD(x, gate, weight, eps, flavour, order, group_size, activation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG004, torch passes it by name
        ctx.save_for_backward(*inputs[:3])
        ctx.settings = inputs[3:]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs = ctx.needs_input_grad[:3]
        grads = BACKWARD(grad, *ctx.saved_tensors, *ctx.settings, *needs)
        return *(found if need else None for found, need in zip(grads, needs, strict=True)), *(None,) * 5


FORWARD = define_operator(
    CONTRACT.operation,
    check_arguments,
    _result,
    mutates_args=CONTRACT.mutates,
    differentiable=_GatedRMSNorm.apply,
    plain=reference.gated_rms_norm,
)
BACKWARD = define_operator(
    BACKWARD_CONTRACT.operation,
    _check_backward,
    _result_of_backward,
    mutates_args=BACKWARD_CONTRACT.mutates,
    differentiable=reference.gated_rms_norm_backward,
    returns=tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    like=1,
)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    flavour: str = "cast_then_scale",
    order: str = "gate_then_norm",
    group_size: int | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """Root mean square norm with a gate, over the last dimension or over groups of it.

    All in float32 (float64 for float64): a = act(gate); norm(v) = v / sqrt(mean(v^2) + eps), the mean over each group.

    - `gate_then_norm`: scale(norm(x * a)) (source: transformers' `MambaRMSNormGated`, `Zamba2RMSNormGated` in groups);
    - `norm_then_gate`: round(scale(norm(x)) * a) (`Qwen3NextRMSNormGated`, `KimiLinearRMSNormGated`).

    scale(n) is weight * round(n) with `cast_then_scale`, and weight * n with `scale_then_cast`
    (`FalconH1RMSNormGated`); round is to the dtype of x, and ends scale_then_cast too.

    Args:
        x: [..., width], any strides; float16, bfloat16, float32 or float64.
        gate: the shape of x; of the same dtypes (float64 only beside float64).
        weight: [width], likewise, or None: unscaled.
        eps: finite and at least 0.
        flavour: `cast_then_scale` or `scale_then_cast`.
        order: `gate_then_norm` or `norm_then_gate`.
        group_size: a divisor of width, the elements that are normalised together; None: the whole width.
        activation: `silu` or `sigmoid`.

    Returns:
        [..., width], contiguous, memory of its own. The dtype of x; gate_then_norm with cast_then_scale, x's and
        weight's promoted.

    Raises:
        TypeError, ValueError: an argument is not as above.
        NotImplementedError: called under `torch.func.vmap`; leading dimensions already are a batch.
    """
    args = (x, gate, weight, eps, flavour, order, group_size, activation)
    if torch.compiler.is_compiling():
        return FORWARD(*args)
    check_arguments(*args)
    if is_direct(x, gate, weight):
        return _forward[x.device.type](*args)
    return FORWARD(*args)
