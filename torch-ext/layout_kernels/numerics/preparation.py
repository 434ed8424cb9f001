"""The implementation that a command proves or times. Knows no operation by name.

Selected by the rules of dispatch, but nothing is bound: several implementations can be proven side by side in a
process that uses others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

from ..dispatch import PreparedKernel
from ..dispatch.catalog import Entry, discover, import_backends
from ..dispatch.registry import REGISTRIES
from ..dispatch.runtime import RUNTIME, device_type
from ..dispatch.selection import PREFIX, incompatibility, parse_overrides, select
from .checks import structure_difference


def entry_of(operation: str) -> Entry:
    """The catalog's entry of an operation.

    Raises:
        ValueError: there is none; the message lists those that are there.
    """
    entries = discover()
    if operation not in entries:
        raise ValueError(f"unknown operation {operation!r}; there are {', '.join(entries)}")
    return entries[operation]


def select_kernel(operation: str, device: str, mode: str, implementation: str | None) -> PreparedKernel:
    """The implementation of an operation for a device and mode.

    In mode compile its `function` is the operator, which is what a compiled model calls; `in_use` lets it end at this
    implementation.

    Args:
        operation: its name.
        device: device or device type.
        mode: an execution mode.
        implementation: a full name or a solution; None: what dispatch selects.

    Raises:
        ValueError: nothing fits.
    """
    entry, kind = entry_of(operation), device_type(device)
    excluded = import_backends(entry, kind)
    candidates = REGISTRIES.candidates(kind)
    forced = parse_overrides(os.environ, None, discover()).get(operation)
    contract = entry.operation.contract

    # A backward runs beside its forward, as dispatch has it.
    leader = entry.operation.follows
    solution = select_kernel(leader, device, mode, None).spec.solution if leader else None

    def choose(target: str | None) -> PreparedKernel:
        return select(
            contract, candidates, kind, (mode,), target=target, preferred_solution=solution, excluded=excluded
        )

    plan = choose(implementation or forced)
    return replace(plan, function=operator_of(entry)) if mode == "compile" else plan


def check_override(operation: str, device: str, mode: str, implementation: str) -> None:
    """Refuse to prove or time one implementation where an override in the environment selects another.

    Raises:
        ValueError: it names the variable and both.
    """
    forced = parse_overrides(os.environ, None, discover()).get(operation)
    if forced is None:
        return
    asked, other = (select_kernel(operation, device, mode, target).spec.name for target in (implementation, forced))
    if other != asked:
        raise ValueError(
            f"{PREFIX}{operation.upper()}={forced} selects {other} for {operation}, and {asked} was asked for; unset "
            "the variable, or ask for what it names"
        )


def operator_of(entry: Entry) -> Any:
    """The torch operator of an operation or of a backward."""
    module = import_module(f"{entry.package}.operator")
    return module.FORWARD if entry.operation.follows is None else module.BACKWARD


def described_result(
    operation: str, reference: Callable[..., Any], arguments: Sequence[Any], *, as_operator: bool
) -> Any:
    """The structure, shapes and dtypes of an operation's result, as tensors without values.

    Args:
        operation: its name.
        reference: of the operation.
        arguments: of the operation.
        as_operator: whether the operator is called, which has an empty tensor where the reference has None.

    Raises:
        ValueError: the reference has another result than the operator's own description, which is written apart from
            it; nothing is proven by such a reference, itself least of all.
    """
    import torch

    bare = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in arguments]
    result, described = reference(*bare), operator_of(entry_of(operation))(*bare)
    filled = result
    if isinstance(result, tuple):
        empty = next(item for item in result if item is not None).new_empty(0)
        filled = tuple(empty if item is None else item for item in result)
    difference = structure_difference(filled, described, "meta", "the reference's result")
    if difference is not None:
        raise ValueError(f"{difference}, as the operator describes it")
    return filled if as_operator else result


def compatible_names(operation: str, device: str, mode: str) -> tuple[str, ...]:
    """Every implementation of an operation that dispatch could select here, sorted."""
    entry, kind = entry_of(operation), device_type(device)
    import_backends(entry, kind)
    contract = entry.operation.contract
    kernels = [k for k in REGISTRIES.candidates(kind) if k.spec.contract.operation == operation]
    return tuple(sorted(k.spec.name for k in kernels if incompatibility(k, contract, kind, (mode,)) is None))


@contextmanager
def in_use(plan: PreparedKernel, device: str) -> Iterator[None]:
    """Let the operator of the plan's operation end at the plan's implementation, and put things back afterwards."""
    kind = device_type(device)
    kernel = next((k for k in REGISTRIES.candidates(kind) if k.spec == plan.spec), None)
    if kernel is None or kernel.function is plan.function:
        yield
        return
    table = RUNTIME.functions(plan.spec.contract.operation)
    before = table.get(kind)
    table[kind] = kernel.function
    try:
        yield
    finally:
        if before is None:
            del table[kind]
        else:
            table[kind] = before
