"""The suites of all operations: found through the catalog of dispatch, so that there is no second list to keep."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from ..dispatch.catalog import discover
from .suite import OperationSuite


def suites() -> Mapping[str, OperationSuite]:
    """Every operation's suite by name: `SUITE` of `numerics/<operation>.py`, for a backward its `BACKWARD_SUITE`.

    Loads no torch.

    Raises:
        TypeError: an operation of the catalog has no suite.
        ValueError: a suite of another operation.
    """
    found: dict[str, OperationSuite] = {}
    for name, entry in discover().items():
        module = import_module(f".{entry.operation.follows or name}", __package__)
        attribute = "SUITE" if entry.operation.follows is None else "BACKWARD_SUITE"
        suite = getattr(module, attribute, None)
        if not isinstance(suite, OperationSuite):
            raise TypeError(f"{module.__name__} must define {attribute}, the OperationSuite of {name}")
        if suite.operation != name:
            raise ValueError(f"{attribute} of {module.__name__} is for {suite.operation!r}; it must be for {name!r}")
        found[name] = suite
    return found
