"""The report: targets judged, a table in Markdown, JSON, and a plot in SVG that needs no library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import log2
from pathlib import Path
from typing import Any

from layout_kernels.benchmark.plot import COLOURS
from layout_kernels.numerics.report import Table, markdown_table
from tools.device.contenders import OURS
from tools.device.measuring import Row

_PANEL, _MARGIN = (460, 300), 55
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


def markdown(payload: dict[str, Any], rows: Sequence[Row]) -> str:
    """The report for a reader."""
    measured = Table("Medians of a call, cold caches", ("what", "problem", "contender", "µs", "GB/s"))
    for row in rows:
        rate = f"{row.rate / 1e9:.0f}" if row.rate and not row.kind.startswith("mlp") else ""
        time = f"{row.seconds * 1e6:.1f}" if row.seconds else row.reason
        measured.rows.append((row.kind, str(row.problem), row.contender, time, rate))
    judged = Table("Targets", ("target", "reached", "asked", ""))
    for item in payload["verdicts"]:
        met = "met" if item["met"] else "MISSED"
        judged.rows.append((item["what"], str(item["reached"]), str(item["target"]), met))
    facts = f"{payload['versions']}; copy {payload['copy_bytes_per_second'] / 1e9:.0f} GB/s"
    disturbed = payload["disturbance"] or "nothing that is watched disturbed the times"
    head = (f"# {payload['device']}", facts, f"numerics: {payload['numerics']}", disturbed)
    return "\n\n".join((*head, markdown_table(measured), markdown_table(judged))) + "\n"


def _panel(kind: str, rows: Sequence[Row], left: int) -> list[str]:
    points = [row for row in rows if row.kind == kind and row.rate]
    top = max((row.rate or 0) for row in points)
    widths = sorted({row.problem for row in points})
    low, high = log2(widths[0]), max(log2(widths[-1]), log2(widths[0]) + 1)
    width, height = _PANEL

    def place(row: Row) -> str:
        across = left + _MARGIN + (log2(row.problem) - low) / (high - low) * (width - 2 * _MARGIN)
        return f"{across:.1f},{height - _MARGIN - (row.rate or 0) / top * (height - 2 * _MARGIN):.1f}"

    drawn = [f'<text x="{left + width / 2}" y="20" text-anchor="middle">{kind}, GB/s up to {top / 1e9:.0f}</text>']
    for index, name in enumerate(dict.fromkeys(row.contender for row in points)):
        colour, y = COLOURS[index % len(COLOURS)], 38 + 14 * index
        line = " ".join(place(row) for row in points if row.contender == name)
        drawn.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{3 if name == OURS else 1.5}"/>'
        )
        drawn.append(f'<text x="{left + _MARGIN}" y="{y}" fill="{colour}" font-size="11">{name}</text>')
    for number in widths:
        x = place(Row(kind, number, "")).split(",")[0]
        drawn.append(f'<text x="{x}" y="{height - 30}" font-size="10" text-anchor="middle">{number}</text>')
    return drawn


def svg(rows: Sequence[Row]) -> str:
    """Rate against width, a panel each for forward and backward."""
    kinds = [kind for kind in ("forward", "backward") if any(row.kind == kind and row.rate for row in rows)]
    size = f'width="{_PANEL[0] * max(1, len(kinds))}" height="{_PANEL[1]}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">']
    parts.append('<rect width="100%" height="100%" fill="white"/>')
    for index, kind in enumerate(kinds):
        parts += _panel(kind, rows, index * _PANEL[0])
    return "\n".join([*parts, "</svg>"]) + "\n"


def write(folder: Path, payload: dict[str, Any], rows: Sequence[Row]) -> None:
    """device_check.json, .md and .svg."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {**payload, "rows": [row.as_dict() for row in rows]}
    (folder / "device_check.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    (folder / "device_check.md").write_text(markdown(payload, rows), encoding="utf-8")
    (folder / "device_check.svg").write_text(svg(rows), encoding="utf-8")
