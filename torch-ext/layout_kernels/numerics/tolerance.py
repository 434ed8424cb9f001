"""How far a result may be from the exact one, and why. Importing this loads no torch.

The exact result is the reference in float64. A result passes where its error is at most the reference's own plus a
bound that follows from where the contract rounds. Where the reference is infinite or NaN it must be the same, or the
infinity that is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def gradients(
    function: Callable[..., torch.Tensor], grad: torch.Tensor, arguments: Sequence[Any], needed: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of `function` by autograd, for as many leading arguments as `needed` has, or None.

    Args:
        function: made of torch's own differentiable operators.
        grad: gradient of its result.
        arguments: of the function.
        needed: whether the gradient of each is asked for.
    """
    import torch

    leaves = [
        value.detach().requires_grad_(True) if need else value for value, need in zip(arguments, needed, strict=False)
    ]
    with torch.enable_grad():
        result = function(*leaves, *arguments[len(leaves) :])
    wanted = [leaf for leaf, need in zip(leaves, needed, strict=True) if need]
    found = iter(torch.autograd.grad(result, wanted, grad.to(result.dtype)) if wanted else ())
    return tuple(next(found) if need else None for need in needed)


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
    # A bound that is NaN bounds nothing.
    excess = torch.where(excess.isnan(), torch.full_like(excess, float("inf")), excess)
    if excess.numel() and bool((excess > 0).any()):
        where = [int(i) for i in torch.unravel_index(excess.argmax(), excess.shape)]
        at = tuple(where)
        return (
            f"{name}{where} is {result[at].item()}, exact {exact[at].item()}, reference {reference[at].item()}; "
            f"the bound beyond the reference's error is {torch.broadcast_to(bound, excess.shape)[at].item():.3g}"
        )
    return None


def explain_reference(result: Any, exact: Any, arguments: Sequence[Any], place: str = "result") -> str | None:
    """Why the reference does not compute `exact`, a formula in float64 that was written apart from it; or None.

    What is asked is that the formula is the same, so one bound serves every operation: 16 roundings in the narrowest
    dtype of the arguments, and those of a sum, relative to the largest value of the row (for a vector, of the vector)
    and to 1e-5, below which the difference of two larger numbers may be left. Where an argument holds an infinity or a
    NaN it is left to the comparison of the operation.
    """
    import torch

    if isinstance(exact, tuple):
        pairs = zip(result, exact, strict=True)
        found = (explain_reference(one, other, arguments, f"{place}[{i}]") for i, (one, other) in enumerate(pairs))
        return next((reason for reason in found if reason is not None), None)
    if exact is None or result is None or not exact.numel():
        return None
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    narrowest = max(torch.finfo(tensor.dtype).eps for tensor in (*tensors, result))
    computed = torch.finfo(torch.float64 if narrowest < torch.finfo(torch.float32).eps else torch.float32).eps
    terms = max(tensor.numel() for tensor in tensors)
    largest = exact.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True)
    bound = (16 * narrowest + 2 * terms**0.5 * computed) * largest.clamp(min=1e-5)
    comparable = torch.isfinite(exact) & torch.isfinite(largest) & (exact.abs() < torch.finfo(result.dtype).max)
    comparable &= torch.stack([torch.isfinite(t).all() for t in tensors]).all()
    excess = torch.where(comparable, (result.double() - exact).abs() - bound, torch.zeros_like(exact))
    # A NaN in place of a number compares as not smaller.
    if bool((~(excess <= 0)).any()):
        at = tuple((~(excess <= 0)).nonzero()[0].tolist())
        return f"{place}{list(at)} of the reference is {result[at].item()}; the formula gives {exact[at].item()}"
    return None
