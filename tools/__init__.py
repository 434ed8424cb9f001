"""Development tools: nothing in here ships. They import the package from this tree."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SOURCES = str(Path(__file__).resolve().parents[1] / "torch-ext")
sys.path.insert(0, SOURCES)


def source_environment() -> dict[str, str]:
    """The variables of a process that does so too."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([SOURCES, os.getenv("PYTHONPATH", "")])}
