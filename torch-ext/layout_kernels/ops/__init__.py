"""The operations: a folder for each, with its contract, its meaning (`reference`) and its implementations.

``from layout_kernels.ops import rms_norm`` gives the package of the operation, and ``rms_norm(x, weight)`` calls it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from .. import _ops


class OperationPackage(ModuleType):
    """The package of an operation, which can be called, and whose names that need torch are found when asked for."""

    _lazy: dict[str, str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The operation of the package's name."""
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """A name of `lazy`, from the module that defines it."""
        home = self.__dict__.get("_lazy", {}).get(name)
        if home is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(import_module(f".{home}", self.__name__), name)


def is_operation(package: str, lazy: dict[str, str]) -> None:
    """Make the package of this name an `OperationPackage`.

    Args:
        package: ``__name__`` of the package.
        lazy: public names that need torch, each with the module of the package that defines it.
    """
    module = sys.modules[package]
    module.__class__ = OperationPackage
    module.__dict__["_lazy"] = lazy


def prepare_for(model: Any) -> None:
    """Before ``model`` runs: measure, once on a machine, what `tuning` measures, if it has parameters on the CPU."""
    if "cpu" in _ops.EXTENSIONS and any(parameter.is_cpu for parameter in model.parameters()):
        import_module(".tuning", __name__).prepare()
