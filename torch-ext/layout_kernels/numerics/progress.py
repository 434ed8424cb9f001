"""A progress bar on a terminal, and nothing elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

_WIDTH = 24


class Progress:
    """Counts steps; a context manager that leaves the line clean.

    Args:
        total: number of steps.
        stream: where to draw; None: standard error.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = total
        self._done = 0
        self._stream = sys.stderr if stream is None else stream
        self._start = time.monotonic()
        self._visible = self._stream.isatty()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._write("")

    def say(self, text: str) -> None:
        """Show what is being worked on."""
        filled = _WIDTH * self._done // max(self._total, 1)
        bar = "#" * filled + "." * (_WIDTH - filled)
        line = f"[{bar}] {self._done}/{self._total} {time.monotonic() - self._start:.0f} s  {text}"
        # A line that the terminal wraps could not be drawn over.
        self._write(line[: shutil.get_terminal_size().columns - 1])

    def step(self) -> None:
        """One more is done."""
        self._done += 1

    def _write(self, text: str) -> None:
        if self._visible:
            self._stream.write("\r\x1b[K" + text)
            self._stream.flush()
