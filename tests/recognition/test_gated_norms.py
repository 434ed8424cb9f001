"""What gated norms compute is found by running their classes; the layer computes it, compiled too, or refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from layout_kernels import layers
from layout_kernels.recognition import gated_norms, norms

WIDTH = 24
CASES = [
    (BambaRMSNormGated(WIDTH), ("cast_then_scale", "gate_then_norm", None, "silu")),
    (Zamba2RMSNormGated(WIDTH, 8), ("cast_then_scale", "gate_then_norm", 8, "silu")),
    (
        FalconH1RMSNormGated(WIDTH, n_groups=2, norm_before_gate=True),
        ("scale_then_cast", "norm_then_gate", 12, "silu"),
    ),
    (
        FalconH1RMSNormGated(WIDTH, n_groups=1, norm_before_gate=False),
        ("scale_then_cast", "gate_then_norm", None, "silu"),
    ),
    (Qwen3NextRMSNormGated(WIDTH), ("cast_then_scale", "norm_then_gate", None, "silu")),
    (KimiLinearRMSNormGated(WIDTH), ("scale_then_cast", "norm_then_gate", None, "sigmoid")),
    (Qwen4ExpTextRMSNormGated(WIDTH, activation="sigmoid"), ("cast_then_scale", "norm_then_gate", None, "sigmoid")),
]


class TanhGated(Qwen3NextRMSNormGated):
    """A gated norm that is none of ours."""

    def forward(self, hidden_states: Any, gate: Any) -> Any:
        return super().forward(hidden_states, torch.tanh(gate))


def rows(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.parametrize(("module", "expected"), CASES, ids=lambda value: type(value).__name__)
def test_what_a_class_computes_is_found(module: nn.Module, expected: tuple[Any, ...]) -> None:
    found = gated_norms.gated_flavour(module)
    assert (found.flavour, found.order, found.group_size, found.activation) == expected
    assert found.eps_name == "variance_epsilon"


@pytest.mark.parametrize("module", [case[0] for case in CASES[4:]], ids=lambda module: type(module).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layer_gives_the_results_and_gradients_of_the_class(module: nn.Module, dtype: torch.dtype) -> None:
    assert gated_norms.why_not_bound(module) == ""
    stock = module.to(dtype)
    with torch.no_grad():
        stock.weight.copy_(rows(dtype, WIDTH))
    results = []
    for forward in (type(stock).forward, layers.RMSNormGated.forward):
        x, gate = rows(dtype, 5, WIDTH).requires_grad_(), rows(dtype, 5, WIDTH).mul(3).requires_grad_()
        stock.weight.grad = None
        output = forward(stock, x, gate)
        output.float().square().sum().backward()
        results.append((output.detach(), x.grad, gate.grad, stock.weight.grad))
    for theirs, ours in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        # The same roundings in the forward; the backward sums in float32, torch's rounds each step to the dtype:
        # some ten roundings of 2**-24 or 2**-9, relative to the largest entry.
        bound = 10 * torch.finfo(dtype).eps * theirs.abs().max()
        assert (ours - theirs).abs().max() <= bound


def test_a_gated_norm_is_no_plain_norm_even_where_its_gate_may_be_absent() -> None:
    finding = norms.norm_flavour(BambaRMSNormGated(WIDTH))
    assert finding.flavour is None
    assert "gate" in finding.reason


def test_a_class_without_the_hub_name_is_not_bound_and_the_reason_names_it() -> None:
    assert "BambaRMSNormGated" in gated_norms.why_not_bound(BambaRMSNormGated(WIDTH))
    assert gated_norms.HUB_NAME in gated_norms.why_not_bound(BambaRMSNormGated(WIDTH))


def test_a_class_that_computes_something_else_is_refused_with_its_name() -> None:
    module = TanhGated(WIDTH)
    assert "TanhGated" in gated_norms.why_not_bound(module)
    with pytest.raises(ValueError, match="RMSNormGated cannot run TanhGated"):
        layers.RMSNormGated.forward(module, torch.ones(2, WIDTH), torch.ones(2, WIDTH))


def test_instances_with_other_activations_are_told_apart() -> None:
    x, gate = rows(torch.float32, 5, WIDTH), rows(torch.float32, 5, WIDTH).mul(3)
    for activation in ("silu", "sigmoid"):
        module = Qwen4ExpTextRMSNormGated(WIDTH, activation=activation)
        # One rounding of float32 more or less in a kernel's reciprocal root.
        assert torch.allclose(layers.RMSNormGated.forward(module, x, gate), module(x, gate), rtol=1e-6, atol=1e-6)


def test_the_layer_compiles_in_one_graph_also_before_its_first_run() -> None:
    class Fresh(Qwen3NextRMSNormGated):
        pass

    module = Fresh(WIDTH)
    x, gate = rows(torch.float32, 5, WIDTH), rows(torch.float32, 5, WIDTH)
    compiled = torch.compile(lambda a, b: layers.RMSNormGated.forward(module, a, b), fullgraph=True, backend="eager")
    assert torch.allclose(compiled(x, gate), module(x, gate), rtol=1e-6, atol=1e-6)  # as above


def test_both_orders_of_one_class_run_in_one_process() -> None:
    from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated

    from layout_kernels import layers

    x, gate = torch.randn(3, 32), torch.randn(3, 32)
    for before in (True, False, True):
        norm = FalconH1RMSNormGated(32, norm_before_gate=before)
        torch.testing.assert_close(layers.RMSNormGated.forward(norm, x, gate), norm(x, gate))
