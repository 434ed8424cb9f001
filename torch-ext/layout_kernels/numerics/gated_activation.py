"""Cases and tolerance of `gated_activation`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..ops.gated_activation import ACTIVATIONS, BACKWARD_CONTRACT, CONTRACT
from .cases import Case, generator, main_input, make_values
from .tensor_suite import Grid, Option, Rules, make_suite
from .tolerance import explain, gradients, in_float64, ulp

if TYPE_CHECKING:
    import torch

CASES = (
    *(
        Case((4, 96), dtype, settings={"activation": activation})
        for activation in ACTIVATIONS
        for dtype in ("float32", "bfloat16", "float16")
    ),
    *(Case((3, width), "bfloat16") for width in (2, 14, 200, 3072)),
    *(Case((2, 3, 5, 64), "bfloat16", layout) for layout in ("sliced", "offset", "strided", "transposed", "heads")),
    Case((2, 3, 64), "float32", "expanded"),
    Case((64,), "float32"),
    Case((2, 2, 3, 2, 16), "float16"),
    Case((0, 64), "bfloat16"),
    Case((2, 0, 64), "float32"),
    Case((3, 64), "float32", values="zeros"),
    Case((3, 64), "float16", values="large"),
    Case((4, 64), "bfloat16", values="nonfinite"),
    Case((4, 64), "float32", values="nonfinite", settings={"activation": "gelu"}),
    Case((3, 32), "float64"),
)


def arguments(case: Case) -> tuple[Any, ...]:
    """The arguments of the operation: gate_up, activation."""
    return main_input(case, generator(case)), case.settings.get("activation", "silu")


def backward_arguments(case: Case) -> tuple[Any, ...]:
    """The arguments of the backward: a gradient of the result, and those of the operation."""
    shape = (*case.shape[:-1], case.shape[-1] // 2)
    grad = make_values(shape, case.dtype, "normal", generator(Case((1,), seed=case.seed + 1)))
    return grad, *arguments(case)


def _single(dtype: torch.dtype) -> float:
    import torch

    return torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps


def opened(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """The activations in float64, from exponentials, the error function and the hyperbolic tangent."""
    import torch

    if activation == "silu":
        return gate / (1 + torch.exp(-gate))
    if activation == "sigmoid":
        return 1 / (1 + torch.exp(-gate))
    if activation == "gelu":
        return gate * torch.erfc(-gate * 0.5**0.5) / 2
    # 0.044715: of the approximation that torch.nn.functional.gelu documents.
    return gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) / 2


def exact(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """The operation in float64, without the rounding between."""
    size = gate_up.shape[-1] // 2
    return opened(gate_up[..., :size], activation) * gate_up[..., size:]


def exact_backward(grad: torch.Tensor, gate_up: torch.Tensor, activation: str) -> torch.Tensor | None:
    """The gradient of `exact` in float64, by autograd."""
    return gradients(exact, grad, (gate_up, activation), (True,))[0]


def compare(result: torch.Tensor, args: tuple[Any, ...]) -> str | None:
    """Why a result does not pass, or None.

    Absolute: eight float32 roundings of an activation of size 1, times up, for exp, erf and tanh cancel near 0.
    Relative: 2 ulp, for the two places where the contract rounds, either of which may turn.
    """
    from ..ops.gated_activation.reference import gated_activation

    gate_up, activation = args
    expected, exact = gated_activation(gate_up, activation), gated_activation(*in_float64(args))
    up = gate_up.double().chunk(2, -1)[1].abs().nan_to_num(0.0, 0.0, 0.0)
    bound = 8 * _single(gate_up.dtype) * up + 2 * ulp(exact, gate_up.dtype)
    return explain("result", result, expected, exact, bound)


def compare_backward(grad_input: torch.Tensor, args: tuple[Any, ...]) -> str | None:
    """Why a gradient does not pass, or None: as `compare`, with what multiplies the activation or its derivative.

    The activation is rounded as in the forward, and that rounding may turn: one ulp of it, times the gradient.
    """
    import torch

    from ..ops.gated_activation.reference import gated_activation_backward

    grad, gate_up, _ = args
    expected = gated_activation_backward(*args)
    exact = gated_activation_backward(*in_float64(args))
    gate, up = gate_up.double().chunk(2, -1)
    wide = grad.double().abs()
    turned = wide * ulp(gate, gate_up.dtype)
    single = 8 * _single(gate_up.dtype)
    # The derivative holds products with the gate, whose size multiplies the roundings.
    sizes = torch.cat((single * wide * up.abs() * (1 + gate.abs()), single * wide + turned), -1)
    bound = sizes.nan_to_num(0.0, 0.0, 0.0) + ulp(exact, gate_up.dtype)
    return explain("grad of gate_up", grad_input, expected, exact, bound)


def _reference() -> Callable[..., Any]:
    from ..ops.gated_activation.reference import gated_activation

    return gated_activation


def _reference_backward() -> Callable[..., Any]:
    from ..ops.gated_activation.reference import gated_activation_backward

    return gated_activation_backward


_ACTIVATION_OPTION = Option("activations", "activation", ("silu",), ACTIVATIONS)
SUITE = make_suite(
    Rules(
        CONTRACT.operation,
        CASES,
        arguments,
        compare,
        _reference,
        exact,
        Grid(options=(_ACTIVATION_OPTION,), width_factor=2),
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
        Grid(rows=(256,), options=(_ACTIVATION_OPTION,), width_factor=2),
    )
)
