"""The report: targets judged, tables, and a plot where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from layout_kernels.benchmark.plot import COLOURS, draw
from layout_kernels.benchmark.report import seconds
from layout_kernels.numerics.report import Report, Table, write_reports
from tools.device.contenders import OURS
from tools.device.measuring import Row

# Bytes a second, by a part of the device's name: the maker's figures. Others are compared with copying alone.
_PEAKS = {"H200": 4.8e12, "H100 PCIe": 2.0e12, "H100 NVL": 3.9e12, "H100": 3.35e12, "A100-SXM4-80GB": 2.039e12}


def peak_bandwidth(name: str) -> float | None:
    """The maker's figure for a device's memory, or None where it is not known here."""
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


def _least_share(kind: str, width: int) -> float | None:
    """The share of the memory's peak that a norm must reach."""
    if kind == "backward":
        return 0.7
    if kind == "forward" and width >= 4096:
        return 0.88 if width <= 16384 else 0.8
    return None


def verdicts(rows: Sequence[Row], peak: float | None) -> list[dict[str, Any]]:
    """Every target with what was reached: shares of the peak, never below another, and the MLP's factors."""
    found: list[dict[str, Any]] = []
    by_place = {(row.kind, row.problem, row.contender): row for row in rows if row.seconds}
    for (kind, problem, contender), row in by_place.items():
        if contender != OURS or row.seconds is None or row.rate is None:
            continue
        where = f"{kind} {problem}"
        target = _least_share(kind, problem)
        if target is not None and peak is not None:
            found.append(_verdict(f"{where}: share of peak", row.rate / peak, target))
        for other in ("torch.compile", "Liger"):
            rival = by_place.get((kind, problem, other))
            if rival is not None and rival.seconds is not None:
                # Two medians of the same call differ by up to 2 % here and there.
                found.append(_verdict(f"{where}: speed against {other}", rival.seconds / row.seconds, 0.98))
        stock = by_place.get((kind, problem, "stock"))
        if kind.startswith("mlp") and stock is not None and stock.seconds is not None:
            target = 1.2 if problem <= 8 else 1.05 if problem >= 1024 else None
            if target is not None:
                found.append(_verdict(f"{where} rows: speed against stock", stock.seconds / row.seconds, target))
    return found


def _verdict(what: str, reached: float, target: float) -> dict[str, Any]:
    return {"what": what, "reached": round(reached, 3), "target": target, "met": reached >= target}


def tables(payload: dict[str, Any], rows: Sequence[Row]) -> list[Table]:
    """What was measured, the targets, and what else a reader must know."""
    measured = Table("Medians of a call, cold caches", ("what", "problem", "contender", "time", "GB/s"))
    for row in rows:
        rate = f"{row.rate / 1e9:.0f}" if row.rate and not row.kind.startswith("mlp") else ""
        time = seconds(row.seconds) if row.seconds else row.reason
        measured.rows.append((row.kind, str(row.problem), row.contender, time, rate))
    judged = Table("Targets", ("target", "reached", "asked", "met"))
    for item in payload["verdicts"]:
        judged.rows.append((item["what"], item["reached"], item["target"], "yes" if item["met"] else "MISSED"))
    facts: list[Sequence[str]] = [(f"numerics, {mode}", how) for mode, how in payload["numerics"].items()]
    facts.append(("copy in memory", f"{payload['copy_bytes_per_second'] / 1e9:.0f} GB/s"))
    facts.append(("disturbed by", payload["disturbance"] or "nothing that is watched"))
    return [Table("The run", ("what", "how"), facts), judged, measured]


def _panel(axes: Any, rows: Sequence[Row]) -> None:
    for colour, name in zip(COLOURS, dict.fromkeys(row.contender for row in rows), strict=False):
        points = [(row.problem, row.rate / 1e9) for row in rows if row.contender == name and row.rate]
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=3 if name == OURS else 1.5, label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("GB/s")
    axes.legend(fontsize=8)


def write(folder: Path, payload: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """device_check.json, .md and .svg, rate against width; what could not be written, and why."""
    whole = {**payload, "rows": [row.as_dict() for row in rows]}
    report = Report(whole, tables(payload, rows))
    problems = write_reports(report, [folder / "device_check.json", folder / "device_check.md"])
    kinds = {kind: [row for row in rows if row.kind == kind and row.rate] for kind in ("forward", "backward")}
    panels = {kind: partial(_panel, rows=found) for kind, found in kinds.items() if found}
    try:
        draw(folder / "device_check.svg", payload["device"], panels)
    except ImportError as error:
        problems.append(str(error))
    return problems
