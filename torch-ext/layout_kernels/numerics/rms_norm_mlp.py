"""Cases and tolerance of `rms_norm_mlp`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..ops.gated_activation import ACTIVATIONS
from ..ops.rms_norm_mlp import CONTRACT, FLAVOURS
from .cases import Case, generator, main_input, make_values
from .gated_activation import opened
from .rms_norm import exact as exact_norm
from .tensor_suite import Grid, Option, Rules, make_suite
from .tolerance import explain, in_float64, ulp

if TYPE_CHECKING:
    import torch


def _no_norm(
    shape: tuple[int, ...], dtype: str, layout: str = "contiguous", *, values: str = "normal", **settings: Any
) -> Case:
    return Case(shape, dtype, layout, values, {"flavour": "none", **settings})


CASES = (
    *(Case((rows, 48), dtype) for rows in (1, 4, 9) for dtype in ("float32", "bfloat16", "float16")),
    *(Case((3, 32), "bfloat16", settings={"flavour": flavour}) for flavour in FLAVOURS),
    *(Case((3, 32), "float32", settings={"activation": activation}) for activation in ACTIVATIONS),
    Case((2, 3, 32), "bfloat16", settings={"bias": True}),
    Case((2, 3, 32), "float32", settings={"bias": True, "size": 37, "out": 11}),
    Case((3, 32), "float32", settings={"projection_dtype": "bfloat16"}),
    Case((3, 32), "bfloat16", settings={"norm_dtype": None}),
    *(Case((2, 3, 5, 32), "bfloat16", layout) for layout in ("sliced", "offset", "strided", "transposed", "heads")),
    Case((2, 3, 32), "float32", "expanded"),
    Case((32,), "float32"),
    Case((0, 32), "bfloat16"),
    Case((3, 32), "float32", values="zeros"),
    Case((4, 32), "bfloat16", values="nonfinite"),
    Case((3, 16), "float64"),
    *(_no_norm((rows, 48), dtype) for rows in (1, 8, 140) for dtype in ("float32", "bfloat16", "float16")),
    *(_no_norm((2, 3, 5, 32), "bfloat16", layout) for layout in ("sliced", "strided", "transposed", "heads")),
    *(_no_norm((2, 3, 32), "float32", layout) for layout in ("expanded", "transposed")),
    _no_norm((2, 3, 32), "bfloat16", bias=True, activation="gelu_tanh"),
    _no_norm((2, 3, 32), "float32", bias=True, size=37, out=11),
    _no_norm((9, 32), "float32", projection_dtype="bfloat16", bias=True),
    _no_norm((3, 32), "bfloat16", projection_dtype="float32"),
    _no_norm((4, 32), "bfloat16", values="nonfinite"),
    _no_norm((0, 32), "bfloat16"),
    _no_norm((3, 16), "float64"),
)


def arguments(case: Case) -> tuple[Any, ...]:
    """The arguments of the operation, in its order. Weights are divided by the root of their width, as models' are."""
    settings, source, width = case.settings, generator(case), case.shape[-1]
    size, out = settings.get("factor", 0) * width or settings.get("size", 64), settings.get("out", width)
    dtype = settings.get("projection_dtype", case.dtype)
    flavour = settings.get("flavour", "cast_then_scale")
    norm_dtype = None if flavour == "none" else settings.get("norm_dtype", case.dtype)
    x = main_input(case, source)
    norm_weight = None if norm_dtype is None else make_values((width,), norm_dtype, "normal", source)
    gate_up = make_values((2 * size, width), dtype, "normal", source) / width**0.5
    down = make_values((out, size), dtype, "normal", source) / size**0.5
    biases: tuple[Any, ...] = (None, None)
    if settings.get("bias"):
        biases = make_values((2 * size,), dtype, "normal", source), make_values((out,), dtype, "normal", source)
    activation = settings.get("activation", "silu")
    return x, norm_weight, gate_up, down, settings.get("eps", 1e-6), flavour, activation, *biases


def exact(
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
    """The operation in float64, without the roundings between."""
    packed = (x if flavour == "none" else exact_norm(x, norm_weight, eps, flavour)) @ gate_up.mT
    packed = packed if gate_up_bias is None else packed + gate_up_bias
    size = down.shape[1]
    result = (opened(packed[..., :size], activation) * packed[..., size:]) @ down.mT
    return result if down_bias is None else result + down_bias


def _flops(args: tuple[Any, ...]) -> float:
    """A multiplication and an addition for each weight and row."""
    x, _, gate_up, down = args[:4]
    return 2.0 * (x.numel() // x.shape[-1]) * (gate_up.numel() + down.numel())


def compare(result: torch.Tensor, args: tuple[Any, ...]) -> str | None:
    """Why a result does not pass, or None.

    With u half an eps: gate and up are off by u of |h| @ |W| at most for each of three roundings (h twice, the product
    itself); an activation grows that by 1.13 at most; the activation and act * up add u each. What this makes of
    act * up goes through |down|, and the result may be off by 1 ulp. Sums are taken to add u once more. Without a norm
    the two roundings of h fall away: where x is converted, every implementation gets the same h.
    """
    import torch

    from ..ops.gated_activation.reference import activate
    from ..ops.rms_norm.reference import rms_norm
    from ..ops.rms_norm_mlp.reference import rms_norm_mlp

    gate_up, exact = args[2], rms_norm_mlp(*in_float64(args))
    x, norm_weight, weights, down, eps, flavour, activation, gate_up_bias, _ = in_float64(args)
    normed = x if flavour == "none" else rms_norm(x, norm_weight, eps, flavour)
    roundings = 2 if flavour == "none" else 4
    projected, sizes = normed @ weights.T, normed.abs() @ weights.abs().T
    if gate_up_bias is not None:
        projected, sizes = projected + gate_up_bias, sizes + gate_up_bias.abs()
    gate, up = projected.chunk(2, -1)
    gate_size, up_size = sizes.chunk(2, -1)
    opened = activate(gate, activation).abs()
    unit = torch.finfo(gate_up.dtype).eps / 2
    off = roundings * unit * (1.13 * gate_size * up.abs() + opened * up_size) + 2 * unit * opened * up.abs()
    bound = (off @ down.abs().T).nan_to_num(0.0, 0.0, 0.0) + ulp(exact, gate_up.dtype)
    return explain("result", result, rms_norm_mlp(*args), exact, bound)


def _reference() -> Callable[..., Any]:
    from ..ops.rms_norm_mlp.reference import rms_norm_mlp

    return rms_norm_mlp


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
            options=(
                Option("flavours", "flavour", ("cast_then_scale",), FLAVOURS),
                Option("activations", "activation", ("silu",), ACTIVATIONS),
                Option("factors", "factor", (3,), help="size of the gate for each of the width"),
            ),
        ),
        flops=_flops,
    )
)
