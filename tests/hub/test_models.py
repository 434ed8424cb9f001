"""The one line of the README, `from_pretrained` with a KernelConfig, from the Hub and then without it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.hub_client import REPO, Client
from tests.support.tiny import FAMILIES, save_family

# A key for the norms, and one for the norm before each MLP with that MLP.
LOAD = """
import json, sys
import kernels, torch
from transformers import AutoModelForCausalLM, KernelConfig
folder, repo = sys.argv[1:]
options = {"version": 1, "trust_remote_code": True}
fusion = (("RMSNorm", "model.layers.*.post_attention_layernorm"), ("MLP", "model.layers.*.mlp"))
tokens = torch.arange(3, 12)[None]

def logits(model):
    with torch.no_grad():
        return model(tokens).logits

stock = logits(AutoModelForCausalLM.from_pretrained(folder))
k = kernels.get_kernel(repo, **options)
found = {}
for name, mapping in {
    "norm": {"RMSNorm": (f"{repo}:CustomRMSNorm", options)},
    "fusion": {fusion: (f"{repo}:RMSNormMLP", options)},
}.items():
    with k.kernel_loading():
        model = AutoModelForCausalLM.from_pretrained(folder, use_kernels=True, kernel_config=KernelConfig(mapping))
    ours = {row.layer for row in k.report(model).rows}
    found[name] = {"error": (logits(model) - stock).abs().max().item(), "size": stock.abs().max().item(),
                   "ours": sorted(ours)}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(FAMILIES["qwen3"], tmp_path_factory.mktemp("qwen3"))


def assert_equal_to_stock(found: dict[str, dict[str, object]]) -> None:
    assert found["norm"]["ours"] == ["CustomRMSNorm"]
    assert "RMSNormMLP" in found["fusion"]["ours"]  # type: ignore[operator]
    for result in found.values():
        # float32 roundings through two blocks, beside logits of the order of `size`.
        assert float(str(result["error"])) < 1e-5 * max(1.0, float(str(result["size"])))


def test_from_pretrained_loads_both_keys_by_name_and_then_again_offline(client: Client, checkpoint: Path) -> None:
    assert_equal_to_stock(client.python(LOAD, str(checkpoint), REPO))
    # What the README tells users who will be without a network: the whole revision, by the name of the branch.
    download = client.hf("download", REPO, "--type", "kernel", "--revision", "v1")
    assert download.returncode == 0, download.stderr
    requests = len(client.hub.requests)
    assert_equal_to_stock(client.python(LOAD, str(checkpoint), REPO, offline=True))
    assert len(client.hub.requests) == requests


def test_from_pretrained_says_why_a_repository_that_nobody_trusts_is_not_loaded(
    client: Client, checkpoint: Path
) -> None:
    code = LOAD.replace('options = {"version": 1, "trust_remote_code": True}', 'options = {"version": 1}').replace(
        "k = kernels.get_kernel(repo, **options)",
        "k = kernels.get_kernel(repo, version=1, trust_remote_code=True)",
    )
    client.hub.trusted.clear()
    try:
        result = client.run(sys.executable, "-c", code, str(checkpoint), REPO)
    finally:
        client.hub.trusted.add(REPO.split("/")[0])
    assert result.returncode != 0
    assert "not from a trusted publisher" in result.stderr
