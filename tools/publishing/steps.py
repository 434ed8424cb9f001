"""Progress of a command with several steps: a bar on a terminal, and lines that stay."""

from __future__ import annotations

import sys

WIDTH = 24


class Steps:
    """Counts steps and prints what each found.

    Args:
        total: number of steps.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = -1
        self._now = ""

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *exception: object) -> None:
        self.clear()

    def begin(self, text: str) -> None:
        """The next step."""
        self.clear()
        self._done += 1
        self._total = max(self._total, self._done + 1)
        self._now = text
        print(f"[{self._done + 1}/{self._total}] {text}", flush=True)
        self.work("")

    def say(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        print(f"      {text}", flush=True)
        self.work("")

    def work(self, text: str) -> None:
        """What is being worked on, beside the bar."""
        if sys.stderr.isatty():
            filled = WIDTH * max(self._done, 0) // self._total
            bar = "#" * filled + "." * (WIDTH - filled)
            sys.stderr.write(f"\r\x1b[K[{bar}] {self._now} {text}"[:110])
            sys.stderr.flush()

    def clear(self) -> None:
        """Take the bar away."""
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
