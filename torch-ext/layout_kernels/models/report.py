"""Which of our layers a model runs, with which implementation, and why not where one was asked for."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn

from ..layer_table import OPERATION_OF

_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class Row:
    """One module: its path, our layer, the implementation of its operation on its device, and why not the best one.

    ``implementation`` is the name of a ``KernelSpec``, such as "cpu.reference.rms_norm"; ``fallback`` is empty when
    nothing stands back, else the reason.
    """

    path: str
    layer: str
    device: str
    implementation: str
    fallback: str = ""


@dataclass(frozen=True)
class Report:
    """The rows of one model; ``print`` groups equal ones."""

    rows: tuple[Row, ...]
    unbound: tuple[str, ...] = ()

    def __str__(self) -> str:
        kinds = Counter((r.layer, r.device, r.implementation, r.fallback) for r in self.rows)
        lines = [
            f"{count:4d} {layer} on {device}: {implementation}" + (f" ({fallback})" if fallback else "")
            for (layer, device, implementation, fallback), count in kinds.items()
        ]
        lines += [f"   - {reason}" for reason in self.unbound]
        return "\n".join(lines) or "no layer of layout-kernels in this model"


def layer_of(module: nn.Module) -> tuple[str, Any] | None:
    """The name of our layer that ``module`` runs, and the copy of this package that owns it; else None."""
    bound = getattr(vars(module).get("forward"), "__func__", None)
    cls: Any = type(module)
    if bound is None and getattr(cls, "is_adopted", False):
        name, home = cls._layout_kernels.name, cls._layout_kernels.layer.__module__
    elif getattr(module, "is_layout", False):
        name, home = cls.__name__.removesuffix("Layout"), cls.__module__
    elif bound is not None and bound.__qualname__.partition(".")[0] in OPERATION_OF:
        name, home = bound.__qualname__.partition(".")[0], bound.__module__
    else:
        return None
    return name, sys.modules.get(home.removesuffix(".layers"))


def _device_of(module: nn.Module) -> str:
    parameter = next(module.parameters(), None)
    hook = getattr(module, "_hf_hook", None)
    if parameter is None or parameter.device.type == "meta":
        return str(getattr(hook, "execution_device", None) or "cpu")
    return parameter.device.type


def _row(path: str, module: Any, name: str, owner: Any) -> Row:
    device = _device_of(module).partition(":")[0]
    device = {"0": "cuda"}.get(device, device)
    operation = OPERATION_OF[name]
    if operation == "rms_norm_mlp" and getattr(type(module), "is_adopted", False):
        apart = import_module(".running.gated_mlp", owner.__name__).why_in_parts(module)
        if apart:
            return Row(path, name, device, f"{type(module).__name__}.forward", apart)
    prepared = getattr(owner, f"prepare_{operation}")(device)
    reasons = sorted(set(prepared.excluded.values())) if prepared.spec.solution == "reference" else []
    return Row(path, name, device, prepared.spec.name, "; ".join(reasons))


def _unbound(model: Any, rows: list[Row]) -> tuple[str, ...]:
    """Layers that the model's KernelConfig asks for and no module runs."""
    config = getattr(model, "kernel_config", None)
    asked = getattr(config, "kernel_mapping", None) or {}
    running = {row.layer for row in rows}
    reasons = []
    for key, devices in asked.items():
        names = {repo.layer_name for modes in devices.values() for repo in modes.values()} if devices else {str(key)}
        for name in sorted(names - running):
            if name in OPERATION_OF:
                reasons.append(f"{name} was asked for, and no module of {type(model).__name__} runs it")
    return tuple(reasons)


def report(model: nn.Module) -> Report:
    """What runs in ``model``: for each module with one of our layers, the implementation on the module's device.

    A layer that was asked for and runs nowhere, and one that falls back, is warned about, once a process for each
    reason. The answer for a layer comes from the copy of this package that it belongs to.
    """
    rows = []
    for path, module in model.named_modules():
        found = layer_of(module)
        if found is not None and found[1] is not None:
            rows.append(_row(path, module, *found))
    result = Report(tuple(rows), _unbound(model, rows))
    for layer, reason in [("", reason) for reason in result.unbound] + [(r.layer, r.fallback) for r in rows]:
        if reason and (layer, reason) not in _warned:
            _warned.add((layer, reason))
            warnings.warn(f"layout-kernels: {layer + ': ' if layer else ''}{reason}", stacklevel=2)
    return result
