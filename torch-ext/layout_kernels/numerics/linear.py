"""Cases and tolerance of `linear`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..ops.linear import CONTRACT
from .cases import Case, generator, main_input, make_values
from .tensor_suite import Grid, Option, Rules, make_suite
from .tolerance import explain, in_float64, ulp

if TYPE_CHECKING:
    import torch

CASES = (
    *(Case((rows, 48), dtype) for rows in (1, 4, 9) for dtype in ("float32", "bfloat16", "float16")),
    *(Case((3, width), "bfloat16", settings={"out": 5}) for width in (1, 7, 33, 100, 1025, 2100)),
    Case((70, 100), "bfloat16", settings={"out": 67, "bias": True}),
    Case((70, 100), "float16", settings={"out": 67, "bias": True}),
    Case((2, 3, 32), "float32", settings={"bias": True}),
    *(Case((2, 3, 5, 32), "bfloat16", layout) for layout in ("sliced", "offset", "strided", "transposed", "heads")),
    Case((2, 3, 32), "float32", "expanded"),
    Case((32,), "bfloat16"),
    Case((0, 32), "bfloat16"),
    Case((3, 32), "bfloat16", values="zeros"),
    Case((4, 32), "bfloat16", values="nonfinite"),
    Case((3, 16), "float64"),
)


def arguments(case: Case) -> tuple[Any, ...]:
    """The arguments of the operation: x, weight, bias. Weights are divided by the root of their width."""
    settings, source, width = case.settings, generator(case), case.shape[-1]
    out = settings.get("factor", 0) * width or settings.get("out", 24)
    x = main_input(case, source)
    weight = make_values((out, width), case.dtype, "normal", source) / width**0.5
    bias = make_values((out,), case.dtype, "normal", source) if settings.get("bias") else None
    return x, weight, bias


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The operation in float64."""
    product = x @ weight.mT
    return product if bias is None else product + bias


def _flops(args: tuple[Any, ...]) -> float:
    """A multiplication and an addition for each weight and row."""
    return 2.0 * (args[0].numel() // args[0].shape[-1]) * args[1].numel()


def compare(result: torch.Tensor, args: tuple[Any, ...]) -> str | None:
    """Why a result does not pass, or None.

    The sum of n terms in float32 is off by the root of n roundings of |x| @ |W|, four of them being allowed for a sum
    of one term; then the result may be off by 1 ulp.
    """
    import torch

    from ..ops.linear.reference import linear

    x, weight, bias = in_float64(args)
    exact = linear(x, weight, bias)
    sizes = linear(x.abs(), weight.abs(), None if bias is None else bias.abs()).nan_to_num(0.0, 0.0, 0.0)
    single = torch.finfo(torch.float64 if args[0].dtype is torch.float64 else torch.float32).eps
    bound = (4 + x.shape[-1] ** 0.5) * single * sizes + ulp(exact, args[0].dtype)
    return explain("result", result, linear(*args), exact, bound)


def _reference() -> Callable[..., Any]:
    from ..ops.linear.reference import linear

    return linear


SUITE = make_suite(
    Rules(
        CONTRACT.operation,
        CASES,
        arguments,
        compare,
        _reference,
        exact,
        Grid(
            widths=(1024,),
            options=(Option("factors", "factor", (1,), help="rows of the weight for each of the width"),),
        ),
        flops=_flops,
    )
)
