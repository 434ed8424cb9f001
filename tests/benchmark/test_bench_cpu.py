"""The CPU benchmark's verdicts and report, from made-up times; nothing real is timed here."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench_cpu, cpu_models, cpu_operations, cpu_report
from benchmarks.cpu_plot import panels, write_plot
from benchmarks.cpu_row import LIMIT, MET, MISSED, Row, geometric_mean
from layout_kernels.benchmark.limits import Limit
from layout_kernels.benchmark.load import Load
from tests.benchmark.test_bench_cpu_models import findings

FIELDS: dict[str, Any] = {"machine": "as avx2", "threads": 1, "case": "rms_norm_mlp 576/1536 rows 8", "dtype": "bf16"}
# A target of 3 x stock asks for 100, the machine allows 120.
OUT_OF_REACH = Row(**FIELDS, stock=300.0, ours=130.0, required=100.0, target="3 stock", wanted=3.0,
                   limit="fp32 operations", limit_us=120.0, work=12e6)  # fmt: skip
SIZES = (1, 576, 1536, 2)  # rows, width, intermediate size, bytes of an element
WEIGHTS = 3 * 576 * 1536
LIMITS = Limit(bandwidth=2e10, rate=1e11)


def mlp_row(rows: int, stock: float, ours: float, wanted: float = 5.0, limit: Limit = LIMITS, **others: float) -> Row:
    found = {"stock": stock, "ours": ours, **others}
    return cpu_operations.mlp_row(Row(**FIELDS, wanted=wanted), found, (rows, *SIZES[1:]), limit)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"ours": 100.0}, MET),
        ({"ours": 100.1}, LIMIT),
        ({"ours": 150.0}, LIMIT),
        ({"ours": 150.1}, MISSED),  # beyond 120 / 0.8
        ({"limit_us": 100.0}, MISSED),  # the machine allows what is asked
        ({"limit_us": None, "limit": ""}, MISSED),
        ({"compiled": 99.0}, MISSED),  # another one reaches it, so it can be reached
        ({"functional": 100.0}, MISSED),
        ({"ours": None}, MISSED),
        ({"ours": 50.0, "failure": "off by 1"}, MISSED),
    ],
)
def test_limit_is_for_a_target_out_of_reach_and_a_time_near_the_limit(changes: dict[str, Any], verdict: str) -> None:
    assert replace(OUT_OF_REACH, **changes).verdict == verdict


def test_only_a_missed_row_fails_the_run_and_so_does_an_empty_one() -> None:
    met, missed = replace(OUT_OF_REACH, ours=90.0), replace(OUT_OF_REACH, ours=200.0)
    assert cpu_report.status([met, OUT_OF_REACH]) == 0
    assert cpu_report.status([met, missed]) == 1
    assert cpu_report.status([]) == 1
    assert cpu_report.summary([met, OUT_OF_REACH, missed]) == "3 rows: 1 met, 1 at the machine's limit, 1 missed."


def test_never_slower_allows_three_percent_and_stock_proves_that_it_can_be_reached() -> None:
    assert mlp_row(8, 970.0, 999.0, wanted=1.0).verdict == MET
    slow_machine = Limit(bandwidth=1e6, rate=1e6)
    assert mlp_row(8, 970.0, 1001.0, wanted=1.0, limit=slow_machine).verdict == MISSED


def test_one_row_must_read_at_the_memorys_speed_and_many_multiply_at_that_of_products() -> None:
    reading = 2e6 * WEIGHTS / LIMITS.bandwidth
    assert mlp_row(1, 1e6, reading / 0.81).verdict == MET
    assert mlp_row(1, 1e6, reading / 0.79).verdict == MISSED
    assert mlp_row(8, 1e6, 100 * reading).verdict == MET  # no such target in between
    products = 2e6 * WEIGHTS * 128 / LIMITS.rate
    assert mlp_row(128, 1e6, products / 0.81).verdict == MET
    assert mlp_row(128, 1e6, products / 0.79).verdict == MISSED


def test_weights_in_a_cache_are_read_at_the_caches_speed_in_the_limit_and_not_in_the_target() -> None:
    cached = replace(LIMITS, cached=4 * LIMITS.bandwidth)
    memory, cache = mlp_row(1, 1e6, 1.0), mlp_row(1, 1e6, 1.0, limit=cached)
    assert cache.limit_us == pytest.approx(memory.limit_us / 4)  # type: ignore[operator]
    assert cache.required == memory.required


def norm(found: dict[str, float], case: str = "rms_norm 128x576") -> Row:
    return cpu_operations.forward_row(Row(**{**FIELDS, "case": case}), found, 1000)


def test_a_norm_is_never_behind_the_best_of_the_others() -> None:
    times = {"ours": 10.0, "stock": 40.0, "F": 20.0, "compile": 10.0, "clone": 1.0}
    assert norm(times).verdict == MET
    for other in ("stock", "F", "compile"):
        assert norm({**times, other: 9.6}).verdict == MISSED
        assert norm({**times, other: 9.8}).verdict == MET  # noise
    assert norm({**times, "clone": 5.0}, "rms_norm 4096x4096").verdict == MISSED  # 1.5 copies
    assert norm({**times, "clone": 7.0}, "rms_norm 4096x4096").verdict == MET


def test_the_geometric_mean_is_that_of_the_ratios() -> None:
    rows = [norm({"ours": 1.0, "stock": stock, "F": 50.0, "clone": 0.1}) for stock in (2.0, 8.0, 32.0)]
    mean = geometric_mean(rows)
    assert mean.speedup == pytest.approx(8.0)
    assert (mean.verdict, mean.case) == (MET, "rms_norm, geometric mean of 3")
    rows[2] = norm({"ours": 1.0, "stock": 3.9, "F": 50.0, "clone": 0.1})
    assert geometric_mean(rows).verdict == MISSED
    assert geometric_mean([*rows, replace(rows[0], ours=None, failure="wrong")]).verdict == MISSED


def test_a_wrong_kernel_gives_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_operations.layout_kernels, "rms_norm", lambda x, *_: x * 2)
    options = Namespace(compile=False, seconds=0.0, quick=True)
    row = cpu_operations._forward_row(Row.of("avx2", "rms_norm 4x8", "fp32"), options, torch.randn(4, 8))
    assert (row.ours, row.stock, row.verdict) == (None, None, MISSED)
    assert "MISSED: rms_norm 4x8 fp32 by ours is off by" in cpu_report.line(row)


def test_the_table_shows_each_contender_and_marks_where_ours_is_behind() -> None:
    row = replace(OUT_OF_REACH, functional=140.0, compiled=120.0)
    cells = [cell.strip() for cell in cpu_report.line(row).strip("|").split("|")]
    named = dict(zip(cpu_report.TITLES, cells, strict=True))
    assert (named["stock"], named["F"], named["compile"], named["ours"]) == ("300.0", "140.0", "120.0", "130.0")
    assert (named["x stock"], named["x best other"]) == ("2.31", "**0.92**")
    assert (named["of its limit"], named["verdict"]) == ("0.92 of fp32 operations", "limit")
    assert "| - | - | 130.0 |" in cpu_report.line(OUT_OF_REACH)


def test_the_profile_says_what_a_target_needs_beside_what_the_machine_does() -> None:
    assert cpu_report.profile([replace(OUT_OF_REACH, ours=100.0)]) == []
    (text,) = cpu_report.profile([replace(OUT_OF_REACH, threads=2, profile="norm 1.0 us")])
    assert "**limit**. needs 60.0 GFLOP/s a thread, fp32 products reach 50.0, ours 46.2, stock 20.0" in text
    assert "asks for 1.20 times the limit; norm 1.0 us" in text
    (memory,) = cpu_report.profile([Row(**FIELDS, stock=1.0, ours=3.0, required=2.0, unit="MiB")])
    assert "3.0 MiB, allowed 2.0" in memory


def test_the_parts_of_an_mlp_have_their_rate_and_their_share_of_the_limit() -> None:
    products = 2 * 2 * 576 * 1536 * 128 / LIMITS.rate
    text = cpu_operations.profile_of({"norm": 14.7456e-6, "gate_up": 2 * products}, (128, *SIZES[1:]), LIMITS)
    assert text.startswith("norm 14.7 us at 20.0 GB/s (1.00 of bytes); gate_up ")
    assert text.endswith("at 50.0 GFLOP/s (0.50 of fp32 operations)")


def test_the_report_holds_every_row_and_explains_the_verdicts(tmp_path: Path) -> None:
    rows = [OUT_OF_REACH, replace(OUT_OF_REACH, ours=90.0, case="rms_norm_mlp 576/1536 rows 32")]
    cpu_report.write(rows, tmp_path, Load(0.25, None, 61.0))
    text = (tmp_path / "cpu.md").read_text()
    assert all(cpu_report.line(row) in text for row in rows)
    assert "1 minutes, other processes meanwhile: 25% of the CPUs" in text
    assert "2 rows: 1 met, 1 at the machine's limit, 0 missed." in text
    assert "**verdict**" in text
    assert "out of reach on this machine" in text
    assert text.count("- as avx2, 1 thr, ") == 1
    entries = json.loads((tmp_path / "cpu.json").read_text())
    assert [entry.pop("verdict") for entry in entries] == [LIMIT, MET]
    assert [Row(**entry) for entry in entries] == rows
    assert "<svg" in (tmp_path / "cpu.svg").read_text()


def test_a_processor_stands_for_the_plainer_ones_that_it_is_above() -> None:
    assert bench_cpu.machines(["portable", "avx2"]) == ["native"]
    assert bench_cpu.machines(["portable", "avx2", "avx512"]) == ["native", "as avx2"]
    assert bench_cpu.machines(["portable", "avx2", "avx512", "avx512_bf16"]) == ["native", "as avx512", "as avx2"]


def test_the_plot_has_a_panel_for_each_group_and_leaves_out_what_has_no_speed(tmp_path: Path) -> None:
    fused = cpu_models.OURS[0]
    rows = [
        findings().speed_row("as avx2", (1, "decode", fused), False),
        findings().memory_row("as avx2", 1, fused),
        replace(OUT_OF_REACH, ours=None, dtype="fp32"),
        OUT_OF_REACH,
        norm({"ours": 1.0, "stock": 2.0, "clone": 0.1}),
        geometric_mean([norm({"ours": 1.0, "stock": 2.0, "clone": 0.1})]),
    ]
    found = panels(rows)
    assert list(found) == ["RMSNorm, 1 thr", "norm + MLP, bf16, as avx2", "SmolLM2-135M, bf16, 1 thr"]
    assert [len(members) for members in found.values()] == [2, 1, 1]
    write_plot(rows, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert all(title in text for title in found)
    write_plot([], tmp_path / "empty.svg")
