"""Cases and tolerance of `gated_rms_norm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..ops.gated_rms_norm import ACTIVATIONS, BACKWARD_CONTRACT, CONTRACT, FLAVOURS, ORDERS
from .cases import Case, generator, main_input, make_values
from .gated_activation import opened
from .tensor_suite import Grid, Option, Rules, make_suite
from .tolerance import explain, gradients, in_float64, ulp

if TYPE_CHECKING:
    import torch

CASES = (
    *(
        Case((4, 96), dtype, settings={"flavour": flavour, "order": order, "activation": activation, "group_size": 32})
        for flavour in FLAVOURS
        for order in ORDERS
        for activation, dtype in zip(ACTIVATIONS, ("bfloat16", "float32"), strict=True)
    ),
    *(Case((3, 64), "float16", settings={"order": order}) for order in ORDERS),
    *(Case((3, 64), "bfloat16", settings={"order": o, "weight_dtype": "float32"}) for o in ORDERS),
    *(Case((3, 64), "bfloat16", settings={"order": o, "weight_dtype": None}) for o in ORDERS),
    Case((3, 64), "bfloat16", settings={"gate_dtype": "float32"}),
    *(Case((3, width), "bfloat16") for width in (1, 7, 100, 1536)),
    *(Case((2, 3, 5, 64), "bfloat16", layout) for layout in ("sliced", "offset", "strided", "transposed", "heads")),
    Case((2, 3, 64), "float32", "expanded", settings={"order": "norm_then_gate"}),
    Case((64,), "float32"),
    Case((0, 64), "bfloat16"),
    Case((3, 64), "float32", values="zeros", settings={"eps": 0.0}),
    Case((4, 64), "bfloat16", values="nonfinite"),
    Case((3, 32), "float64", settings={"group_size": 8}),
)


def arguments(case: Case) -> tuple[Any, ...]:
    """The arguments of the operation, in its order; the gate lies in memory as x does."""
    settings, source = case.settings, generator(case)
    x = main_input(case, source)
    gate = main_input(Case(case.shape, settings.get("gate_dtype", case.dtype), case.layout), source)
    dtype = settings.get("weight_dtype", case.dtype)
    weight = None if dtype is None else make_values(case.shape[-1:], dtype, "normal", source)
    named = settings.get("flavour", "cast_then_scale"), settings.get("order", "gate_then_norm")
    last = settings.get("group_size"), settings.get("activation", "silu")
    return x, gate, weight, settings.get("eps", 1e-6), *named, *last


def backward_arguments(case: Case) -> tuple[Any, ...]:
    """The arguments of the backward: a gradient of the result, those of the operation, and which are needed."""
    from ..ops.gated_rms_norm.operator import result_dtype

    args = arguments(case)
    x, _, weight, _, flavour, order, _, _ = args
    dtype = result_dtype(x.dtype, None if weight is None else weight.dtype, flavour, order)
    grad = make_values(case.shape, "float64", "normal", generator(Case((1,), seed=case.seed + 1))).to(dtype)
    return grad, *args, True, True, weight is not None


def exact(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    flavour: str,  # noqa: ARG001, says where to round
    order: str,
    group_size: int | None,
    activation: str,
) -> torch.Tensor:
    """The operation in float64, without the roundings between."""
    import torch

    factor = opened(gate, activation)
    rows = x * factor if order == "gate_then_norm" else x
    size = group_size or rows.shape[-1]
    groups = rows.reshape(*rows.shape[:-1], rows.shape[-1] // size, size)
    length = torch.linalg.vector_norm(groups, dim=-1, keepdim=True)
    unscaled = (groups / (length.square() / size + eps).sqrt()).reshape(rows.shape)
    scaled = unscaled if weight is None else unscaled * weight
    return scaled * factor if order == "norm_then_gate" else scaled


def exact_backward(grad: torch.Tensor, *args: Any) -> tuple[torch.Tensor | None, ...]:
    """The gradients of `exact` in float64, by autograd."""
    return gradients(exact, grad, args[:8], args[8:])


def compare(result: torch.Tensor, args: tuple[Any, ...]) -> str | None:
    """Why a result does not pass, or None.

    Twelve float32 roundings more than `rms_norm` may differ (the activation's eight, the gate's product), each
    relative to the result as all are factors of it; then 2 ulp, for the roundings of the contract that may turn.
    """
    import torch

    from ..ops.gated_rms_norm.reference import gated_rms_norm

    expected, wide = gated_rms_norm(*args), gated_rms_norm(*in_float64(args))
    single = torch.finfo(torch.float64 if args[0].dtype is torch.float64 else torch.float32).eps
    bound = 12 * single * wide.abs().nan_to_num(0.0, 0.0, 0.0) + 2 * ulp(wide, expected.dtype)
    return explain("result", result, expected, wide, bound)


def _sizes(args: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x and gate and the terms of the weight's, every difference made a sum of sizes; in float64."""
    import torch

    from ..ops.gated_activation.reference import activate
    from ..ops.gated_rms_norm.reference import _normalised

    grad, x, gate, weight, eps, _, order, group_size, activation = in_float64(args)[:9]
    grad, gate_first = grad.abs(), order == "gate_then_norm"
    opened, sigmoid = activate(gate, activation).abs(), torch.sigmoid(gate)
    slope = sigmoid if activation == "sigmoid" else sigmoid + gate.abs() * sigmoid * (1 - sigmoid)
    normalised, rstd = _normalised(x * opened if gate_first else x, eps, group_size)
    normalised = normalised.abs()
    scaled = grad if weight is None else grad * weight.abs()
    inner = (scaled if gate_first else scaled * opened).unflatten(-1, normalised.shape[-2:])
    inner = (rstd * (inner + normalised * (inner * normalised).mean(-1, keepdim=True))).flatten(-2)
    flat = normalised.flatten(-2)
    size_gate = inner * x.abs() * slope if gate_first else scaled * flat * slope
    terms = grad * flat if gate_first else grad * opened * flat
    return inner * opened if gate_first else inner, size_gate, terms.reshape(-1, x.shape[-1])


