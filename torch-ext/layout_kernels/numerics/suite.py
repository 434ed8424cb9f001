"""What an operation gives to be proven and timed: its suite. Plain data; importing this loads no torch.

Shared code reads nothing else of an operation: no argument, shape, tolerance or title.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..dispatch import PreparedKernel

PASSED, FAILED, NOT_APPLICABLE, NOT_RUN = "passed", "failed", "not_applicable", "not_run"
STATUSES = (PASSED, FAILED, NOT_APPLICABLE, NOT_RUN)


@dataclass(frozen=True)
class PreparedCase:
    """A case whose inputs lie on the device, bound to one implementation.

    Attributes:
        function: without arguments; calls the implementation on the inputs and returns its result, whatever structure
            that has.
        validate: is given such a function and calls it; returns a mapping whose `status` is "passed" or "failed", with
            a `reason` when it failed. It judges what that function returns, and nothing else.
        metadata: what describes the inputs, ready for JSON. Read where it is there: `bytes` and `flops` of one call,
            `dtype` of its products, and `size`, the number that a plot has on its horizontal axis.
        change: gives the inputs other values, in place, from a seed; 0 gives the first ones back. `validate` judges by
            the values that are there. None: they cannot be changed, so no graph can be proven.
    """

    function: Callable[[], Any]
    validate: Callable[[Callable[[], Any]], Mapping[str, Any]]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[int], None] | None = None


class KernelCase(Protocol):
    """One set of arguments of an operation."""

    @property
    def case_id(self) -> str:
        """A name that tells cases apart and holds what is needed to make one again, the seed included."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The same as a mapping, ready for JSON."""
        ...

    def unsupported_reason(self, plan: PreparedKernel) -> str | None:
        """Why the implementation does not take this case, from what it declares and never from trying; or None."""
        ...

    def prepare(self, plan: PreparedKernel) -> PreparedCase:
        """Make the inputs on the CPU from a fixed seed, move them to the device, and bind the implementation."""
        ...


def _no_peers(device: str, mode: str) -> Sequence[PreparedKernel]:  # noqa: ARG001, the signature of `peers`
    return ()


@dataclass(frozen=True)
class OperationSuite:
    """How one operation is proven and timed.

    Attributes:
        operation: its name, as in its contract.
        add_arguments: adds the suite's own options to a parser.
        cases: the cases that the parsed options ask for, those that all commands share among them (`device`, `mode`);
            raises ValueError for options that it cannot serve. Makes no tensor yet.
        prepare: the implementation for a device, a mode and a name or solution (None: what dispatch selects).
        peers: what else computes the same on a device and may be timed beside the implementations.
    """

    operation: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    cases: Callable[[argparse.Namespace], Iterable[KernelCase]]
    prepare: Callable[[str, str, str | None], PreparedKernel]
    peers: Callable[[str, str], Sequence[PreparedKernel]] = _no_peers
