"""Memory of a checkpoint file is given back after a merge, and no value can change by that."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from layout_kernels.checkpoints.mapped_memory import Pages

SIZE = 1 << 20  # float32 values, 4 MiB


def mapped(tmp_path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor, and the same values as a view of a mapped file."""
    values = torch.arange(SIZE, dtype=torch.float32)
    save_file({"x": values}, tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        return values, file.get_slice("x")[...]


def resident(tensor: torch.Tensor) -> int:
    """KiB of the mapping that holds ``tensor`` which are in memory."""
    address, inside, found = tensor.data_ptr(), False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name and not name.endswith(":"):
            low, high = (int(part, 16) for part in name.split("-"))
            inside = low <= address < high
        elif inside and name == "Rss:":
            found = int(values[0])
    return found


def test_pages_of_a_file_leave_and_come_back_with_their_values(tmp_path: Path) -> None:
    values, view = mapped(tmp_path)
    assert torch.equal(view, values)
    before, pages = resident(view), Pages()
    assert before >= 4 * SIZE // 1024
    pages.note(view)
    pages.release()
    assert resident(view) <= before // 8
    assert torch.equal(view, values)


def test_what_somebody_wrote_into_a_mapping_stays(tmp_path: Path) -> None:
    values, view = mapped(tmp_path)
    view[SIZE // 2] = -1.0
    pages = Pages()
    pages.note(view)
    pages.release()
    assert view[SIZE // 2] == -1.0
    assert torch.equal(view[: SIZE // 2], values[: SIZE // 2])


def test_memory_that_is_no_file_is_left_alone() -> None:
    values, pages = torch.arange(SIZE, dtype=torch.float32), Pages()
    expected = values.clone()
    pages.note(values)
    pages.note(values.view(1024, 1024).t())
    pages.release()
    assert torch.equal(values, expected)