def compare_backward(grads: tuple[torch.Tensor | None, ...], args: tuple[Any, ...]) -> str | None:
    """Why gradients do not pass, or None.

    Relative to the sizes of what is subtracted and summed: 32 float32 roundings on the way, and the root of the
    number of terms of a sum, twice; then 2 ulp of the result. A factor that cast_then_scale rounds to the dtype of x
    may turn: one eps of the gate's gradient, and two of the largest term of the weight's.
    """
    import torch

    from ..ops.gated_rms_norm.reference import gated_rms_norm_backward

    x, turns = args[1], args[5] == "cast_then_scale"
    expected, correct = gated_rms_norm_backward(*args), gated_rms_norm_backward(*in_float64(args))
    single = torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32).eps
    half = torch.finfo(x.dtype).eps if turns else 0.0
    size_x, size_gate, terms = (size.nan_to_num(0.0, 0.0, 0.0) for size in _sizes(args))
    along = (32 + 2 * x.shape[-1] ** 0.5) * single
    largest = terms.amax(0) if len(terms) else terms.sum(0)
    bounds = {
        "x": along * size_x,
        "gate": (along + half) * size_gate,
        "weight": (32 + 2 * len(terms) ** 0.5) * single * terms.sum(0) + 2 * half * largest,
    }
    for (name, bound), grad, wanted, wide in zip(bounds.items(), grads, expected, correct, strict=True):
        if grad is None or wanted is None or wide is None:
            continue
        reason = explain(f"grad of {name}", grad, wanted, wide, bound + 2 * ulp(wide, wanted.dtype))
        if reason is not None:
            return reason
    return None


def _reference() -> Callable[..., Any]:
    from ..ops.gated_rms_norm.reference import gated_rms_norm

    return gated_rms_norm


def _reference_backward() -> Callable[..., Any]:
    from ..ops.gated_rms_norm.reference import gated_rms_norm_backward

    return gated_rms_norm_backward


_OPTIONS = (
    Option("flavours", "flavour", ("cast_then_scale",), FLAVOURS),
    Option("orders", "order", ("gate_then_norm",), ORDERS),
    Option("activations", "activation", ("silu",), ACTIVATIONS),
)
SUITE = make_suite(
    Rules(
        CONTRACT.operation,
        CASES,
        arguments,
        compare,
        _reference,
        exact,
        Grid(options=_OPTIONS),
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
        Grid(rows=(256,), options=_OPTIONS),
    )
)
