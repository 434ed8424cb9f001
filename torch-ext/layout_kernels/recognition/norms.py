"""What a norm computes, found by running its class on a small input.

Names and signatures do not tell: 213 RMSNorm classes of transformers compute at least six different things, two of
them under the hub name "RMSNorm". So a small instance of the class runs on inputs chosen to tell the candidates
apart, and its results are compared bit for bit with ``ops/*/reference.py``. An answer is kept per class and settings.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..ops.rms_norm import FLAVOURS
from ..ops.rms_norm.reference import rms_norm as reference_rms_norm
from .run_class import EPS_NAMES, blank_copy, check_not_sharded, examine, plain_settings, remembered, run, settings

DESCRIPTIONS = {
    "cast_then_scale": "weight * (normalised, rounded to the input's dtype)",
    "scale_then_cast": "(weight * normalised in float32), then rounded to the input's dtype",
    "one_plus_scale": "(1 + weight) * normalised in float32, weight offset 1",
}


@dataclass(frozen=True)
class NormFinding:
    """What a norm computes. ``flavour`` is None when it is none of ours, then ``reason`` says why."""

    flavour: str | None
    eps_name: str = ""
    reason: str = ""


_norms: dict[Any, NormFinding] = {}
_decided: dict[tuple[Any, ...], NormFinding] = {}


def eps_of(module: nn.Module) -> tuple[str, float] | None:
    """The name and value of ``module``'s epsilon, or None. Zero is a value."""
    for name in EPS_NAMES:
        value = getattr(module, name, None)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return name, float(value)
    return None


def _norm_inputs(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ordinary, large and tiny size (where eps decides), and a weight on both sides of 0 and 1."""
    generator = torch.Generator().manual_seed(20)
    x = torch.randn(6, width, generator=generator, dtype=torch.float32, device="cpu")
    scale = torch.tensor([1.0, 30.0, 1e-3, 0.3, 1e-2, 3.0], dtype=torch.float32, device="cpu")[:, None]
    weight = torch.randn(width, generator=generator, dtype=torch.float32, device="cpu") * 1.5
    return x * scale, weight


def _compare_norm(module: Any, eps: float) -> str | None:
    """The flavour whose reference gives the same bits as ``module`` for every mix of dtypes, or None."""
    has_weight = getattr(module, "weight", None) is not None
    x32, w32 = _norm_inputs(module.weight.shape[-1] if has_weight else 24)
    candidates = list(FLAVOURS)
    for x_dtype, w_dtype in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        x, weight = x32.to(x_dtype), w32.to(w_dtype) if has_weight else None
        probe = blank_copy(module)
        if weight is not None:
            probe.weight = nn.Parameter(weight, requires_grad=False)
        got = run(probe, x)
        expected = {flavour: reference_rms_norm(x, weight, eps, flavour) for flavour in candidates}
        candidates = [f for f in candidates if got.dtype == expected[f].dtype and torch.equal(got, expected[f])]
    return candidates[0] if candidates else None


def _find_norm(module: nn.Module) -> NormFinding:
    name = type(module).__name__
    eps = eps_of(module)
    taken = list(inspect.signature(type(module).forward).parameters)[1:]
    if len(taken) != 1:
        return NormFinding(None, reason=f"{name}.forward takes {taken}, expected one tensor")
    if eps is None:
        return NormFinding(None, reason=f"{name} has none of the attributes {list(EPS_NAMES)} that hold epsilon")
    weight = getattr(module, "weight", None)
    if weight is not None and weight.dim() != 1:
        return NormFinding(None, reason=f"{name}.weight has shape {tuple(weight.shape)}, expected [hidden_size]")
    if any(True for _ in module.children()) or len(list(module.parameters(recurse=False))) > (weight is not None):
        return NormFinding(None, reason=f"{name} has parameters or children besides `weight`")
    try:
        flavour = examine(lambda: _compare_norm(module, eps[1]))
    except Exception as error:  # noqa: BLE001 what a foreign class raises is the reason why it is not ours
        return NormFinding(None, reason=f"{name} could not be run on a [6, hidden_size] input: {error!r}")
    if flavour is None:
        return NormFinding(None, reason=f"{name} computes none of {list(FLAVOURS)} (compared bit for bit)")
    return NormFinding(flavour, eps[0])


def norm_flavour(module: nn.Module) -> NormFinding:
    """Which RMSNorm flavour ``module``'s class computes with ``module``'s settings."""
    weight = getattr(module, "weight", None)
    shape = None if weight is None else tuple(weight.shape)
    key = (type(module), type(module).forward, settings(module), shape)
    return remembered(_norms, key, lambda: _find_norm(module))


def _decide(module: Any) -> NormFinding:
    finding = norm_flavour(module)
    if finding.flavour is None:
        raise ValueError(
            f"RMSNorm cannot run {type(module).__name__}: {finding.reason}. Known flavours: "
            f"{'; '.join(f'{k} = {v}' for k, v in DESCRIPTIONS.items())}. "
            "Leave this class out of the KernelConfig."
        )
    _decided[(type(module).forward, *plain_settings(module))] = finding
    return finding


@torch.compiler.assume_constant_result
def _decide_while_compiling(cls: Any, *own: Any) -> tuple[str, str]:
    """Flavour and eps name of a module that has not run yet: the compiler hands over its class and settings."""
    finding = _decided.get((cls.forward, cls, *own))
    if finding is None:
        small = cls(16)
        if plain_settings(small) != (cls, *own):
            raise ValueError(f"{cls.__name__}: run the model once before compiling it, its settings are {own}")
        finding = _decide(small)
    return str(finding.flavour), finding.eps_name


def norm_class_flavour(module: nn.Module) -> tuple[str, str]:
    """Flavour and eps name of ``module``'s class with its settings: the lookup that a forward can afford.

    Raises:
        ValueError: the class computes no known flavour; names the class, the reason and the ways out.
    """
    check_not_sharded(module)
    key = plain_settings(module)
    if torch.compiler.is_compiling():
        return _decide_while_compiling(*key)
    finding = _decided.get((type(module).forward, *key)) or _decide(module)
    return str(finding.flavour), finding.eps_name
