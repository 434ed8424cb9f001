"""What times an operation, once it is proven.

`python -m layout_kernels.benchmark` is `main`; importing this loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..numerics.suite import OperationSuite


def main(argv: Sequence[str] | None = None, suites: Mapping[str, OperationSuite] | None = None) -> int:
    """Proves and times implementations; see `cli.main`."""
    from .cli import main as run

    return run(argv, suites)
