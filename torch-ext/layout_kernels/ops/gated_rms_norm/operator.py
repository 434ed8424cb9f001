"""`gated_rms_norm`: the argument check and the public function."""

from __future__ import annotations

import torch

from ..arguments import check_choice, check_eps, check_rows, check_tensor, check_vector
from . import ACTIVATIONS, FLAVOURS, ORDERS
from . import reference


def check_arguments(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    flavour: str,
    order: str,
    group_size: int | None,
    activation: str,
) -> None:
    """What every launch, fake implementation and suite asks of the arguments.

    Raises:
        TypeError, ValueError: they name the argument, what was given and what is allowed.
    """
    check_rows("x", x)
    check_tensor("gate", gate, x)
    if gate.shape != x.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)}; it must be {tuple(x.shape)}, the shape of x")
    if gate.dtype is torch.float64 and x.dtype is not torch.float64:
        raise TypeError(f"gate is float64 and x {x.dtype}; convert gate to float32 or x to float64")
    if weight is not None:
        check_vector("weight", weight, x.shape[-1], x)
    check_eps(eps)
    check_choice("flavour", flavour, FLAVOURS)
    check_choice("order", order, ORDERS)
    check_choice("activation", activation, ACTIVATIONS)
    if group_size is not None and (isinstance(group_size, bool) or not isinstance(group_size, (int, torch.SymInt))):
        raise TypeError(f"group_size must be an int or None, not {type(group_size).__name__}")
    if group_size is not None and (group_size < 1 or x.shape[-1] % group_size):
        raise ValueError(f"group_size must divide the width {x.shape[-1]}; given {group_size}")


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    flavour: str = "cast_then_scale",
    order: str = "gate_then_norm",
    group_size: int | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """Root mean square norm with a gate, over the last dimension or over groups of it.

    All in float32 (float64 for float64): a = act(gate); norm(v) = v / sqrt(mean(v^2) + eps), the mean over each group.

    - `gate_then_norm`: scale(norm(x * a)) (source: transformers' `MambaRMSNormGated`, `Zamba2RMSNormGated` in groups);
    - `norm_then_gate`: round(scale(norm(x)) * a) (`Qwen3NextRMSNormGated`, `KimiLinearRMSNormGated`).

    scale(n) is weight * round(n) with `cast_then_scale`, and weight * n with `scale_then_cast` (`FalconH1RMSNormGated`);
    round is to the dtype of x, and ends scale_then_cast too.

    Args:
        x: [..., width], any strides; float16, bfloat16, float32 or float64.
        gate: the shape of x; of the same dtypes (float64 only beside float64).
        weight: [width], likewise, or None: unscaled.
        eps: finite and at least 0.
        flavour: `cast_then_scale` or `scale_then_cast`.
        order: `gate_then_norm` or `norm_then_gate`.
        group_size: a divisor of width, the elements that are normalised together; None: the whole width.
        activation: `silu` or `sigmoid`.

    Returns:
        [..., width], contiguous, memory of its own. The dtype of x; gate_then_norm with cast_then_scale, x's and
        weight's promoted.

    Raises:
        TypeError, ValueError: an argument is not as above.
        NotImplementedError: called under `torch.func.vmap`; leading dimensions already are a batch.
    """
    args = (x, gate, weight, eps, flavour, order, group_size, activation)
    check_arguments(*args)
    return reference.gated_rms_norm(*args)
