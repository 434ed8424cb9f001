"""What other processes do while we time, as plugins: `LoadPlugin("cpu")` and so on."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..plugin import BasePlugin

_STAT = Path("/proc/stat")
_IDLE, _IOWAIT, _GUEST = 3, 4, 8  # columns of /proc/stat: proc(5)


@dataclass(frozen=True)
class Load:
    """What others did between two readings.

    Attributes:
        cpu_share: the share of the CPUs that we may use that others used, time taken by the hypervisor included; None:
            not known.
        device_processes: other processes that hold the accelerator; None: not known, or no accelerator.
        seconds: how long was watched.
    """

    cpu_share: float | None
    device_processes: int | None
    seconds: float

    def disturbance(self, limit: float) -> str | None:
        """Why what was timed meanwhile does not count, or None."""
        if self.cpu_share is not None and self.cpu_share > limit:
            return f"other processes used {self.cpu_share:.1%} of the CPUs while timing; the limit is {limit:.1%}"
        if self.device_processes:
            return f"{self.device_processes} other processes held the device while timing"
        return None

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"cpu_share": self.cpu_share, "device_processes": self.device_processes, "seconds": self.seconds}


class LoadPlugin(BasePlugin):
    """Watches by device type. Each is a class with `start(device)`, which returns a reading, and `stop(reading)`, the
    `Load` since.
    """


def _allowed() -> set[int]:
    """The CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _busy() -> float | None:
    """CPU seconds that were spent on the CPUs that we may use since the machine started, or None where it does not
    tell.
    """
    try:
        lines = [line.split() for line in _STAT.read_text(encoding="ascii").splitlines()]
        found = {
            words[0]: [int(word) for word in words[1:]] for words in lines if words and words[0].startswith("cpu")
        }
        # Guests' time is counted under user's too.
        spent = {name: sum(row[:_GUEST]) - row[_IDLE] - row[_IOWAIT] for name, row in found.items()}
    except (OSError, ValueError, IndexError):
        return None
    ours = [f"cpu{index}" for index in _allowed()]
    ticks = sum(spent[name] for name in ours) if spent.keys() >= set(ours) else spent.get("cpu")
    return None if ticks is None else ticks / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    return sum(os.times()[:4])


def _cuda_processes() -> int | None:
    """Other processes on the GPUs. Inside a container process numbers differ, so ours is counted, not looked for."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if found.returncode != 0:
        return None
    return max(0, len({line for line in found.stdout.splitlines() if line.strip()}) - 1)


@dataclass(frozen=True)
class Reading:
    """The counters at one time."""

    busy: float | None
    own: float
    time: float


@LoadPlugin("cpu").register()
class CpuLoad:
    """The time of the CPUs that we may use less our own."""

    @staticmethod
    def start(device: str) -> Reading:  # noqa: ARG004, as a watch that needs it
        """Begin to watch."""
        return Reading(_busy(), _own(), time.monotonic())

    @classmethod
    def stop(cls, reading: Reading) -> Load:
        """What others did since."""
        now, processes = cls.start(""), cls.device_processes()
        seconds = now.time - reading.time
        if now.busy is None or reading.busy is None or seconds <= 0:
            return Load(None, processes, seconds)
        others = (now.busy - reading.busy) - (now.own - reading.own)
        return Load(max(0.0, others) / (seconds * len(_allowed())), processes, seconds)

    @staticmethod
    def device_processes() -> int | None:
        """Other processes on the accelerator."""
        return None


@LoadPlugin("cuda").register()
class CudaLoad(CpuLoad):
    """The CPUs, and the processes that the driver lists."""

    device_processes = staticmethod(_cuda_processes)


# The vendor's tool has no output for programs to read, so an NPU's processes are not known.
LoadPlugin("npu").register()(CpuLoad)
