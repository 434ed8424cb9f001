"""The device check runs on small cases without a GPU, and judges as it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tools.device.contenders import OURS
from tools.device.measuring import Row
from tools.device.report import markdown, svg, verdicts

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
    assert (tmp_path / "device_check.svg").read_text().startswith("<svg")


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


def test_a_report_names_what_was_not_measured_and_why():
    rows = [Row("forward", 256, OURS, reason="no time left"), row("forward", 512, OURS, 1e-6, 10)]
    payload = {"device": "d", "versions": "v", "copy_bytes_per_second": 1.0, "numerics": {}}
    payload |= {"verdicts": [], "disturbance": None}
    assert "| forward | 256 | layout-kernels | no time left |  |" in markdown(payload, rows)
    assert svg(rows).count("<polyline") == 1
