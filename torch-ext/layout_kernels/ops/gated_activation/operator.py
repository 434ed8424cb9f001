"""`gated_activation`: the argument check and the public function."""

from __future__ import annotations

import torch

from ..arguments import check_choice, check_rows
from . import ACTIVATIONS
from . import reference


def check_arguments(gate_up: torch.Tensor, activation: str) -> None:
    """What every launch, fake implementation and suite asks of the arguments.

    Raises:
        TypeError, ValueError: they name the argument, what was given and what is allowed.
    """
    check_rows("gate_up", gate_up)
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up has shape {tuple(gate_up.shape)}; its last dimension must be even: gate, then up")
    check_choice("activation", activation, ACTIVATIONS)


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
    check_arguments(gate_up, activation)
    return reference.gated_activation(gate_up, activation)
