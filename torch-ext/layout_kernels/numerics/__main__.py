"""`python -m layout_kernels.numerics`."""

from __future__ import annotations

import sys

from ..commands import run


def main() -> int:
    """The command; see `cli.main`."""
    from .cli import main as command

    return command()


if __name__ == "__main__":
    sys.exit(run("numerics", main))
