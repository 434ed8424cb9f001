"""Compiles recorded launches for GPUs that are not there, and reads from the machine code what they cost."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from layout_kernels.ops import triton_launch

VERSION = triton.__version__
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# The multiprocessors of an H100: how many programs share the rows depends on it, not what is compiled.
_PROCESSORS = 132


class Launch(NamedTuple):
    """A kernel, its grid, and what it is called with."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Cost(NamedTuple):
    """Registers a thread, bytes a thread keeps in memory because registers do not hold them, bytes shared."""

    registers: int
    spilled: int
    shared: int


class _Device:
    """A driver that names a target and has no device, which is all that compiling needs."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch

    def get_current_stream(self, device: int) -> int:
        return device * 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


def meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor without memory, which is enough to compile for."""
    return torch.empty(shape, dtype=dtype, device="meta")


def launches(function: Callable[[], Any]) -> list[Launch]:
    """What a call of an implementation launches; its tensors may be on the meta device."""
    found: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...], _: torch.device, *args: Any, **options: Any) -> None:
        found.append(Launch(kernel, grid, args, options))

    with (
        mock.patch.object(triton_launch, "launch", record),
        mock.patch.object(triton_launch, "processors", return_value=_PROCESSORS),
    ):
        function()
    return found


def cost(launch: Launch, capability: int) -> Cost:
    """Compile for a compute capability, 90 for 9.0, as the launch itself would."""
    driver.set_active(_Device(capability))
    compiled = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(_CUOBJDUMP), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = _USAGE.search(usage)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of resources: {usage!r}")
    registers, stack, local = map(int, found.groups())
    return Cost(registers, stack + local, compiled.metadata.shared)
