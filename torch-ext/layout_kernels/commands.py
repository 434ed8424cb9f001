"""What the command lines of this package share: one line, not a traceback, where a package is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable


def missing(error: ModuleNotFoundError) -> str:
    """What is missing, and the command that installs it.

    Raises:
        ModuleNotFoundError: the error itself, where a module of this package is missing.
    """
    package = (error.name or "").partition(".")[0]
    if not package or package == __name__.partition(".")[0]:
        raise error
    return f"{package} is not installed; python -m pip install {package}"


def run(name: str, command: Callable[[], int]) -> int:
    """The exit status of a command, 2 where it lacks a package."""
    try:
        return command()
    except ModuleNotFoundError as error:
        sys.stderr.write(f"{name}: {missing(error)}\n")
        return 2
