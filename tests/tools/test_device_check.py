"""The device check runs on small cases without a GPU, and judges as it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from layout_kernels.numerics.environment import environment
from layout_kernels.numerics.report import new_payload
from tools.device.contenders import OURS, _missing
from tools.device.measuring import Case, Row
from tools.device.report import verdicts, write

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools" / "device_check.py"), *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def test_the_whole_script_runs_interpreted_and_writes_its_reports(tmp_path):
    done = run("--interpret", "--output", str(tmp_path), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "device_check.json").read_text())
    ours = [row for row in found["rows"] if row["contender"] == OURS and row["kind"] != "graph"]
    assert ours
    assert all(row["seconds"] for row in ours), ours
    assert set(found["numerics"].values()) == {"passed"}
    assert "<svg" in (tmp_path / "device_check.svg").read_text()
    assert found["coverage"]["failed"] == 0


def test_without_a_gpu_it_says_so(tmp_path):
    done = run("--output", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "no CUDA device" in done.stdout


def row(kind, problem, contender, seconds, least_bytes):
    return Row(kind, problem, contender, least_bytes, timing={"median": seconds})


def test_targets_are_judged_by_share_of_peak_and_against_the_others():
    rows = [
        row("forward", 4096, OURS, 1.0, 90),
        row("forward", 4096, "torch.compile", 0.5, 90),
        row("backward", 4096, OURS, 1.0, 60),
        row("mlp small graph", 1, OURS, 1.0, 1),
        row("mlp small graph", 1, "stock", 1.3, 1),
        Row("forward", 256, OURS, reason="wrong: differs"),
    ]
    met = {item["what"]: item["met"] for item in verdicts(rows, 100.0)}
    assert met == {
        "forward 4096: share of peak": True,
        "forward 4096: speed against torch.compile": False,
        "backward 4096: share of peak": False,
        "mlp small graph 1 rows: speed against stock": True,
    }


def test_a_report_names_what_was_not_measured_and_why_and_plots_the_rest(tmp_path):
    rows = [Row("forward", 256, OURS, reason="no time left"), row("forward", 512, OURS, 1e-6, 10)]
    payload = new_payload("device_check", ["command"], None, environment("cpu"), {})
    payload |= {"device": "d", "copy_bytes_per_second": 1.0, "numerics": {}, "verdicts": [], "disturbance": None}
    assert write(tmp_path, payload, rows) == []
    text = (tmp_path / "device_check.md").read_text()
    assert "| forward | 256 | layout-kernels | no time left |  |" in text
    assert "| forward | 512 | layout-kernels | 1 us | 0 |" in text
    assert ">layout-kernels<" in (tmp_path / "device_check.svg").read_text()


def test_without_matplotlib_there_is_everything_but_the_plot(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    payload = new_payload("device_check", ["command"], None, environment("cpu"), {})
    payload |= {"device": "d", "copy_bytes_per_second": 1.0, "numerics": {}, "verdicts": [], "disturbance": None}
    (problem,) = write(tmp_path, payload, [])
    assert "a plot needs matplotlib" in problem
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md"}


@pytest.mark.parametrize(
    ("made", "status", "reason"),
    [
        (lambda: lambda: torch.ones(3), "passed", ""),
        (lambda: lambda: torch.zeros(3), "failed", "WrongResultError: peer is off by 1.00e+00 of the largest element"),
        (_missing("peer", "not installed").forward, "not_applicable", "not installed"),
        (lambda: 1 / 0, "failed", "ZeroDivisionError: division by zero"),
    ],
)
def test_only_a_right_result_is_timed_and_anything_else_says_why(made, status, reason):
    found = Case(Row("forward", 1, "peer"), made, torch.ones(3), 0.1).measure("cpu", time.monotonic() + 60)
    assert (found.status, found.seconds is not None) == (status, status == "passed")
    assert found.reason.startswith(reason)
    assert Case(Row("forward", 1, "peer"), made, torch.ones(3), 0.1).measure("cpu", 0.0).reason == "no time left"
