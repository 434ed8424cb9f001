"""What this machine can run, and what stands in the way."""

from __future__ import annotations

import platform
from importlib import import_module

from .._ops import EXTENSIONS, NAMESPACE
from ..commands import missing
from ..dispatch import initialize
from ..transformers_glue.versions import check_versions, installed

PACKAGES = ("torch", "transformers", "kernels", "accelerate", "triton", "torch_npu")


def _devices() -> list[str]:
    import torch

    found = ["cpu"]
    for name in ("cuda", "npu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            found.append(name)
    return found


def _implementations(device: str) -> list[str]:
    lines = []
    for operation, plan in initialize(device).items():
        lines.append(f"  {operation}: {plan.spec.name}")
        lines += [f"    not {name}: {reason}" for name, reason in plan.excluded.items()]
    if device == "cpu" and "cpu" in EXTENSIONS:
        lines += [f"  {line}" for line in import_module("..ops.tuning", __package__).describe()]
    return lines


def diagnose() -> tuple[str, bool]:
    """A text with versions, devices and the implementation of each operation; and whether models can be loaded."""
    lines = [f"python {platform.python_version()} on {platform.machine()}, build {NAMESPACE}"]
    lines += [f"{name} {installed(name) or 'is not installed'}" for name in PACKAGES]
    problems: list[str] = []
    try:
        for device in _devices():
            lines += [f"{device}:", *_implementations(device)]
        check_versions()
    except ModuleNotFoundError as error:
        problems.append(missing(error))
    except ImportError as error:
        problems.append(str(error))
    return "\n".join([*lines, *(f"in the way: {problem}" for problem in problems)]), not problems
