"""Memory of a checkpoint file that a merge has copied: given back, so that a merged weight is not held twice.

safetensors maps the file, and a stock model's weights are views of that mapping. A merged weight is a copy; the pages
of its originals would stay resident until the file is closed, which is when the model dies.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from pathlib import Path

import torch

MADV_DONTNEED = 4  # <linux/mman.h>; a clean page of a file only leaves this process, it is read again when asked for


class Pages(threading.local):
    """Ranges of memory that a load in this thread has copied."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def note(self, tensor: torch.Tensor) -> None:
        """Record that ``tensor`` was copied and is not needed any more."""
        if tensor.device.type == "cpu" and tensor.is_contiguous() and sys.platform == "linux":
            start = tensor.data_ptr()
            self._ranges.append((start, start + tensor.numel() * tensor.element_size()))

    def release(self) -> None:
        """Drop the whole pages of what was recorded, where it lies in the mapping of a file and nowhere else."""
        ranges, self._ranges = self._ranges, []
        if not ranges:
            return
        files = _file_mappings()
        madvise = ctypes.CDLL(None).madvise
        for start, end in ranges:
            first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last and any(low <= first and last <= high for low, high in files):
                madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_DONTNEED)


def _file_mappings() -> list[tuple[int, int]]:
    """Address ranges of this process that map a file and hold no page that anybody has written to."""
    found: list[tuple[int, int]] = []
    current: tuple[int, int] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name and not name.endswith(":"):
            low, _, high = name.partition("-")
            current = (int(low, 16), int(high, 16)) if values[3] != "0" else None
        elif name == "Anonymous:" and values[0] == "0" and current is not None:
            found.append(current)
    return found


pages = Pages()
