"""What a gated norm computes, found by running its class, as ``norms.py`` does for norms and MLPs.

transformers has gated norms that multiply by the gate before or after the norm, by silu or sigmoid of it, over the
whole row or in groups, and round at two places. ``ops/gated_rms_norm/reference.py`` has them all; the one that gives
the same bits as the class is the answer.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..ops.gated_rms_norm import ACTIVATIONS, FLAVOURS, ORDERS
from ..ops.gated_rms_norm.reference import gated_rms_norm as reference
from . import norms
from .run_class import blank_copy, check_not_sharded, examine, plain_settings, remembered, run, settings

HUB_NAME = "RMSNormGated"
WIDTH = 24


@dataclass(frozen=True)
class GatedFinding:
    """The arguments of ``gated_rms_norm`` that make it compute what the class does.

    ``flavour`` is None when there are none, then ``reason`` says why. ``group_size`` is None for the whole row.
    """

    flavour: str | None
    order: str = ""
    group_size: int | None = None
    activation: str = ""
    eps_name: str = ""
    reason: str = ""


_found: dict[Any, GatedFinding] = {}
_classes: dict[Any, GatedFinding] = {}


def takes_gate(module: nn.Module) -> bool:
    """Whether the class's forward takes a second tensor called ``gate``."""
    return "gate" in inspect.signature(type(module).forward).parameters


def _inputs(width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of ordinary, large and tiny size, a gate that reaches where silu and sigmoid saturate, and a weight."""
    generator = torch.Generator().manual_seed(23)
    x, gate = (torch.randn(6, width, generator=generator, dtype=torch.float32) for _ in range(2))
    scale = torch.tensor([1.0, 30.0, 1e-3, 0.3, 1e-2, 3.0], dtype=torch.float32)[:, None]
    return x * scale, gate * 4, torch.randn(width, generator=generator, dtype=torch.float32) * 1.5


def _group_sizes(module: Any, width: int) -> list[int | None]:
    """The whole row, and the groups that the module's own attributes speak of."""
    size, count = getattr(module, "group_size", None), getattr(module, "n_groups", None)
    found: list[int | None] = [None]
    if isinstance(size, int) and 0 < size < width and width % size == 0:
        found.append(size)
    if isinstance(count, int) and count > 1 and width % count == 0:
        found.append(width // count)
    return found


def _compare(module: Any, eps: float) -> tuple[str, str, str, int | None] | None:
    width = module.weight.shape[-1]
    candidates = list(itertools.product(FLAVOURS, ORDERS, ACTIVATIONS, _group_sizes(module, width)))
    x32, gate32, w32 = _inputs(width)
    for x_dtype, w_dtype in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        x, gate, weight = x32.to(x_dtype), gate32.to(x_dtype), w32.to(w_dtype)
        probe = blank_copy(module)
        probe.weight = nn.Parameter(weight, requires_grad=False)
        got = run(probe, x, gate)
        kept = []
        for flavour, order, activation, group_size in candidates:
            expected = reference(x, gate, weight, eps, flavour, order, group_size, activation)
            if got.dtype == expected.dtype and torch.equal(got, expected):
                kept.append((flavour, order, activation, group_size))
        candidates = kept
    return candidates[0] if candidates else None


def _find(module: Any) -> GatedFinding:
    name = type(module).__name__
    eps = norms.eps_of(module)
    weight = getattr(module, "weight", None)
    if eps is None:
        return GatedFinding(None, reason=f"{name} has none of the attributes {list(norms.EPS_NAMES)}")
    if weight is None or weight.dim() != 1 or len(list(module.parameters())) > 1:
        return GatedFinding(None, reason=f"{name} has other parameters than one `weight` [hidden_size]")
    try:
        found = examine(lambda: _compare(module, eps[1]))
    except Exception as error:  # noqa: BLE001 what a foreign class raises is the reason why it is not ours
        return GatedFinding(None, reason=f"{name} could not be run on [6, hidden_size] inputs: {error!r}")
    if found is None:
        return GatedFinding(None, reason=f"{name} computes no gated norm that we know (compared bit for bit)")
    flavour, order, activation, group_size = found
    return GatedFinding(flavour, order, group_size, activation, eps[0])


def gated_flavour(module: nn.Module) -> GatedFinding:
    """What the gated norm ``module`` computes with its settings."""
    weight = getattr(module, "weight", None)
    key = (type(module), settings(module), None if weight is None else tuple(weight.shape))
    return remembered(_found, key, lambda: _find(module))


def why_not_bound(module: nn.Module) -> str:
    """Why ``RMSNormGated`` cannot run ``module``; empty when it can."""
    if getattr(type(module), "kernel_layer_name", None) != HUB_NAME:
        return f"{type(module).__name__} is a gated norm without the hub name {HUB_NAME!r}, to which a kernel binds"
    return gated_flavour(module).reason


def _decide(module: Any) -> GatedFinding:
    finding = gated_flavour(module)
    if finding.flavour is None:
        raise ValueError(f"RMSNormGated cannot run {type(module).__name__}: {finding.reason}. Leave its key out.")
    _classes[plain_settings(module)] = finding
    return finding


@torch.compiler.assume_constant_result
def _decide_while_compiling(cls: type, *own: Any) -> tuple[str, str, int | None, str, str]:
    finding = _classes.get((cls, *own))
    if finding is None:
        small = cls(WIDTH)
        if plain_settings(small) != (cls, *own):
            raise ValueError(f"{cls.__name__}: run the model once before compiling it, its settings are {own}")
        finding = _decide(small)
    return str(finding.flavour), finding.order, finding.group_size, finding.activation, finding.eps_name


def class_arguments(module: nn.Module) -> tuple[str, str, int | None, str, str]:
    """Flavour, order, group size, activation and eps name of ``module``'s class: the lookup that a forward can afford.

    Raises:
        ValueError: the class computes no gated norm that we know.
    """
    check_not_sharded(module)
    if torch.compiler.is_compiling():
        return _decide_while_compiling(*plain_settings(module))
    finding = _classes.get(plain_settings(module)) or _decide(module)
    return str(finding.flavour), finding.order, finding.group_size, finding.activation, finding.eps_name
