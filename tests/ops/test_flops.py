"""What `torch.utils.flop_counter` counts of our operations and layers is what it counts of stock's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from layout_kernels import kernel_plugins as kp
from layout_kernels import linear, rms_norm, rms_norm_mlp
from layout_kernels.ops.rms_norm_mlp import mlp_of_parts
from tests.support.tiny import FAMILIES, tokens

X = torch.randn(2, 3, 8)
GATE, UP, DOWN = torch.randn(5, 8), torch.randn(5, 8), torch.randn(7, 5)


def counted(call: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def stock_mlp() -> torch.Tensor:
    return functional.linear(functional.silu(functional.linear(X, GATE)) * functional.linear(X, UP), DOWN)


CALLS = {
    "linear": (lambda: linear(X, GATE), lambda: functional.linear(X, GATE)),
    "rms_norm_mlp": (lambda: rms_norm_mlp(X, torch.ones(8), torch.cat([GATE, UP]), DOWN), stock_mlp),
    "mlp_of_parts": (lambda: mlp_of_parts(X, GATE, UP, DOWN), stock_mlp),
    "rms_norm": (lambda: rms_norm(X, torch.ones(8)), lambda: nn.functional.rms_norm(X, (8,))),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_an_operation_counts_as_stock_s_products(name: str, requires_grad: bool) -> None:
    ours, stock = CALLS[name]
    with torch.set_grad_enabled(requires_grad):
        assert counted(ours) == counted(stock)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_model_counts_as_stock_s_module_by_module(is_recorded: bool, tmp_path: Path) -> None:
    found = []
    for kernels in (False, True):
        model = FAMILIES["llama"].build().eval()
        if kernels:
            kp.apply_default_kernels(model, "auto")
        with torch.set_grad_enabled(is_recorded), FlopCounterMode(display=False) as counter:
            model(tokens())
        found.append({module: sum(counts.values()) for module, counts in counter.get_flop_counts().items()})
    assert found[0] == found[1]
    assert found[0]["LlamaForCausalLM.model.layers.0.mlp.gate_proj"] > 0


def test_a_counter_that_was_made_before_the_package_was_asked_counts() -> None:
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        linear(X, GATE)
    assert counter.get_total_flops() == 2 * 6 * 8 * 5
