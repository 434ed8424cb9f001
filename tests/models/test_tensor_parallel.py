"""Two processes load with tp_plan: norms are equal, in gradients too; merged products too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from layout_kernels import layers

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def outcomes(built_kernel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    out = tmp_path_factory.mktemp("tensor_parallel")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launcher, "-m", "tests.support.tensor_parallel", str(out), str(built_kernel)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"torch-ext{os.pathsep}."}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("key", "layers"),
    [
        ("norms", ["CustomRMSNorm"]),
        ("fusion", ["CustomRMSNorm", "RMSNormMLP"]),
        ("MLP", ["CustomRMSNorm", "GatedMLP"]),
    ],
)
def test_layers_under_tensor_parallelism_equal_stock(
    outcomes: list[dict[str, Any]], family: str, key: str, layers: list[str]
) -> None:
    for rank in outcomes:
        found = rank[family][key]
        assert found["layers"] == layers
        assert found["names"]
        assert found["inference"] <= 1e-5  # float32 sums in another order, as without tensor parallelism
        assert found["logits"] <= 1e-5  # the same
        assert len(found["gradients"]) >= 10
        assert max(found["gradients"].values()) <= 1e-5, found["gradients"]  # the same, relative to the largest


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_each_rank_s_rows_of_gate_and_up_are_one_product(outcomes: list[dict[str, Any]], family: str) -> None:
    for rank in outcomes:
        for key in ("fusion", "MLP"):
            assert rank[family][key]["adjacent"]
            assert rank[family][key]["calls of gate_proj"] == 0


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_hub_name_layer_under_tensor_parallelism_infers_as_stock(
    outcomes: list[dict[str, Any]], family: str
) -> None:
    for rank in outcomes:
        assert rank[family]["hub name"]["layers"] == ["RMSNorm"]
        assert rank[family]["hub name"]["logits"] <= 1e-5  # as above


@pytest.mark.parametrize("layer", ["RMSNorm", "RMSNormGated"])
def test_a_hub_name_layer_of_a_sharded_model_refuses_to_train(layer: str) -> None:
    gate = (torch.ones(2, 8),) if layer == "RMSNormGated" else ()
    module: Any = Qwen3NextRMSNormGated(8) if gate else LlamaRMSNorm(8)
    module._is_hooked = True  # as transformers marks the modules of a tensor-parallel model
    forward = getattr(layers, layer).forward
    module.eval()
    assert forward(module, torch.ones(2, 8), *gate).shape == (2, 8)
    module.train()
    with pytest.raises(ValueError, match=f"{type(module).__name__}.*summed over ranks.*CustomRMSNorm"):
        forward(module, torch.ones(2, 8), *gate)
    with torch.no_grad():
        forward(module, torch.ones(2, 8), *gate)
