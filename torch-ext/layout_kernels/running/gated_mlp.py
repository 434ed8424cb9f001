"""How a gated MLP runs: in one call where its weights can be read, else as its own class does.

One call reads the weights itself, so nobody may stand between: each product is a plain ``nn.Linear`` without hooks,
the activation is the one that was found, and the rows of gate and up lie one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..ops.adjacent import joined, rows_of
from ..ops.gated_activation import gated_activation
from ..ops.rms_norm_mlp import mlp_of_parts, rms_norm_mlp
from ..ops.rms_norm_mlp.operator import direct
from .plain import TENSORS, child, has_hooks, is_for_operators, is_patched, weight_and_bias
from .sharded import is_sharded, rows_here

_is_compiling = torch.compiler.is_compiling
_is_any_autocast = torch._C._is_any_autocast_enabled
_CONVERTED = (torch.float32, torch.bfloat16, torch.float16)
Linear = tuple[torch.Tensor, torch.Tensor | None]


def run(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """``down(act(gate(x)) * up(x))``, [..., width] to [..., out]."""
    down: Linear | None = weight_and_bias(child(mlp, "down_proj"))
    if down is not None and type(x) in TENSORS and _is_as_found(mlp):
        result = (_compiled if _is_compiling() else _in_one_call)(mlp, x, down)
        if result is not None:
            return result
    elif down is None and _is_sharded(mlp, x):
        rows = _rows_here(mlp)
        if rows is not None:
            return mlp.down_proj(gated_activation(functional.linear(x, *rows), mlp._layout_kernels.activation))
    return _stock(mlp, x)


def _in_one_call(mlp: Any, x: torch.Tensor, down: Linear) -> torch.Tensor | None:
    """The MLP as one operation, or None where its weights or its input need its own class's forward."""
    how = mlp._layout_kernels
    parts = None if how.packed else _parts(mlp)
    first: Linear | None = weight_and_bias(child(mlp, "gate_up_proj")) if how.packed else parts and _rows(*parts)
    if first is None or not _has_dtype_of(first[0], x):
        return None
    is_recorded = parts is not None and torch.is_grad_enabled() and _needs_gradient(x, *parts)
    if not is_recorded:
        result = direct(x, None, first[0], down[0], 0.0, "none", how.activation, first[1], down[1])
        if result is not None:
            return result
    if not _is_one_product(first[0], x):
        return None
    if is_recorded and parts is not None:
        x, first = _joined(x, first, *parts)
    return rms_norm_mlp(x, None, first[0], down[0], 0.0, "none", how.activation, first[1], down[1])


def _has_dtype_of(weight: torch.Tensor, x: torch.Tensor) -> bool:
    """Another dtype is an error of a stock MLP, but where autocast converts: not float64."""
    return x.dtype is weight.dtype or (_is_any_autocast() and x.dtype in _CONVERTED and weight.dtype in _CONVERTED)


def _is_one_product(weight: torch.Tensor, x: torch.Tensor) -> bool:
    """Another width, or what is not for our operators, is for the stock forward: its result, or its error."""
    return is_for_operators(x) and x.dim() > 0 and x.shape[-1] == weight.shape[1]


def why_in_parts(mlp: Any) -> str:
    """Why ``mlp`` runs as its own class does; empty where it runs in one call, or in two where it is sharded."""
    if not _is_as_found(mlp):
        return "its activation, dropout or class was exchanged, set or hooked, so its products are called as modules"
    if not mlp._layout_kernels.packed and is_sharded(getattr(mlp.gate_proj, "weight", None)):
        return "" if _rows_here(mlp) else "its sharded rows are no one product, so its products are called as modules"
    parts = None if mlp._layout_kernels.packed else _parts(mlp)
    first = weight_and_bias(mlp.gate_up_proj) if mlp._layout_kernels.packed else parts
    if first is None or weight_and_bias(mlp.down_proj) is None:
        return "its products are no plain nn.Linear, so they are called as modules"
    if parts is not None and _rows(*parts) is None:
        return (
            "the rows of gate and up do not lie one after the other (its weights were exchanged), so its products are "
            "called as modules; apply_kernel lays them so"
        )
    return ""


