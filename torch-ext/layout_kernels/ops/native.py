"""The native CPU extension: its operators, and the instruction set that they run.

Imported by the operations' `cpu` modules, which require the extension; importing it loads torch and the extension.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from .. import _ops

LEVEL_VARIABLE = "LAYOUT_KERNELS_CPU_LEVEL"
# Raised with the schemas and meanings of torch_binding.cpp; a file that was built before is refused.
INTERFACE = 3

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)


def _load() -> ModuleType:
    name = _ops.EXTENSIONS["cpu"]
    module = import_module(f".{name}", __package__.rpartition(".")[0])
    found = getattr(module, "INTERFACE", None)
    if found != INTERFACE:
        raise ImportError(
            f"the native extension {module.__file__} has interface {found}, this package needs {INTERFACE}; build it "
            "again with `make native`, or remove the file to run without it"
        )
    level = os.environ.get(LEVEL_VARIABLE, "")
    if level:
        try:
            module.select_level(level)
        except ValueError as error:
            raise ValueError(f"{LEVEL_VARIABLE}: {error}; one of {', '.join(module.levels())}") from None
    return module


_module = _load()
_level = str(_module.current_level())
operators: Any = getattr(torch.ops, _ops.EXTENSIONS["cpu"])


def direct(operator: Any) -> Callable[..., Any]:
    """What calling an operator ends in: the same call, without the Python function in front of it."""
    function: Callable[..., Any] = getattr(operator.default, "_op", operator.default)
    return function


def levels() -> list[str]:
    """The instruction sets that the kernels can use on this processor, from the plainest to the best."""
    return list(_module.levels())


def level() -> str:
    """The instruction set that the kernels use: the best, unless `LAYOUT_KERNELS_CPU_LEVEL` names another."""
    return _level


def select_level(name: str) -> None:
    """Let later calls of every kernel use another instruction set; for tests and measurements.

    Raises:
        ValueError: this processor lacks it.
    """
    global _level
    _module.select_level(name)
    _level = name
