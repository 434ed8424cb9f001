"""Cases and tolerance of `linear`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .cases import Case, generator, main_input, make_values
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
    out = settings.get("out", 24)
    x = main_input(case, source)
    weight = make_values((out, width), case.dtype, "normal", source) / width**0.5
    bias = make_values((out,), case.dtype, "normal", source) if settings.get("bias") else None
    return x, weight, bias


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
