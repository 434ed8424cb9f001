"""`rms_norm_mlp` for torch: argument check, operator, autograd and the public function."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.nn import functional

from ...dispatch.launch import define_operator, is_direct
from ...dispatch.runtime import RUNTIME
from ..arguments import check_choice, check_eps, check_rows, check_tensor, check_vector, device_of, is_beside
from ..gated_activation import ACTIVATIONS
from ..gated_activation.operator import FORWARD as GATED_ACTIVATION
from ..rms_norm.operator import FORWARD as RMS_NORM
from ..rms_norm.operator import check_arguments as check_norm
from ..rms_norm.operator import fits as fits_norm
from . import CONTRACT, FLAVOURS, reference

_forward = RUNTIME.functions(CONTRACT.operation)
_is_any_autocast = torch._C._is_any_autocast_enabled
_USUAL = (torch.bfloat16, torch.float16, torch.float32)
_MaybeTensor = TypeVar("_MaybeTensor", torch.Tensor, torch.Tensor | None)


def check_arguments(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    eps: float,
    flavour: str,
    activation: str,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> None:
    """What every launch, fake implementation and suite asks of the arguments.

    Raises:
        TypeError, ValueError: they name the argument, what was given and what is allowed.
    """
    check_choice("flavour", flavour, FLAVOURS)
    if flavour != "none":
        check_norm(x, norm_weight, eps, flavour)
    else:
        _check_no_norm(x, norm_weight, eps)
    check_tensor("gate_up", gate_up, x)
    width = x.shape[-1]
    if gate_up.dim() != 2 or gate_up.shape[0] % 2 or gate_up.shape[0] == 0 or gate_up.shape[1] != width:
        raise ValueError(
            f"gate_up has shape {tuple(gate_up.shape)}; it must be [2 * size, {width}]: the gate's rows, then up's"
        )
    check_down(x, down, gate_up.shape[0] // 2, "half of gate_up's rows")
    check_choice("activation", activation, ACTIVATIONS)
    biases = (("gate_up_bias", gate_up_bias, gate_up.shape[0]), ("down_bias", down_bias, down.shape[0]))
    check_biases(x, biases)
    others = (("down", down), ("gate_up_bias", gate_up_bias), ("down_bias", down_bias))
    check_one_dtype("gate_up", gate_up, others)


def _check_no_norm(x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float) -> None:
    check_rows("x", x)
    check_eps(eps)
    if norm_weight is not None:
        raise ValueError(
            f"norm_weight must be None with the flavour 'none', which has no norm; given a "
            f"{type(norm_weight).__name__}: leave it out, or name the norm's flavour"
        )


def check_down(x: torch.Tensor, down: torch.Tensor, size: int, source: str) -> None:
    """The last projection, [out, size]; `source` says where the size is from."""
    check_tensor("down", down, x)
    if down.dim() != 2 or down.shape[0] == 0 or down.shape[1] != size:
        raise ValueError(f"down has shape {tuple(down.shape)}; it must be [out, {size}], {source}")


def check_biases(x: torch.Tensor, biases: Iterable[tuple[str, torch.Tensor | None, int]]) -> None:
    """The biases that are there, each with its name and length."""
    for name, value, rows in biases:
        if value is not None:
            check_vector(name, value, rows, x)


def check_one_dtype(first: str, weight: torch.Tensor, others: Iterable[tuple[str, torch.Tensor | None]]) -> None:
    """The projections and their biases have the dtype of the `first` one."""
    for name, value in others:
        if value is not None and value.dtype is not weight.dtype:
            raise TypeError(f"{name} is {value.dtype} and {first} {weight.dtype}; the projections share one dtype")


def _fits(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    eps: float,
    flavour: str,
    activation: str,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> bool:
    # For dense tensors, projections of one of the halves or float32, and an eps that is a float: whether
    # check_arguments passes.
    dtype, rows, columns = gate_up.dtype, gate_up.shape, down.shape
    return (
        dtype in _USUAL
        and (fits_norm(x, norm_weight, eps, flavour) if flavour != "none" else _fits_no_norm(x, norm_weight, eps))
        and len(rows) == len(columns) == 2
        and rows[1] == x.shape[-1]
        and rows[0] == 2 * columns[1] > 0
        and columns[0] > 0
        and down.dtype is dtype
        and activation in ACTIVATIONS
        and is_beside(gate_up, x)
        and is_beside(down, x)
        and (gate_up_bias is None or _is_bias(gate_up_bias, gate_up))
        and (down_bias is None or _is_bias(down_bias, down))
    )


def _fits_no_norm(x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float) -> bool:
    return norm_weight is None and fits_norm(x, None, eps, FLAVOURS[0])


def _is_bias(bias: torch.Tensor, weight: torch.Tensor) -> bool:
    return bias.dtype is weight.dtype and bias.shape == weight.shape[:1] and is_beside(bias, weight)


def is_autocast(device: str) -> bool:
    """Whether autocast is on for a type of device; asking about one that has no autocast is an error of torch."""
    return device != "meta" and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> contextlib.AbstractContextManager[None]:
    """Autocast off: the public function has converted for it, and what runs now keeps to the dtypes that it gets."""
    return torch.autocast(device, enabled=False) if is_autocast(device) else contextlib.nullcontext()


def _launch(*args: Any) -> torch.Tensor:
    device = args[0].device.type
    with without_autocast(device):
        return _forward[device](*args)


def _result(x: torch.Tensor, _: Any, gate_up: torch.Tensor, down: torch.Tensor, *__: Any) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], down.shape[0]), dtype=gate_up.dtype, device=x.device)


def _composed(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    eps: float,
    flavour: str,
    activation: str,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> torch.Tensor:
    """The same from operators that have a backward: less is saved for it than by stock, no product is redone."""
    normed = (x if flavour == "none" else RMS_NORM(x, norm_weight, eps, flavour)).to(gate_up.dtype)
    with without_autocast(x.device.type):
        product = GATED_ACTIVATION(functional.linear(normed, gate_up, gate_up_bias), activation)
        return functional.linear(product, down, down_bias)


def products(x: Sequence[int], *weights: Sequence[int]) -> int:
    """FLOPs of the products of ``x`` with weights, all given by their shapes."""
    return 2 * math.prod(x[:-1]) * sum(map(math.prod, weights))


FORWARD = define_operator(
    CONTRACT.operation,
    check_arguments,
    _result,
    mutates_args=CONTRACT.mutates,
    launch=_launch,
    differentiable=_composed,
    plain=reference.rms_norm_mlp,
    flops=lambda x, _, gate_up, down, *__, **___: products(x, gate_up, down),
)


def for_autocast(tensor: _MaybeTensor, dtype: torch.dtype) -> _MaybeTensor:
    """What autocast makes of an argument of a linear layer: float64 stays."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(dtype)


