"""When a load has ended, and in a live model, the tree is the stock model's: for each family and each way in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.loads import load
from tests.support.observed import TREES, WAYS, close, logits, mapping, ours, seen, with_layers
from tests.support.tiny import save_family


@pytest.fixture(scope="module", params=list(TREES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(TREES[name], tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def stock(name: str, folder: Path) -> Any:
    return load(TREES[name], folder, None)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_tree_results_and_file_are_stock_s(
    name: str, folder: Path, stock: Any, way: str, kernel: Any, tmp_path: Path
) -> None:
    model = with_layers(name, folder, way, kernel)
    assert len(ours(model)) >= 2
    assert seen(model) == seen(stock)
    for (path, module), (_, other) in zip(model.named_modules(), stock.named_modules(), strict=True):
        assert isinstance(module, type(other)), path
        assert path in ours(model) or type(module) is type(other), path
    for (key, value), (other, expected) in zip(model.state_dict().items(), stock.state_dict().items(), strict=True):
        assert key == other
        assert torch.equal(value, expected), key
    inputs = TREES[name].inputs()
    assert close(logits(model, inputs), logits(stock, inputs))
    hidden = [len(m(**inputs, output_hidden_states=True).hidden_states) for m in (model, stock)]
    assert hidden[0] == hidden[1]
    for kind, each in (("ours", model), ("stock", stock)):
        each.save_pretrained(tmp_path / kind)
    files = sorted(file.name for file in (tmp_path / "stock").iterdir())
    assert sorted(file.name for file in (tmp_path / "ours").iterdir()) == files
    for file in files:
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "stock" / file).read_bytes(), file


def test_every_key_of_a_load_finds_its_layers(name: str, folder: Path, kernel: Any) -> None:
    for kind in ("norm", "MLP", "fusion"):
        wanted = {value[0].partition(":")[2] for value in mapping(name, kind).values()}
        model = with_layers(name, folder, kind, kernel)
        assert wanted <= {row.layer for row in kernel.report(model).rows}
        assert not any(row.fallback for row in kernel.report(model).rows)
