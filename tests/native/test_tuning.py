"""Which products are ours is measured once, kept, and never decides whether a result is right."""

from __future__ import annotations

import json
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.tiny import FAMILIES


@pytest.fixture
def tuning(package: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """With no table yet, and a file of its own."""
    module = import_module(f"{package.__name__}.ops.tuning")
    monkeypatch.setattr(module, "_tables", {})
    monkeypatch.setenv(module.VARIABLE, str(tmp_path / "cache" / "tuning.json"))
    return module


def table(tuning: Any, ours: bool, note: str = "") -> Any:
    row = (ours,) * (tuning.LENGTHS + 1)
    return tuning.Table(dict.fromkeys(("float32", "bfloat16", "float16"), row), time.time(), note)


def never(at: str) -> Any:
    raise AssertionError(f"measured at {at}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 64, 513])
def test_a_table_chooses_the_way_and_a_wrong_one_costs_no_correctness(
    tuning: Any, package: Any, ours: bool, rows: int, dtype: torch.dtype
) -> None:
    tuning.prepare(lambda at: table(tuning, ours))
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, 96), (80, 96)))
    products = import_module(f"{package.__name__}.ops.products")
    assert products.is_ours(rows, dtype) is ours
    found = package.linear(x, weight)
    if not ours:
        assert torch.equal(found, functional.linear(x, weight))
    exact = x.double() @ weight.double().mT
    # Of the largest sum: one rounding to the dtype, and ten of float32 for 96 terms.
    allowed = torch.finfo(dtype).eps + 10 * torch.finfo(torch.float32).eps
    assert (found.double() - exact).abs().max() <= allowed * exact.abs().max()


def test_a_table_is_measured_once_and_read_from_then_on(tuning: Any) -> None:
    first = tuning.prepare(lambda at: table(tuning, True))
    assert tuning.prepare(never) is first
    tuning._tables.clear()
    assert tuning.prepare(never) == first
    assert first.ours["float32"] == (True,) * (tuning.LENGTHS + 1)


@pytest.mark.parametrize("change", ["threads", "level", "torch", "package"])
def test_another_machine_s_table_is_not_taken(tuning: Any, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.prepare(lambda at: table(tuning, True))
    tuning._tables.clear()
    if change == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    elif change == "level":
        monkeypatch.setattr(tuning, "level", lambda: "another")
    elif change == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    else:
        monkeypatch.setattr(tuning._ops, "NAMESPACE", "another")
    assert tuning.prepare(lambda at: table(tuning, False)).ours["float32"][0] is False
    assert len(json.loads(tuning.cache_file().read_text())) == 2


SHORT = '{"KEY": {"ours": {"float32": [1]}, "measured": 0, "note": ""}}'


@pytest.mark.parametrize("content", ["", "{", "[]", '{"KEY": 3}', SHORT])
def test_a_file_that_is_damaged_is_measured_anew(tuning: Any, content: str) -> None:
    file = tuning.cache_file()
    file.parent.mkdir()
    file.write_text(content.replace("KEY", tuning._key(tuning.level(), torch.get_num_threads())))
    assert tuning.prepare(lambda at: table(tuning, False)).ours["float32"][3] is False


def test_a_folder_that_cannot_be_written_to_keeps_nothing_and_hinders_nothing(tuning: Any) -> None:
    tuning.cache_file().parent.write_text("a file")
    assert tuning.prepare(lambda at: table(tuning, True)).ours
    assert tuning.prepare(never).ours


def test_a_measurement_beside_other_work_is_not_kept(tuning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = iter(range(1, 100))
    monkeypatch.setattr(tuning, "_busy_seconds", lambda: 10.0 * next(passed))
    found = tuning.prepare()
    assert "other processes took" in found.note
    assert not tuning.cache_file().exists()
    assert tuning.choice(torch.float32, tuning.level(), torch.get_num_threads()) is None
    assert "the shipped limits, since other processes" in tuning.describe()[0]


def test_off_is_off(tuning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.VARIABLE, "off")
    assert tuning.prepare(never) is None
    assert tuning.describe() == [f"products: the shipped limits ({tuning.VARIABLE}=off)"]


def test_what_is_measured_is_complete_and_told(tuning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "BUSY", 1e9)
    found = tuning.prepare()
    assert set(found.ours) == {"float32", "bfloat16", "float16"}
    assert {len(row) for row in found.ours.values()} == {tuning.LENGTHS + 1}
    told = tuning.describe()
    assert str(tuning.cache_file()) in told[0]
    assert [line.strip().partition(":")[0] for line in told[1:]] == list(found.ours)
    monkeypatch.setattr(tuning, "_tables", {})
    tuning.cache_file().unlink()
    monkeypatch.setattr(tuning, "BUDGET", 0.0)
    assert tuning.prepare().ours == {}


def test_between_numbers_of_rows_that_disagree_the_shipped_limits_hold(
    tuning: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "_AMX", frozenset())
    monkeypatch.setattr(tuning, "_times", lambda weight, rows: (1.0, 2.0) if rows <= 96 else (2.0, 1.0))
    data = {shape: torch.zeros(1, 1) for shape in (tuning.FEW, tuning.MANY)}
    row = tuning._row(torch.bfloat16, "avx512_bf16", data)  # shipped: up to 128 rows
    assert row == (True,) * 8 + (False,) * 4
    monkeypatch.setattr(tuning, "_times", lambda weight, rows: (2.0, 1.0) if rows <= 96 else (1.0, 2.0))
    row = tuning._row(torch.bfloat16, "avx512", data)  # shipped: any number
    assert row == (False,) * 8 + (True,) * 4


def test_a_product_that_is_wrong_is_never_the_faster(tuning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tuning, "direct", lambda operator: lambda x, weight, bias: x.new_zeros(x.shape[0], len(weight))
    )
    ours, theirs = tuning._times(torch.randn(8, 8), 3)
    assert ours > theirs


def test_it_is_prepared_before_a_model_runs_and_never_in_a_forward(
    tuning: Any, package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(tuning, "prepare", lambda: calls.append(1))
    model = FAMILIES["llama"].build().eval()
    package.kernel_plugins.apply_default_kernels(model, "auto")
    assert calls
    calls.clear()
    monkeypatch.setattr(tuning, "_measure", never)
    model(torch.arange(6).view(1, 6))
    assert not calls


def test_initialize_prepares(package: Any, tuning: Any) -> None:
    runtime = import_module(f"{package.__name__}.dispatch.runtime").RUNTIME
    assert runtime._prepare["cpu"].__module__ == tuning.__name__
    tuning._tables[tuning.level(), torch.get_num_threads()] = table(tuning, True)
    package.initialize("cpu")
