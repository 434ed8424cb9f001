"""Faults that a Hub can be told to have, each for the requests that it names."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from typing import Literal

Kind = Literal["status", "cut", "short", "stall", "delay"]


@dataclass
class Fault:
    """What goes wrong, for which requests and how often.

    Attributes:
        request: regular expression, searched in ``"METHOD /path"``.
        kind: "status" answers with ``status``; "cut" closes the connection after ``after`` bytes of the body; "short"
            has only these bytes and says so, as a broken proxy does; "stall" sends ``after`` bytes, then nothing for
            ``seconds``, then closes; "delay" answers after ``seconds``.
        times: how many requests it hits.
    """

    request: str
    kind: Kind
    status: int = 500
    after: int = 0
    seconds: float = 0.0
    retry_after: int | None = None
    times: int = 1


class Faults:
    """The faults that are still to come, and how many happened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Fault] = []
        self.happened = 0
        # Set when the server stops, so that no stalled answer outlives it.
        self.stopped = threading.Event()

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._waiting.append(fault)

    def clear(self) -> None:
        with self._lock:
            self._waiting.clear()
            self.happened = 0

    def take(self, request: str) -> Fault | None:
        """The first fault for this request, counted down."""
        with self._lock:
            for fault in self._waiting:
                if fault.times > 0 and re.search(fault.request, request):
                    fault.times -= 1
                    self.happened += 1
                    return fault
        return None
