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
    or_empty,
)
from . import BACKWARD_CONTRACT, CONTRACT, FLAVOURS, reference

_forward = RUNTIME.functions(CONTRACT.operation)
_backward = RUNTIME.functions(BACKWARD_CONTRACT.operation)


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


def _launch(x: torch.Tensor, weight: torch.Tensor | None, eps: float, flavour: str) -> torch.Tensor:
    check_arguments(x, weight, eps, flavour)
    return _forward[x.device.type](x, weight, eps, flavour)


def _fake(x: torch.Tensor, weight: torch.Tensor | None, eps: float, flavour: str) -> torch.Tensor:
    check_arguments(x, weight, eps, flavour)
    dtype = result_dtype(x.dtype, None if weight is None else weight.dtype, flavour)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _launch_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    flavour: str,
    need_x: bool,
    need_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_arguments(x, weight, eps, flavour)
    check_grad(grad, x.shape, x)
    grads = _backward[x.device.type](grad, x, weight, eps, flavour, need_x, need_weight)
    return or_empty(grads[0], x), or_empty(grads[1], x)


def _fake_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    flavour: str,
    need_x: bool,
    need_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_arguments(x, weight, eps, flavour)
    check_grad(grad, x.shape, x)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_x else None
    grad_weight = torch.empty_like(weight) if need_weight and weight is not None else None
    return or_empty(grad_x, x), or_empty(grad_weight, x)


def _plain_backward(grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    grads = reference.rms_norm_backward(grad, x, *rest)
    return or_empty(grads[0], x), or_empty(grads[1], x)


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
    _launch,
    mutates_args=CONTRACT.mutates,
    fake=_fake,
    differentiable=_RMSNorm.apply,
    plain=reference.rms_norm,
)
BACKWARD = define_operator(
    BACKWARD_CONTRACT.operation,
    _launch_backward,
    mutates_args=BACKWARD_CONTRACT.mutates,
    fake=_fake_backward,
    differentiable=_plain_backward,
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
