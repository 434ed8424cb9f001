"""What merging and splitting parameters means for the optimizers that hold them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch


def holders(parameters: Iterable[torch.Tensor], known: Any = None) -> list[torch.optim.Optimizer]:
    """Optimizers of this process, other than ``known``, that hold one of ``parameters``."""
    wanted = {id(parameter) for parameter in parameters}
    inner = getattr(known, "optimizer", known)
    return [
        found
        for found in gc.get_objects()
        if issubclass(type(found), torch.optim.Optimizer)  # isinstance would run properties of foreign objects
        and found is not known
        and found is not inner
        and any(id(p) in wanted for group in found.param_groups for p in group["params"])
    ]


def _place(optimizer: Any, parameter: torch.Tensor) -> tuple[list[Any], int] | None:
    """The parameter list that holds ``parameter``, and its index in it."""
    for group in optimizer.param_groups:
        for index, held in enumerate(group["params"]):
            if held is parameter:
                return group["params"], index
    return None


def check_merge(optimizer: Any, old: Sequence[torch.Tensor]) -> None:
    """Raise RuntimeError when ``old`` cannot become one parameter of ``optimizer``: other groups, or uneven state."""
    places = [_place(optimizer, parameter) for parameter in old]
    if all(place is None for place in places):
        return
    if any(place is None for place in places) or len({id(place[0]) for place in places if place}) > 1:
        raise RuntimeError(
            "parameters that are to be merged are in different groups of the optimizer, or only some are"
        )
    states = [optimizer.state.get(parameter, {}) for parameter in old]
    if any(sorted(state) != sorted(states[0]) for state in states):
        raise RuntimeError("parameters that are to be merged have different kinds of optimizer state")
    for name, first in states[0].items():
        shaped = isinstance(first, torch.Tensor) and first.shape == old[0].shape
        if _of_another_shape(first, old[0]):
            raise RuntimeError(
                f"the optimizer's {name!r} has shape {tuple(first.shape)} for a parameter of {tuple(old[0].shape)} "
                "(factored or quantised state), which cannot be merged: apply kernels before the first step, or drop "
                "the state (optimizer.state.clear())"
            )
        if not shaped and any(not _equal(state[name], first) for state in states[1:]):
            raise RuntimeError(f"parameters that are to be merged differ in the optimizer's {name!r}")


def check_split(optimizer: Any, old: torch.Tensor) -> None:
    """Raise RuntimeError when the state of ``old`` in ``optimizer`` cannot be split as the parameter is."""
    for name, value in optimizer.state.get(old, {}).items():
        if _of_another_shape(value, old):
            raise RuntimeError(
                f"the optimizer's {name!r} has shape {tuple(value.shape)} for a merged parameter of "
                f"{tuple(old.shape)} (factored or quantised state), which cannot be split: drop the state "
                "(optimizer.state.clear()) and undo again, or keep the kernels"
            )


def _of_another_shape(value: Any, parameter: torch.Tensor) -> bool:
    """State that is neither one value for each of the parameter's, nor one for all of them, such as a step."""
    return isinstance(value, torch.Tensor) and value.shape != parameter.shape and value.numel() > 1


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)


def merge(optimizer: Any, old: Sequence[torch.Tensor], new: torch.Tensor) -> None:
    """Put ``new`` in the place of ``old`` in its group; state of the parameters' shape is concatenated along dim 0."""
    places = [_place(optimizer, parameter) for parameter in old]
    if places[0] is None:
        return
    states = [optimizer.state.get(parameter, {}) for parameter in old]
    # What may fail, for want of memory, comes before the first change.
    merged = {
        name: torch.cat([state[name] for state in states])
        if isinstance(first, torch.Tensor) and first.shape == old[0].shape
        else first
        for name, first in states[0].items()
    }
    for parameter in old:
        optimizer.state.pop(parameter, None)
    group, _ = places[0]
    index = min(place[1] for place in places if place is not None)
    group[:] = [parameter for parameter in group if not any(parameter is p for p in old)]
    group.insert(index, new)
    if merged:
        optimizer.state[new] = merged


def split(optimizer: Any, old: torch.Tensor, new: Sequence[torch.Tensor]) -> None:
    """The inverse of :func:`merge`: ``new`` in the place of ``old``, its state in equal parts along dim 0."""
    place = _place(optimizer, old)
    if place is None:
        return
    group, index = place
    state = optimizer.state.get(old, {})
    parts = [
        {
            name: value.chunk(len(new))[number].clone()
            if isinstance(value, torch.Tensor) and value.shape == old.shape
            else (value.clone() if isinstance(value, torch.Tensor) else value)
            for name, value in state.items()
        }
        for number in range(len(new))
    ]
    optimizer.state.pop(old, None)
    group[index : index + 1] = list(new)
    for parameter, part in zip(new, parts, strict=True):
        if part:
            optimizer.state[parameter] = part
