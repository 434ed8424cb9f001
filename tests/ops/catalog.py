"""Every operation with what its folder and its numerics module hold, read from the catalog and from nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

from layout_kernels.dispatch.catalog import discover, import_backends
from layout_kernels.dispatch.registry import REGISTRIES, RegisteredKernel
from layout_kernels.numerics.cases import Case

ENTRIES = discover()
OPERATIONS = tuple(name for name, entry in ENTRIES.items() if entry.operation.follows is None)
BACKWARD_OF = {e.operation.follows: name for name, e in ENTRIES.items() if e.operation.follows is not None}


def suite(operation: str) -> ModuleType:
    return import_module(f"layout_kernels.numerics.{operation}")


def operator(operation: str) -> ModuleType:
    return import_module(f"layout_kernels.ops.{operation}.operator")


def implementations(operation: str) -> list[RegisteredKernel]:
    """What is registered for CPU tensors: the reference, and every other that can be loaded on this machine."""
    import_backends(ENTRIES[operation], "cpu")
    return [k for k in REGISTRIES.candidates("cpu") if k.spec.contract.operation == operation]


@dataclass(frozen=True)
class Subject:
    """An operation or backward in one case: its operator, an implementation, arguments and comparison."""

    operation: str
    case: Case
    backward: bool

    @property
    def name(self) -> str:
        return BACKWARD_OF[self.operation] if self.backward else self.operation

    @property
    def operator(self) -> Any:
        module = operator(self.operation)
        return module.BACKWARD if self.backward else module.FORWARD

    def arguments(self) -> tuple[Any, ...]:
        module = suite(self.operation)
        return module.backward_arguments(self.case) if self.backward else module.arguments(self.case)

    def compare(self, result: Any, arguments: tuple[Any, ...]) -> str | None:
        module = suite(self.operation)
        return module.compare_backward(result, arguments) if self.backward else module.compare(result, arguments)


def subjects(keep=lambda case: True) -> list[Any]:
    """Parameters for pytest: every operation and backward in every case that `keep` takes."""
    found = [
        Subject(operation, case, backward)
        for operation in OPERATIONS
        for backward in ((False, True) if operation in BACKWARD_OF else (False,))
        for case in suite(operation).CASES
        if keep(case)
    ]
    return [pytest.param(subject, id=f"{subject.name}-{subject.case.case_id}") for subject in found]


def tensors_of(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [item for item in values if isinstance(item, torch.Tensor)]
