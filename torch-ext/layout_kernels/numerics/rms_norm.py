"""Cases and tolerance of `rms_norm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..ops.rms_norm import BACKWARD_CONTRACT, CONTRACT, FLAVOURS
from .cases import Case, generator, main_input, make_values
from .tensor_suite import Grid, Option, Peer, Rules, make_suite
from .tolerance import explain, gradients, half_or_single, in_float64, ulp

if TYPE_CHECKING:
    import torch

_HALVES = ("bfloat16", "float16")
CASES = (
    *(Case((4, 96), dtype, settings={"flavour": flavour}) for flavour in FLAVOURS for dtype in ("float32", *_HALVES)),
    *(Case((3, 64), "bfloat16", settings={"flavour": f, "weight_dtype": "float32"}) for f in FLAVOURS),
    *(Case((3, 64), dtype, settings={"weight_dtype": None}) for dtype in ("float32", "bfloat16")),
    *(Case((3, width), "bfloat16") for width in (1, 7, 100, 576, 3584, 5120, 8192)),
    *(Case((2, 3, 5, 64), "bfloat16", layout) for layout in ("sliced", "offset", "strided", "transposed", "heads")),
    Case((2, 3, 64), "float32", "expanded"),
    Case((64,), "float32"),
    Case((2, 2, 3, 2, 16), "float16"),
    Case((0, 64), "bfloat16"),
    Case((2, 0, 64), "float32"),
    Case((3, 64), "float32", values="zeros", settings={"eps": 0.0}),
    Case((3, 64), "float16", values="large"),
    Case((3, 64), "bfloat16", values="tiny", settings={"eps": 1e-5}),
    Case((4, 64), "bfloat16", values="nonfinite"),
    Case((4, 64), "float32", values="nonfinite", settings={"flavour": "one_plus_scale"}),
    Case((3, 32), "float64"),
)


def arguments(case: Case) -> tuple[Any, ...]:
    """The arguments of the operation: x, weight, eps, flavour."""
    source = generator(case)
    x = main_input(case, source)
    dtype = case.settings.get("weight_dtype", case.dtype)
    weight = None if dtype is None else make_values(case.shape[-1:], dtype, "normal", source)
    return x, weight, case.settings.get("eps", 1e-6), case.settings.get("flavour", "cast_then_scale")


def backward_arguments(case: Case) -> tuple[Any, ...]:
    """The arguments of the backward: a gradient of the result, those of the operation, and which are needed."""
    from ..ops.rms_norm.operator import result_dtype

    x, weight, eps, flavour = arguments(case)
    dtype = result_dtype(x.dtype, None if weight is None else weight.dtype, flavour)
    grad = make_values(case.shape, "float64", "normal", generator(Case((1,), seed=case.seed + 1))).to(dtype)
    return grad, x, weight, eps, flavour, True, weight is not None


def exact(x: torch.Tensor, weight: torch.Tensor | None, eps: float, flavour: str) -> torch.Tensor:
    """The operation in float64, without the roundings between: x over its root mean square, times the scale."""
    import torch

    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    unscaled = x / (length.square() / x.shape[-1] + eps).sqrt()
    if weight is None:
        return unscaled
    return unscaled * (weight + 1 if flavour == "one_plus_scale" else weight)


def exact_backward(grad: torch.Tensor, *args: Any) -> tuple[torch.Tensor | None, ...]:
    """The gradients of `exact` in float64, by autograd."""
    *forward, need_x, need_weight = args
    return gradients(exact, grad, forward, (need_x, need_weight))


def compare(result: torch.Tensor, args: tuple[Any, ...]) -> str | None:
    """Why a result of the operation does not pass, or None: the reference's error plus 1 ulp, in half precision 2.

    The error is taken over each row, since a row shares one sum. Where few elements are rounded the reference may be
    lucky, so its error counts as half of what it can make at least: 1.5 ulp for the five roundings (mean, sqrt,
    reciprocal, two products) of a result that is not rounded again, else 0.5 ulp.
    """
    from ..ops.rms_norm.reference import rms_norm

    expected, exact = rms_norm(*args), rms_norm(*in_float64(args))
    unit = ulp(exact, expected.dtype)
    own = (expected.double() - exact).abs()
    units = half_or_single(expected.dtype)
    worst = (own / unit).nan_to_num(0.0, 0.0).amax(-1, keepdim=True).clamp_min(1.5 if units == 1 else 0.5)
    return explain("result", result, expected, exact, (worst + units) * unit - own)


def compare_backward(grads: tuple[torch.Tensor | None, ...], args: tuple[Any, ...]) -> str | None:
    """Why gradients do not pass, or None.

    dx is a difference, so its error is relative to the size of what is subtracted; the weight's is a sum over rows in
    float32, whose terms cast_then_scale rounds to the dtype of x, and one term's rounding may turn.
    """
    import torch

    from ..ops.rms_norm.reference import rms_norm, rms_norm_backward

    grad, x, weight, eps, flavour, need_x, need_weight = args
    expected = rms_norm_backward(*args)
    exact = rms_norm_backward(*in_float64(args))
    single = torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32).eps
    rows, wide = x.double(), grad.double()
    normalised = rms_norm(rows, None, eps, "scale_then_cast")
    if need_x and grads[0] is not None and expected[0] is not None and exact[0] is not None:
        scale = torch.ones((), dtype=torch.float64) if weight is None else weight.double()
        sized = (wide * (1 + scale if flavour == "one_plus_scale" else scale)).abs()
        rstd = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)
        size = rstd * (sized + normalised.abs() * (sized * normalised.abs()).mean(-1, keepdim=True))
        # Eight float32 roundings on the way, and the sums' own: at most the square root of the width of them.
        bound = (8 + x.shape[-1] ** 0.5) * single * size.nan_to_num() + ulp(exact[0], x.dtype)
        reason = explain("grad of x", grads[0], expected[0], exact[0], bound)
        if reason is not None:
            return reason
    if need_weight and grads[1] is not None and expected[1] is not None and exact[1] is not None:
        terms = (wide * normalised).abs().nan_to_num().reshape(-1, x.shape[-1])
        turned = terms.amax(0) if len(terms) else terms.sum(0)
        bound = (4 + 2 * len(terms) ** 0.5) * single * terms.sum(0) + ulp(exact[1], expected[1].dtype)
        if flavour == "cast_then_scale":
            bound = bound + 2 * torch.finfo(x.dtype).eps * turned
        return explain("grad of weight", grads[1], expected[1], exact[1], bound)
    return None


def _reference() -> Callable[..., Any]:
    from ..ops.rms_norm.reference import rms_norm

    return rms_norm


def _reference_backward() -> Callable[..., Any]:
    from ..ops.rms_norm.reference import rms_norm_backward

    return rms_norm_backward


def _torch_rms_norm() -> Callable[..., Any]:
    from torch.nn import functional

    def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, flavour: str) -> torch.Tensor:  # noqa: ARG001
        return functional.rms_norm(x, x.shape[-1:], weight, eps)

    return rms_norm


def _torch_refuses(case: Case) -> str | None:
    if case.settings.get("flavour") == "one_plus_scale":
        return "torch's norm multiplies by the weight, not by one plus it"
    if case.settings.get("weight_dtype", case.dtype) != case.dtype:
        return "torch's norm wants a weight of the input's dtype"
    return None


_FLAVOUR_OPTION = Option("flavours", "flavour", ("cast_then_scale",), FLAVOURS)
SUITE = make_suite(
    Rules(
        CONTRACT.operation,
        CASES,
        arguments,
        compare,
        _reference,
        exact,
        Grid(options=(_FLAVOUR_OPTION,)),
        peers=(Peer("torch.rms_norm", _torch_rms_norm, _torch_refuses),),
    )
)
BACKWARD_SUITE = make_suite(
    Rules(
        BACKWARD_CONTRACT.operation,
        CASES,
        backward_arguments,
        compare_backward,
        _reference_backward,
        exact_backward,
        Grid(rows=(256,), options=(_FLAVOUR_OPTION,)),
    )
)
