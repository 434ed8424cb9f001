"""`mlp_of_parts`: the gated MLP of gate and up as parameters of their own, for torch.compile.

A graph that held the one matrix of both would go on with it after a parameter has got other memory. So the graph takes
the parameters as its inputs, and where they lie is looked up each time it runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ...dispatch.launch import define_operator
from ...dispatch.runtime import RUNTIME
from ..adjacent import rows_of
from ..arguments import check_choice, check_rows, check_tensor
from ..gated_activation import ACTIVATIONS
from ..gated_activation.reference import activate
from . import CONTRACT
from .operator import check_biases, check_down, check_one_dtype, for_autocast, is_autocast, products, without_autocast

_forward = RUNTIME.functions(CONTRACT.operation)


def check_parts(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> None:
    """What every launch and fake implementation asks of the arguments.

    Raises:
        TypeError, ValueError: they name the argument, what was given and what is allowed.
    """
    check_rows("x", x)
    check_tensor("gate", gate, x)
    check_tensor("up", up, x)
    width = x.shape[-1]
    if gate.dim() != 2 or gate.shape[0] == 0 or gate.shape[1] != width:
        raise ValueError(f"gate has shape {tuple(gate.shape)}; it must be [size, {width}], size at least 1")
    if up.shape != gate.shape:
        raise ValueError(f"up has shape {tuple(up.shape)}; it must be {tuple(gate.shape)}, the shape of gate")
    size = gate.shape[0]
    check_down(x, down, size, "gate's rows")
    check_choice("activation", activation, ACTIVATIONS)
    if (gate_bias is None) != (up_bias is None):
        missing, there = ("gate_bias", "up_bias") if gate_bias is None else ("up_bias", "gate_bias")
        raise ValueError(f"{missing} is None and {there} is not; give both or neither (zeros add nothing)")
    check_biases(x, (("gate_bias", gate_bias, size), ("up_bias", up_bias, size), ("down_bias", down_bias, len(down))))
    others = ("up", up), ("down", down), ("gate_bias", gate_bias), ("up_bias", up_bias), ("down_bias", down_bias)
    check_one_dtype("gate", gate, others)


def _launch(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> torch.Tensor:
    rows = rows_of(gate, up)
    bias = None if gate_bias is None or up_bias is None else rows_of(gate_bias, up_bias)
    if rows is None or (bias is None) != (gate_bias is None):
        return _plain(x, gate, up, down, activation, gate_bias, up_bias, down_bias)
    with without_autocast(x.device.type):
        return _forward[x.device.type](x, None, rows, down, 0.0, "none", activation, bias, down_bias)


def _result(x: torch.Tensor, gate: torch.Tensor, _: torch.Tensor, down: torch.Tensor, *__: Any) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], down.shape[0]), dtype=gate.dtype, device=x.device)


def _plain(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> torch.Tensor:
    """The stock MLP, which a compiler can fuse when it trains."""
    with without_autocast(x.device.type):
        # Converted for each product, as autocast does: so x's gradients are added in its own dtype.
        gated = activate(functional.linear(x.to(gate.dtype), gate, gate_bias), activation)
        product = gated * functional.linear(x.to(up.dtype), up, up_bias)
        return functional.linear(product, down, down_bias).contiguous()


def _differentiable(*args: Any) -> torch.Tensor:
    check_parts(*args)
    return _plain(*args)


OF_PARTS = define_operator(
    "mlp_of_parts",
    check_parts,
    _result,
    mutates_args=(),
    differentiable=_differentiable,
    launch=_launch,
    flops=lambda x, gate, up, down, *_, **__: products(x, gate, up, down),
)


def mlp_of_parts(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str = "silu",
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """A gated MLP, down(act(gate(x)) * up(x)), for functions that torch.compile compiles; `rms_norm_mlp` serves eager.

    Where gate and up (and their biases) lie one after the other in memory (`ops.adjacent.lay`) when the graph runs,
    the selected `rms_norm_mlp` runs with the flavour "none" on the one matrix of both; elsewhere, and where a gradient
    is recorded, the stock MLP's operators do. Rounded as there, after each of: the gate's product, up's product, the
    activation, act * up, and the result, but where a compiler fuses the stock operators (source: transformers'
    `LlamaMLP`). Where x has another dtype than the projections it is converted. Under autocast projections and biases
    are converted to its dtype, as in a stock MLP.

    Args:
        x: [..., width]; float16, bfloat16, float32 or float64.
        gate: [size, width].
        up: [size, width], of gate's dtype.
        down: [out, size], of gate's dtype.
        activation: see `gated_activation`.
        gate_bias: [size] or None, of gate's dtype.
        up_bias: [size], of gate's dtype; None where gate_bias is, and nowhere else.
        down_bias: [out] or None, of gate's dtype.

    Returns:
        [..., out], contiguous, of gate's dtype, memory of its own.

    Raises:
        TypeError, ValueError: an argument is not as above.
        NotImplementedError: called under `torch.func.vmap`; leading dimensions already are a batch.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling:
        check_rows("x", x)
    if is_autocast(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        gate, up, down = (for_autocast(weight, dtype) for weight in (gate, up, down))
        gate_bias, up_bias, down_bias = (for_autocast(bias, dtype) for bias in (gate_bias, up_bias, down_bias))
    args = (x, gate, up, down, activation, gate_bias, up_bias, down_bias)
    if not compiling:
        check_parts(*args)
    return OF_PARTS(*args)
