"""`rms_norm` for torch: argument check, operators, autograd and the public function."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...dispatch.launch import define_operator, is_direct
from ...dispatch.runtime import RUNTIME
from ..arguments import (
    DTYPES,
    check_choice,
    check_eps,
    check_grad,
    check_rows,
    check_vector,
    device_of,
    fits_vector,
)
from . import BACKWARD_CONTRACT, CONTRACT, FLAVOURS, reference

_forward = RUNTIME.functions(CONTRACT.operation)


def check_arguments(x: torch.Tensor, weight: torch.Tensor | None, eps: float, flavour: str) -> None:
    """What every launch, fake implementation and suite asks of the arguments.

    Raises:
        TypeError, ValueError: they name the argument, what was given and what is allowed.
    """
    check_rows("x", x)
    if weight is not None:
        check_vector("weight", weight, x.shape[-1], x)
    check_eps(eps)
    check_choice("flavour", flavour, FLAVOURS)


def fits(x: torch.Tensor, weight: torch.Tensor | None, eps: float, flavour: str) -> bool:
    """Whether `check_arguments` passes, for dense tensors and an eps that is a float."""
    shape = x.shape
    return (
        len(shape) > 0
        and shape[-1] > 0
        and x.dtype in DTYPES
        and (weight is None or fits_vector(weight, shape[-1], x))
        and type(eps) is float
        and 0.0 <= eps < math.inf
        and flavour in FLAVOURS
    )


def result_dtype(x: torch.dtype, weight: torch.dtype | None, flavour: str) -> torch.dtype:
    """The dtype of the result: that of x, but cast_then_scale with a wider weight gives the wider dtype."""
    if weight is None or flavour != "cast_then_scale":
        return x
    return torch.promote_types(x, weight)


def _result(x: torch.Tensor, weight: torch.Tensor | None, _: float, flavour: str) -> torch.Tensor:
    dtype = result_dtype(x.dtype, None if weight is None else weight.dtype, flavour)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _check_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    flavour: str,
    need_x: bool,  # noqa: ARG001
    need_weight: bool,  # noqa: ARG001
) -> None:
    check_arguments(x, weight, eps, flavour)
    check_grad(grad, x.shape, x)


def _result_of_backward(_: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, *rest: Any) -> tuple[Any, Any]:
    need_x, need_weight = rest[-2:]
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_x else None
    return grad_x, torch.empty_like(weight) if need_weight and weight is not None else None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor | None, eps: float, flavour: str) -> torch.Tensor:
        return FORWARD(x, weight, eps, flavour)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG004, torch passes it by name
        x, weight, ctx.eps, ctx.flavour = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad[:2]
        grad_x, grad_weight = BACKWARD(grad, x, weight, ctx.eps, ctx.flavour, need_x, need_weight)
        return grad_x if need_x else None, grad_weight if need_weight else None, None, None


FORWARD = define_operator(
    CONTRACT.operation,
    check_arguments,
    _result,
    mutates_args=CONTRACT.mutates,
    differentiable=_RMSNorm.apply,
    plain=reference.rms_norm,
)
BACKWARD = define_operator(
    BACKWARD_CONTRACT.operation,
    _check_backward,
    _result_of_backward,
    mutates_args=BACKWARD_CONTRACT.mutates,
    differentiable=reference.rms_norm_backward,
    returns=tuple[torch.Tensor, torch.Tensor],
    like=1,
)


def direct(x: torch.Tensor, weight: torch.Tensor | None, eps: float, flavour: str) -> torch.Tensor | None:
    """Fast path of `rms_norm`: the selected implementation's result, or None for what is not the usual case."""
    if is_direct(x, weight) and fits(x, weight, eps, flavour):
        return _forward[device_of(x)](x, weight, eps, flavour)
    return None


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6, flavour: str = "cast_then_scale"
) -> torch.Tensor:
    """Root mean square norm over the last dimension.

    n = x / sqrt(mean(x^2) + eps), computed in float32 (float64 for float64), then

    - `cast_then_scale`: weight * round(n), round being to the dtype of x (source: transformers' `LlamaRMSNorm`);
    - `scale_then_cast`: round(weight * n) (`Olmo2RMSNorm`, `Gemma3nRMSNorm`);
    - `one_plus_scale`: round((1 + weight) * n), the sum in the dtype of the computation (`GemmaRMSNorm`).

    Args:
        x: [..., width], any strides; float16, bfloat16, float32 or float64; one dimension at least, width at least 1.
        weight: [width], of the same dtypes (float64 only beside float64), or None: unscaled, round(n).
        eps: finite and at least 0.
        flavour: one of the three names.

    Returns:
        [..., width], contiguous, memory of its own. The dtype of x; with cast_then_scale, x's and weight's promoted.

    Raises:
        TypeError, ValueError: an argument is not as above.
        NotImplementedError: called under `torch.func.vmap`; leading dimensions already are a batch.
    """
    if torch.compiler.is_compiling():
        return FORWARD(x, weight, eps, flavour)
    if (result := direct(x, weight, eps, flavour)) is not None:
        return result
    check_arguments(x, weight, eps, flavour)
    return FORWARD(x, weight, eps, flavour)
