"""What a gated MLP computes, found by running its class on a small input, as ``norms.py`` does for norms."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .run_class import blank_copy, examine, remembered, run, settings

SEPARATE = ("gate_proj", "up_proj", "down_proj")
PACKED = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class MLPFinding:
    """What an MLP computes: ``down(activation(gate(x)) * up(x))``, or None and the reason why it does not."""

    activation: str | None
    packed: bool = False
    reason: str = ""


_mlps: dict[Any, MLPFinding] = {}


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def _activation_inputs() -> list[torch.Tensor]:
    grid = torch.linspace(-9, 9, 721, dtype=torch.float32, device="cpu")
    return [grid, grid.bfloat16(), grid.half()]


def activation_name(function: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
    """ "silu", "gelu" or "gelu_tanh" when ``function`` gives its bits in float32, bfloat16 and float16, else None."""
    inputs = _activation_inputs()
    for name, known in ACTIVATIONS.items():
        if all(torch.equal(function(x), known(x)) for x in inputs):
            return name
    return None


def _small_linear(like: nn.Linear, fan_in: int, fan_out: int, generator: torch.Generator) -> nn.Linear:
    linear = nn.Linear(fan_in, fan_out, bias=like.bias is not None, dtype=torch.float32)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32))
    return linear


def _small_mlp(module: nn.Module, packed: bool) -> nn.Module:
    """``module`` with products of width 6 and 10; its other children (activation, dropout) are its own."""
    generator = torch.Generator().manual_seed(21)
    probe = blank_copy(module)
    sizes = {"gate_proj": (6, 10), "up_proj": (6, 10), "gate_up_proj": (6, 20), "down_proj": (10, 6)}
    for name, child in module.named_children():
        known: Any = child
        probe.add_module(
            name, _small_linear(known, *sizes[name], generator) if name in (PACKED if packed else SEPARATE) else child
        )
    return probe


def _is_gated(probe: Any, packed: bool, activation: str) -> bool:
    """Whether ``probe`` computes the formula, in both modes, up to where a clamp or a cap would show."""
    generator = torch.Generator().manual_seed(22)
    act = ACTIVATIONS[activation]
    modes = [(module, module.training) for module in probe.modules()]  # activation and dropout are the user's own
    try:
        for mode, size in itertools.product((False, True), (1.0, 40.0, 2000.0)):
            probe.train(mode)
            x = torch.randn(2, 3, 6, generator=generator, dtype=torch.float32) * size
            gate, up = probe.gate_up_proj(x).chunk(2, dim=-1) if packed else (probe.gate_proj(x), probe.up_proj(x))
            if not torch.equal(run(probe, x), probe.down_proj(act(gate) * up)):
                return False
        return True
    finally:
        for module, training in modes:
            module.training = training


def named_activation_of(module: nn.Module) -> tuple[str, Any]:
    """Name and value of the one child or attribute of ``module`` that is an activation function of
    :data:`ACTIVATIONS`, else ("", None)."""
    found = []
    for name, value in [*vars(module).items(), *module.named_children()]:
        passive = isinstance(value, type | nn.Linear | nn.Dropout | nn.Identity)
        if name.startswith("_") or name == "forward" or passive or not callable(value):
            continue
        try:
            known = activation_name_of(value) is not None
        except Exception:  # noqa: BLE001 not a function of one tensor: not the activation
            continue
        if known:
            found.append((name, value))
    return found[0] if len(found) == 1 else ("", None)


def activation_name_of(function: Any) -> str | None:
    """:func:`activation_name`, away from the device and dtype contexts that a model is built under."""
    return examine(lambda: activation_name(function))


def _find_mlp(module: nn.Module) -> MLPFinding:
    name = type(module).__name__
    children = dict(module.named_children())
    packed = "gate_up_proj" in children
    projections = PACKED if packed else SEPARATE
    wrong = [p for p in projections if type(children.get(p)) is not nn.Linear]
    if wrong:
        given = {p: type(children[p]).__name__ if p in children else "absent" for p in wrong}
        return MLPFinding(
            None, reason=f"{name} is no plain gated MLP: {given}, each of {projections} must be an nn.Linear"
        )
    taken = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if len(taken) != 1 or taken[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return MLPFinding(None, reason=f"{name}.forward takes {list(map(str, taken))}, expected one tensor")
    extra = [n for n, p in module.named_parameters() if n.partition(".")[0] not in projections]
    if extra:
        return MLPFinding(None, reason=f"{name} has parameters besides {projections}: {extra}")
    try:
        _, function = named_activation_of(module)
        activation = activation_name_of(function) if function is not None else None
        if activation is None:
            return MLPFinding(
                None, reason=f"{name} has no single activation among {sorted(ACTIVATIONS)} (compared bit for bit)"
            )
        gated = examine(lambda: _is_gated(_small_mlp(module, packed), packed, activation))
    except Exception as error:  # noqa: BLE001 see _find_norm
        return MLPFinding(None, reason=f"{name} could not be run on a [2, 3, hidden_size] input: {error!r}")
    if not gated:
        return MLPFinding(
            None,
            reason=f"{name} does not compute down_proj({activation}(gate) * up): it changes the values on the way",
        )
    return MLPFinding(activation, packed)


def mlp_kind(module: nn.Module) -> MLPFinding:
    """Whether ``module`` is a plain gated MLP, and with which activation, by running a narrow copy of it."""
    biases = tuple((n, type(c), getattr(c, "bias", None) is not None) for n, c in module.named_children())
    others = tuple((type(c), type(c).forward, settings(c)) for c in module.children() if not c._parameters)
    key = (type(module), type(module).forward, settings(module), biases, others)
    return remembered(_mlps, key, lambda: _find_mlp(module))
