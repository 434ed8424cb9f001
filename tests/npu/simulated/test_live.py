"""Kernels by id on a live model on the simulated device: the vendor's operators run, and undo gives the model back."""

from __future__ import annotations

import copy

import pytest
import torch

from layout_kernels import kernel_plugins as kp
from layout_kernels.models.report import report
from tests.support.fake_npu import Simulation
from tests.support.tiny import FAMILIES, randomise, tokens


@pytest.mark.parametrize(
    ("kernel_id", "operations"),
    [
        ("npu_fused_rmsnorm", {"rms_norm"}),
        ("npu_fused_swiglu", {"rms_norm_mlp"}),
        ("npu_fused_rmsnorm_mlp", {"rms_norm", "rms_norm_mlp"}),
    ],
)
def test_a_kernel_by_id_runs_on_the_device_and_is_undone(
    npu: Simulation, kernel_id: str, operations: set[str]
) -> None:
    stock = randomise(FAMILIES["qwen3"].build()).eval()
    model = copy.deepcopy(stock).to("npu")
    ids = tokens()
    with torch.no_grad():
        expected = stock(ids).logits
        kp.apply_kernel(kernel_id, model=model)
        found = model(ids.to("npu")).logits.cpu()
    assert {row.implementation for row in report(model).rows} == {f"npu.torch_npu.{name}" for name in operations}
    assert not any(row.fallback for row in report(model).rows)
    # float32 sums in another order, through two layers
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    model.train()
    model(ids.to("npu"), labels=ids.to("npu")).loss.backward()
    stock(ids, labels=ids).loss.backward()
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    assert torch.isfinite(torch.stack([g.abs().max() for g in gradients.values()])).all()
    kp.undo(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in stock.modules()]
    for (name, parameter), original in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert torch.equal(parameter.detach().cpu(), original.detach()), name
        # as above, relative to the largest entry
        assert (parameter.grad.cpu() - original.grad).abs().max() <= 1e-4 * original.grad.abs().max().clamp(min=1e-3)


def test_kernels_of_the_processor_are_named_as_such(npu: Simulation) -> None:
    with pytest.raises(ValueError, match="'cpu_fused_rmsnorm' is for cpu, the current device is npu"):
        kp.apply_kernel("cpu_fused_rmsnorm", model=FAMILIES["qwen3"].build())