def direct(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    eps: float,
    flavour: str,
    activation: str,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> torch.Tensor | None:
    """Fast path of `rms_norm_mlp`: the selected implementation's result, or None for what is not the usual case."""
    if is_direct(x, norm_weight, gate_up, down, gate_up_bias, down_bias) and not _is_any_autocast():
        args = (x, norm_weight, gate_up, down, eps, flavour, activation, gate_up_bias, down_bias)
        if _fits(*args):
            return _forward[device_of(x)](*args)
    return None


def rms_norm_mlp(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    eps: float = 1e-6,
    flavour: str = "cast_then_scale",
    activation: str = "silu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """A norm and the gated MLP behind it: down(act(gate(h)) * up(h)) with h = rms_norm(x, norm_weight, eps, flavour).

    With the flavour "none" there is no norm and h is x: for an MLP whose norm runs in a module of its own.

    Rounded to the dtype of the projections after each of: h, the gate's product, up's product, the activation,
    act * up, and the result (source: transformers' `LlamaMLP`). Where h has another dtype than the projections it is
    converted, as autocast does. Under autocast, projections and biases are converted to its dtype, as in a stock MLP.

    Args:
        x: [..., width]; float16, bfloat16, float32 or float64.
        norm_weight: [width] or None; see `rms_norm`. None with the flavour "none".
        gate_up: [2 * size, width], the gate projection's rows, then the up projection's.
        down: [out, size], of gate_up's dtype.
        eps: finite and at least 0; not used with the flavour "none".
        flavour: see `rms_norm`, or "none".
        activation: see `gated_activation`.
        gate_up_bias: [2 * size] or None, of gate_up's dtype.
        down_bias: [out] or None, of gate_up's dtype.

    Returns:
        [..., out], contiguous, of gate_up's dtype, memory of its own.

    Raises:
        TypeError, ValueError: an argument is not as above.
        NotImplementedError: called under `torch.func.vmap`; leading dimensions already are a batch.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling:
        result = direct(x, norm_weight, gate_up, down, eps, flavour, activation, gate_up_bias, down_bias)
        if result is not None:
            return result
        check_rows("x", x)
    if is_autocast(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        gate_up, down = for_autocast(gate_up, dtype), for_autocast(down, dtype)
        gate_up_bias, down_bias = for_autocast(gate_up_bias, dtype), for_autocast(down_bias, dtype)
    args = (x, norm_weight, gate_up, down, eps, flavour, activation, gate_up_bias, down_bias)
    if not compiling:
        check_arguments(*args)
    return FORWARD(*args)
