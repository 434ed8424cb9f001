"""Checks that the operations' argument checks share.

Each names the argument, says what was given and what is allowed. Nothing here reads a tensor's values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NAMES = "float16, bfloat16, float32 or float64"


def check_tensor(name: str, value: Any, like: torch.Tensor | None = None) -> None:
    """A floating-point tensor, on the device of `like`.

    Raises:
        TypeError: `value` is no tensor, or of another dtype.
        ValueError: `value` is on another device than `like`.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}")
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout)
        raise TypeError(f"{name} must be a dense tensor, not {kind}; convert it with to_dense() or to_padded_tensor()")
    if value.dtype not in DTYPES:
        raise TypeError(f"{name} must be {_NAMES}, not {value.dtype}; convert it first")
    if like is not None and value.device != like.device:
        raise ValueError(f"{name} is on {value.device}, the input on {like.device}; move one of them")


def check_rows(name: str, value: Any) -> None:
    """A floating-point tensor of one dimension or more whose last dimension, the width, is at least 1."""
    check_tensor(name, value)
    if value.dim() == 0:
        raise ValueError(f"{name} must have at least one dimension; a single number has no width to work along")
    if value.shape[-1] == 0:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; its last dimension must be at least 1")


def check_vector(name: str, value: Any, width: int, like: torch.Tensor) -> None:
    """A floating-point tensor of shape [width] on the device of `like`; float64 only beside float64."""
    check_tensor(name, value, like)
    if value.dim() != 1 or value.shape[0] != width:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be [{width}], the width of the input")
    if value.dtype is torch.float64 and like.dtype is not torch.float64:
        raise TypeError(
            f"{name} is float64 and the input {like.dtype}; convert {name} to float32 or the input to float64"
        )


# The checks above take as long as a small product. Fast path: each operation accepts the common case by the functions
# below, which must accept only what its check accepts (tests/ops/test_fits.py).


def fits_vector(value: torch.Tensor, width: int, like: torch.Tensor) -> bool:
    """Whether `check_vector` passes, for dense tensors of which `like` has one of the dtypes."""
    dtype = value.dtype
    return (
        value.shape == (width,)
        and (dtype is like.dtype or (dtype in DTYPES and dtype is not torch.float64))
        and ((value.is_cpu and like.is_cpu) or value.device == like.device)
    )


def is_beside(value: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether two tensors are on one device."""
    return (value.is_cpu and like.is_cpu) or value.device == like.device


def device_of(value: torch.Tensor) -> str:
    """The type of a tensor's device."""
    return "cpu" if value.is_cpu else value.device.type


def check_grad(grad: Any, shape: Sequence[int], like: torch.Tensor) -> None:
    """A gradient of the result: its shape, and the device of `like`."""
    check_tensor("grad", grad, like)
    if grad.shape != shape:
        raise ValueError(f"grad has shape {tuple(grad.shape)}; it must be {tuple(shape)}, the shape of the result")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """One of the names in `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; given {value!r}")


def check_eps(eps: Any) -> None:
    """A number, zero included: finite and not negative."""
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps must be a float, not {type(eps).__name__} ({eps!r}); read it from the module")
    if not (eps >= 0 and math.isfinite(eps)):
        raise ValueError(f"eps must be finite and at least 0; given {eps!r}")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms are computed: float64 for float64 input, float32 for all else."""
    return torch.float64 if dtype is torch.float64 else torch.float32
