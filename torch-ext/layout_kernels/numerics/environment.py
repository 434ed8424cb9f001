"""Where a report was made: versions, processor, device, and the variables that change what runs."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import _ops

_PACKAGES = ("torch", "triton", "torch_npu", "kernels", "transformers", "liger-kernel")
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


def installed(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _accelerator(device: str) -> dict[str, Any] | None:
    import torch

    kind = device.partition(":")[0]
    if kind == "cpu":
        return None
    module: Any = torch.get_device_module(device)
    found: dict[str, Any] = {"type": kind}
    for key, name in (("name", "get_device_name"), ("capability", "get_device_capability")):
        ask = getattr(module, name, None)
        if ask is not None:
            value = ask(torch.device(device))
            found[key] = list(value) if isinstance(value, tuple) else value
    found["runtime"] = getattr(torch.version, kind, None)
    return found


def _instruction_set() -> str | None:
    if "cpu" not in _ops.EXTENSIONS:
        return None
    from ..ops import native

    return native.level()


def environment(device: str) -> dict[str, Any]:
    """What a reader needs to know to judge or repeat a report; ready for JSON."""
    import torch

    return {
        "build": _ops.NAMESPACE,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: installed(name) for name in _PACKAGES},
        "processor": processor(),
        "cpus": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "native_instruction_set": _instruction_set(),
        "accelerator": _accelerator(device),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("LAYOUT_KERNELS_") or name in _VARIABLES
        },
    }
