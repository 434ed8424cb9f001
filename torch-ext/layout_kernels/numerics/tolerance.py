"""How far a result may be from the exact one, and why. Importing this loads no torch.

The exact result is the reference in float64. A result passes where its error is at most the reference's own plus a
bound that follows from where the contract rounds. Where the reference is infinite or NaN it must be the same, or the
infinity that is exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def in_float64(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with every floating-point tensor as float64."""
    import torch

    return tuple(
        value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for value in arguments
    )


def ulp(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance of neighbours in `dtype` at each value of `exact`, in float64."""
    import torch

    limits = torch.finfo(dtype)
    magnitude = exact.abs().nan_to_num(0.0, limits.max, limits.max).clamp(limits.smallest_normal, limits.max)
    _, exponent = torch.frexp(magnitude)
    return torch.ldexp(torch.ones_like(magnitude), exponent - 1) * limits.eps


def half_or_single(dtype: torch.dtype) -> int:
    """Units in the last place that an implementation of a norm may add: 2 in half precision, else 1.

    Half precision rounds twice in `cast_then_scale`, and sums in another order can turn each rounding once.
    """
    import torch

    return 2 if dtype in (torch.float16, torch.bfloat16) else 1


def explain(
    name: str, result: torch.Tensor, reference: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor
) -> str | None:
    """Why a result does not pass, or None.

    Args:
        name: of the result, for the message.
        result: of the implementation.
        reference: of the reference, from the same arguments.
        exact: in float64.
        bound: what the error may be beyond the reference's own; broadcast.
    """
    import torch

    if result.shape != reference.shape or result.dtype != reference.dtype:
        return (
            f"{name} is {result.dtype} {tuple(result.shape)}; the reference gives {reference.dtype} "
            f"{tuple(reference.shape)}"
        )
    if not result.is_contiguous():
        return f"{name} has strides {result.stride()}; it must be contiguous"
    finite = torch.isfinite(reference)
    # Some of torch's own activations give NaN for an infinity whose limit they could give; float64 is right as well.
    alike = (result == reference) | (result.isnan() & reference.isnan())
    alike |= ~torch.isfinite(exact) & (result.double() == exact)
    same = torch.where(finite, torch.isfinite(result), alike)
    if not same.all():
        where = (~same).nonzero()[0].tolist()
        return f"{name}{where} is {result[tuple(where)].item()}; the reference gives {reference[tuple(where)].item()}"
    own = (reference.double() - exact).abs()
    excess = (result.double() - exact).abs() - own - bound
    excess = torch.where(finite & torch.isfinite(exact), excess, torch.full_like(excess, -1.0))
    if excess.numel() and bool((excess > 0).any()):
        where = [int(i) for i in torch.unravel_index(excess.argmax(), excess.shape)]
        at = tuple(where)
        return (
            f"{name}{where} is {result[at].item()}, exact {exact[at].item()}, reference {reference[at].item()}; "
            f"the bound beyond the reference's error is {torch.broadcast_to(bound, excess.shape)[at].item():.3g}"
        )
    return None
