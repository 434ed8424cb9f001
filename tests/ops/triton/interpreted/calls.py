"""The Triton implementations by operation, called with CPU tensors."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from layout_kernels.numerics.cases import Case

OPERATIONS = ("rms_norm", "gated_activation", "gated_rms_norm", "rms_norm_mlp")
WITH_BACKWARD = OPERATIONS[:3]


def suite(operation: str) -> Any:
    return import_module(f"layout_kernels.numerics.{operation}")


def forward(operation: str) -> Any:
    return getattr(import_module(f"layout_kernels.ops.{operation}.triton"), operation)


def backward(operation: str) -> Any:
    return getattr(import_module(f"layout_kernels.ops.{operation}.triton"), f"{operation}_backward")


def forward_difference(operation: str, case: Case) -> str | None:
    arguments = suite(operation).arguments(case)
    return suite(operation).compare(forward(operation)(*arguments), arguments)


def backward_difference(operation: str, case: Case) -> str | None:
    arguments = suite(operation).backward_arguments(case)
    return suite(operation).compare_backward(backward(operation)(*arguments), arguments)
