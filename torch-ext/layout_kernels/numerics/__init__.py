"""What proves an operation: its cases, made the same way for tests and benchmarks, and its tolerance.

`python -m layout_kernels.numerics` is `main`; importing this loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .suite import OperationSuite


def main(argv: Sequence[str] | None = None, suites: Mapping[str, OperationSuite] | None = None) -> int:
    """Prove implementations; see `cli.main`."""
    from .cli import main as run

    return run(argv, suites)