def _stock(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    return mlp._layout_kernels.original.forward(mlp, x)


def _is_as_found(mlp: Any) -> bool:
    """Whether what decides the result beside the products is what it was when the MLP was examined."""
    how = mlp._layout_kernels
    if how.original.forward is not how.forward and how.forward is not None:
        return False  # its class was patched since
    if not _is_compiling() and is_patched():
        return False
    if how.settings and any(getattr(mlp, name, None) != value for name, value in how.settings):
        return False
    for name in how.idle:
        child = mlp._modules.get(name)
        if type(child) is not nn.Dropout or (child.training and child.p) or has_hooks(child) or _own_forward(child):
            return False
    module = mlp._modules.get(how.act_name)
    if module is None:
        return getattr(mlp, how.act_name) is how.act
    return (
        type(module) is how.act
        and (how.act_forward is None or how.act.forward is how.act_forward)
        and not _own_forward(module)
        and all(getattr(module, name, None) == value for name, value in how.act_settings)
        and not has_hooks(module)
    )


def _own_forward(module: Any) -> bool:
    """Whether the instance has another forward than its class's, which `kernels` binds too."""
    if _is_compiling():  # by attribute: a compiler guards that, and not the lack of a key
        return getattr(module.forward, "__func__", None) is not type(module).forward
    bound = module.__dict__.get("forward")
    return bound is not None and getattr(bound, "__func__", None) is not type(module).forward


def _is_sharded(mlp: Any, x: torch.Tensor) -> bool:
    """Whether this rank holds a part of the rows, and the input is whole and needs no gradient."""
    gate = mlp._modules.get("gate_proj")
    return (
        gate is not None
        and is_sharded(gate._parameters.get("weight"))
        and type(x) in TENSORS
        and not torch.is_grad_enabled()
        and not _is_compiling()
        and _is_as_found(mlp)
    )


def _rows_here(mlp: Any) -> Linear | None:
    """This rank's rows of gate and up as one product, and their bias."""
    gate, up = rows_here(mlp.gate_proj), rows_here(mlp.up_proj)
    if gate is None or up is None or (gate[1] is None) != (up[1] is None):
        return None
    weight = rows_of(gate[0], up[0])
    bias = None if gate[1] is None or up[1] is None else rows_of(gate[1], up[1])
    return None if weight is None or (bias is None and gate[1] is not None) else (weight, bias)


def _parts(mlp: Any) -> tuple[Linear, Linear] | None:
    gate, up = weight_and_bias(child(mlp, "gate_proj")), weight_and_bias(child(mlp, "up_proj"))
    return None if gate is None or up is None or (gate[1] is None) != (up[1] is None) else (gate, up)


def _rows(gate: Linear, up: Linear) -> Linear | None:
    """The weight and bias of gate and up as one product, where they lie so."""
    weight = rows_of(gate[0], up[0])
    if weight is None or gate[1] is None or up[1] is None:
        return None if weight is None else (weight, None)
    bias = rows_of(gate[1], up[1])
    return None if bias is None else (weight, bias)


def _needs_gradient(x: torch.Tensor, gate: Linear, up: Linear) -> bool:
    return torch._C._any_requires_grad(x, gate[0], up[0], gate[1], up[1])


def _joined(x: Any, rows: Any, gate: Any, up: Any) -> tuple[Any, Linear]:
    """The input, and weight and bias of gate and up as one product whose gradient is theirs."""
    x, weight = joined(x, rows[0], gate[0], up[0])
    return x, (weight, None if rows[1] is None else joined(None, rows[1], gate[1], up[1])[1])


def _compiled(mlp: Any, x: torch.Tensor, down: Linear) -> torch.Tensor | None:
    """In a graph the parameters are inputs, and where they lie is looked up when it runs."""
    how = mlp._layout_kernels
    parts = None if how.packed else _parts(mlp)
    first = weight_and_bias(child(mlp, "gate_up_proj")) if how.packed else parts and parts[0]
    if first is None or not _has_dtype_of(first[0], x) or not _is_one_product(first[0], x):
        return None
    if parts is None:
        return rms_norm_mlp(x, None, first[0], down[0], 0.0, "none", how.activation, first[1], down[1])
    (gate, gate_bias), (up, up_bias) = parts
    return mlp_of_parts(x, gate, up, down[0], how.activation, gate_bias, up_bias, down[1])
