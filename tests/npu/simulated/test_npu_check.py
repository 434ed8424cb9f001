"""The tool for a person with a card, on the simulated one: what it writes, and what makes it fail."""

from __future__ import annotations

import json

import torch

from layout_kernels.numerics.cli import main as numerics
from tools import npu_check

OPERATIONS = ["gated_activation"]


def in_this_process(command: str, arguments: list[str]) -> int:
    # The simulated device is in this process only. No number of a benchmark on it means anything.
    return numerics(arguments) if command == "numerics" else 3


def steps_of(folder):
    found = json.loads((folder / "npu_check.json").read_text())
    return found, {(step["command"], step["mode"]): step for step in found["steps"]}


def test_it_proves_every_mode_and_writes_both_reports(tmp_path):
    npu_check.main(["--output", str(tmp_path), "--operation", *OPERATIONS], in_this_process)
    found, steps = steps_of(tmp_path)
    assert found["evidence"] == "simulated NPU"
    assert (found["product"], found["cann"]) == ("Ascend910B3", "8.5.0")
    for mode in npu_check.MODES:
        step = steps["numerics", mode]
        assert step["status"] == "passed"
        assert step["report"]["coverage"]["passed"] > 20
        assert {case["operation"] for case in step["report"]["cases"]} == set(OPERATIONS)
    text = (tmp_path / "npu_check.md").read_text()
    assert text.startswith("# Ascend check: simulated NPU\n")
    assert "| numerics | aclgraph | passed |" in text


def test_a_wrong_number_fails_and_nothing_is_timed(tmp_path, monkeypatch):
    from layout_kernels.ops.gated_activation import npu

    class Wrong:
        npu_swiglu = staticmethod(lambda pair, dim: pair.chunk(2, -1)[1] * 1)

    monkeypatch.setattr(npu, "torch_npu", Wrong)
    timed: list[str] = []

    def run(command, arguments):
        timed.append(command)
        return in_this_process(command, arguments)

    code = npu_check.main(["--modes", "eager", "--output", str(tmp_path), "--operation", "gated_activation"], run)
    _, steps = steps_of(tmp_path)
    assert code == 1
    assert timed == ["numerics"]
    assert steps["numerics", "eager"]["status"] == "failed"
    assert steps["benchmark", "eager"]["status"] == "not run"


def test_a_command_that_ends_without_a_report_fails(tmp_path):
    assert npu_check.main(["--modes", "eager", "--output", str(tmp_path)], lambda command, arguments: 1) == 1
    _, steps = steps_of(tmp_path)
    assert steps["numerics", "eager"]["reason"] == "exit status 1"


def test_without_a_card_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.npu, "is_available", lambda: False)
    assert npu_check.main(["--output", str(tmp_path)], in_this_process) == 2
    assert "is_available() is False" in capsys.readouterr().err
