"""`linear` for torch: argument check, operator, autograd and the public function."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from ...dispatch.launch import define_operator, is_direct
from ...dispatch.runtime import RUNTIME
from ..arguments import DTYPES, check_rows, check_tensor, check_vector, device_of, is_beside
from . import CONTRACT, reference

# For whatever device.
_is_autocast = torch._C._is_any_autocast_enabled
_forward = RUNTIME.functions(CONTRACT.operation)


def check_arguments(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """What every launch, fake implementation and suite asks of the arguments.

    Raises:
        TypeError, ValueError: they name the argument, what was given and what is allowed.
    """
    check_rows("x", x)
    check_tensor("weight", weight, x)
    width = x.shape[-1]
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != width:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; it must be [out, {width}], out at least 1")
    if bias is not None:
        check_vector("bias", bias, weight.shape[0], x)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.dtype is not x.dtype:
            raise TypeError(f"{name} is {value.dtype} and x {x.dtype}; a product has one dtype, convert one of them")


def _fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    # For dense tensors: whether check_arguments passes.
    dtype, shape, columns = x.dtype, weight.shape, x.shape
    return (
        weight.dtype is dtype
        and dtype in DTYPES
        and len(shape) == 2
        and len(columns) > 0
        and columns[-1] == shape[1] > 0
        and shape[0] > 0
        and is_beside(weight, x)
        and (bias is None or (bias.dtype is dtype and bias.shape == shape[:1] and is_beside(bias, x)))
    )


def _result(x: torch.Tensor, weight: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)


FORWARD = define_operator(
    CONTRACT.operation,
    check_arguments,
    _result,
    mutates_args=CONTRACT.mutates,
    differentiable=functional.linear,  # what a backward needs is the same whoever makes the product
    plain=reference.linear,
    flops=lambda x, weight, *_, **__: 2 * math.prod(x[:-1]) * math.prod(weight),
)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product of a linear layer: x @ weight^T + bias (source: `torch.nn.functional.linear`).

    Accumulated in float32 or wider and rounded once. Where a gradient is recorded, and under autocast, PyTorch's own
    product runs.

    Args:
        x: [..., width], any strides; float16, bfloat16, float32 or float64.
        weight: [out, width], of the dtype of x.
        bias: [out], of the dtype of x, or None.

    Returns:
        [..., out], contiguous, of the dtype of x, memory of its own.

    Raises:
        TypeError, ValueError: an argument is not as above.
        NotImplementedError: called under `torch.func.vmap`; leading dimensions already are a batch.
    """
    eager = not torch.compiler.is_compiling()
    if eager and is_direct(x, weight, bias) and not _is_autocast() and _fits(x, weight, bias):
        return _forward[device_of(x)](x, weight, bias)
    # Asking whether autocast is on for a device that has none, such as meta, is an error; so is another type than a
    # tensor, which the check names.
    if isinstance(x, torch.Tensor) and x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        return functional.linear(x, weight, bias)
    if not eager:
        return FORWARD(x, weight, bias)
    check_arguments(x, weight, bias)
    if is_direct(x, weight, bias):
        return _forward[x.device.type](x, weight, bias)
    return FORWARD(x, weight, bias)
