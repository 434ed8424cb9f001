"""`gated_activation` for torch: argument check, operators, autograd and the public function."""

from __future__ import annotations

from typing import Any

import torch

from ...dispatch.launch import define_operator, is_direct
from ...dispatch.runtime import RUNTIME
from ..arguments import check_choice, check_grad, check_rows
from . import ACTIVATIONS, BACKWARD_CONTRACT, CONTRACT, reference

_forward = RUNTIME.functions(CONTRACT.operation)


def check_arguments(gate_up: torch.Tensor, activation: str) -> None:
    """What every launch, fake implementation and suite asks of the arguments.

    Raises:
        TypeError, ValueError: they name the argument, what was given and what is allowed.
    """
    check_rows("gate_up", gate_up)
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up has shape {tuple(gate_up.shape)}; its last dimension must be even: gate, then up")
    check_choice("activation", activation, ACTIVATIONS)


def _result(gate_up: torch.Tensor, _: str) -> torch.Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _check_backward(grad: torch.Tensor, gate_up: torch.Tensor, activation: str) -> None:
    check_arguments(gate_up, activation)
    check_grad(grad, (*gate_up.shape[:-1], gate_up.shape[-1] // 2), gate_up)


def _result_of_backward(_: torch.Tensor, gate_up: torch.Tensor, __: str) -> torch.Tensor:
    return gate_up.new_empty(gate_up.shape)


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        return FORWARD(gate_up, activation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG004, torch passes it by name
        gate_up, ctx.activation = inputs
        ctx.save_for_backward(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return BACKWARD(grad, *ctx.saved_tensors, ctx.activation), None


FORWARD = define_operator(
    CONTRACT.operation,
    check_arguments,
    _result,
    mutates_args=CONTRACT.mutates,
    differentiable=_GatedActivation.apply,
    plain=reference.gated_activation,
)
BACKWARD = define_operator(
    BACKWARD_CONTRACT.operation,
    _check_backward,
    _result_of_backward,
    mutates_args=BACKWARD_CONTRACT.mutates,
    differentiable=reference.gated_activation_backward,
    like=1,
)


def gated_activation(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """act(gate) * up, where gate is the first half of the last dimension and up the second.

    Rounded to the dtype after the activation and again after the product (source: transformers' `LlamaMLP`).

    Args:
        gate_up: [..., 2 * size], any strides; float16, bfloat16, float32 or float64.
        activation: `silu`, `gelu` (exact, by erf) or `gelu_tanh` (transformers' `gelu_pytorch_tanh`).

    Returns:
        [..., size], contiguous, of the same dtype, memory of its own.

    Raises:
        TypeError, ValueError: an argument is not as above.
        NotImplementedError: called under `torch.func.vmap`; leading dimensions already are a batch.
    """
    if torch.compiler.is_compiling():
        return FORWARD(gate_up, activation)
    check_arguments(gate_up, activation)
    if is_direct(gate_up):
        return _forward[gate_up.device.type](gate_up, activation)
    return FORWARD(gate_up, activation)
