"""The README's speeds on the CPU are those of the committed run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tools.project import ROOT

ROWS: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / "cpu.json").read_text(encoding="utf-8"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
NATIVE, PLAINER = "avx512_bf16", "as avx512"


def speeds(threads: int, machine: str, case: str, dtype: str = "") -> list[float]:
    """Stock's time over ours of the rows whose case matches."""
    found = [
        row["stock"] / row["ours"]
        for row in ROWS
        if (row["threads"], row["machine"]) == (threads, machine)
        and re.fullmatch(case, row["case"])
        and row["dtype"] in (dtype or row["dtype"])
    ]
    assert found, (threads, machine, case)
    return found


def span(machine: str, case: str, dtype: str = "") -> Callable[[int], list[float]]:
    def ends(threads: int) -> list[float]:
        found = speeds(threads, machine, case, dtype)
        return [min(found), max(found)]

    return ends


def model(machine: str, variant: str) -> Callable[[int], list[float]]:
    def both(threads: int) -> list[float]:
        cases = (f"SmolLM2-135M prefill 128, {variant}", f"SmolLM2-135M decode, {variant}")
        return [value for case in cases for value in speeds(threads, machine, re.escape(case))]

    return both


MLP, FUSED, LINEAR = r"rms_norm_mlp .*", "norm + fusion", "norm + fusion + Linear"
# The lines of the README's table in their order.
LINES = [
    ("RMSNorm in bf16", lambda threads: speeds(threads, NATIVE, "rms_norm, geometric mean of 6", "bf16")),
    ("its backward", span(NATIVE, "rms_norm backward 4096x1024")),
    ("RMSNorm + MLP, 1 to 512 rows, bf16", span(NATIVE, MLP, "bf16")),
    ("the same in fp16", span(NATIVE, MLP, "fp16")),
    ("the same in fp32", span(NATIVE, MLP, "fp32")),
    ("SmolLM2-135M in bf16", model(NATIVE, FUSED)),
    ("with `Linear` too", model(NATIVE, LINEAR)),
    ("as a processor without bf16", model(PLAINER, FUSED)),
    ("with `Linear` too", model(PLAINER, LINEAR)),
]


def table() -> list[list[str]]:
    text = README.partition("| what | two threads | one |\n| --- | --- | --- |\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


@pytest.mark.parametrize(("index", "title", "values"), [(i, *line) for i, line in enumerate(LINES)])
def test_a_line_of_the_table_is_that_of_the_run(index: int, title: str, values: Callable[[int], list[float]]) -> None:
    assert len(table()) == len(LINES)
    name, *cells = table()[index]
    assert name.startswith(title)
    for threads, cell in zip((2, 1), cells, strict=True):
        shown, measured = re.findall(r"\d+(?:\.\d+)?", cell), values(threads)
        assert len(shown) == len(measured), cell
        for text, value in zip(shown, measured, strict=True):
            digits = len(text.partition(".")[2])
            assert abs(float(text) - value) <= 0.5 * 10.0**-digits + 1e-9, (cell, value)


def test_the_verdicts_are_counted_as_the_run_counts_them() -> None:
    count = {verdict: sum(row["verdict"] == verdict for row in ROWS) for verdict in ("met", "limit", "MISSED")}
    text = " ".join(README.split())
    assert f"of {len(ROWS)} rows {count['met']} meet theirs, {count['limit']} are at the machine's limit" in text
    assert f"and {count['MISSED']} miss" in text
