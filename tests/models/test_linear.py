"""The stateless Linear in a model: nn.Linear has a hub name inside kernel_loading(linear=True) and nowhere else."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.loads import load, ref
from tests.support.tiny import FAMILIES, save_family

LLAMA = FAMILIES["llama"]
EVERYTHING = {"RMSNorm": ref("CustomRMSNorm"), LLAMA.fusion_key(): ref("RMSNormMLP"), "Linear": ref("Linear")}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(LLAMA, tmp_path_factory.mktemp("llama"))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**LLAMA.inputs()).logits


@pytest.mark.parametrize("mapping", [{"Linear": ref("Linear")}, EVERYTHING], ids=["alone", "with fusion"])
def test_every_plain_linear_runs_ours_and_the_logits_equal_stock(
    llama: Path, kernel: Any, mapping: dict[Any, Any]
) -> None:
    expected = logits(load(LLAMA, llama, None))
    with kernel.kernel_loading(linear=True):
        model = load(LLAMA, llama, mapping)
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    assert linears
    assert {module.forward.__qualname__ for module in linears} == {"Linear.forward"}
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_linear", [True, False], ids=["key Linear", "no key Linear"])
def test_a_fused_layer_still_runs_as_one_operation(llama: Path, kernel: Any, with_linear: bool) -> None:
    """Without the key `kernels` binds nn.Linear's own forward to each instance, since the class has a hub name."""
    mapping = {key: value for key, value in EVERYTHING.items() if with_linear or key != "Linear"}
    with kernel.kernel_loading(linear=True):
        model = load(LLAMA, llama, mapping)
    mlp = model.model.layers[0].mlp
    assert mlp.kernel_layer_name == "RMSNormMLP"
    products = [module for module in mlp.modules() if type(module) is nn.Linear]
    assert len(products) == 3
    assert all("forward" in vars(module) for module in products)
    owner = import_module(f"{kernel.__name__}.running.plain")
    assert all(owner.is_plain_linear(module) for module in products)
    assert not import_module(f"{kernel.__name__}.running.gated_mlp").why_in_parts(mlp)
    assert torch.isfinite(logits(model)).all()


def test_the_hub_name_is_taken_back(llama: Path, kernel: Any) -> None:
    with kernel.kernel_loading(linear=True):
        assert nn.Linear.kernel_layer_name == "Linear"
        load(LLAMA, llama, {"Linear": ref("Linear")})
    assert not hasattr(nn.Linear, "kernel_layer_name")
    assert not hasattr(nn.Linear, "kernel_condition")
    with kernel.kernel_loading(), pytest.raises(ValueError, match="Linear is not registered"):
        load(LLAMA, llama, {"Linear": ref("Linear")})


def test_gradients_through_linear_equal_stock(llama: Path, kernel: Any) -> None:
    stock = load(LLAMA, llama, None)
    with kernel.kernel_loading(linear=True):
        model = load(LLAMA, llama, {"Linear": ref("Linear")})
    for which in (stock, model):
        which.train()
        which(**LLAMA.inputs()).logits.float().pow(2).mean().backward()
    for (name, theirs), ours in zip(stock.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
