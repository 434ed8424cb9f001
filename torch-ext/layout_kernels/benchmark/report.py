"""The tables of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..numerics.report import Table
from ..numerics.suite import FAILED, NOT_APPLICABLE

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def seconds(value: float) -> str:
    """A time with three digits and a fitting unit."""
    for factor, unit in _UNITS:
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def _bytes(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value / 2**20:.1f} MiB" if value >= 2**20 else f"{value / 2**10:.1f} KiB"


def _times(timing: Mapping[str, Any], cache: str) -> str:
    chosen = timing[cache]["device"] or timing[cache]["wall"]
    return f"{seconds(chosen['median'])} (p90 {seconds(chosen['p90'])}, mad {seconds(chosen['mad'])})"


def _rate(entry: Mapping[str, Any]) -> str:
    rates = entry.get("rates") or {}
    if "flops_per_second" in rates:
        return f"{rates['flops_per_second']['cold'] / 1e9:.4g} GFLOP/s"
    return f"{rates['bytes_per_second']['cold'] / 1e9:.4g} GB/s" if "bytes_per_second" in rates else ""


def _factor(entry: Mapping[str, Any], row: Mapping[str, Any], cache: str) -> str:
    """How many times as fast as the baseline; nothing where the measurement does not count."""
    comparison = row["comparison"]
    if not comparison["valid"]:
        return ""
    by_name = {other["implementation"]: other for other in row["beside"]}
    baseline = by_name[comparison["baseline"]]["timing"][cache]
    own = entry["timing"][cache]
    return f"{(baseline['device'] or baseline['wall'])['median'] / (own['device'] or own['wall'])['median']:.2f}"


def _role(entry: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    if entry["implementation"] == row["implementation"]:
        return "candidate"
    return "baseline" if entry["implementation"] == row["comparison"]["baseline"] else "peer"


_HEADER = ("case", "role", "implementation", "warm", "cold", "x warm", "x cold", "rate, cold", "peak memory", "counts")


def tables(payload: Mapping[str, Any]) -> list[Table]:
    """A table of times for each operation; then the machine's limits, what failed and what did not apply.

    A time has the median, the nearest-rank p90 and the median absolute deviation of one call.
    """
    found = []
    for operation in dict.fromkeys(row["operation"] for row in payload["cases"]):
        rows = [row for row in payload["cases"] if row["operation"] == operation and row.get("comparison")]
        if rows:
            found.append(_times_of(operation, rows))
    if payload.get("limits"):
        found.append(_limits(payload["limits"]))
    for status, title in ((FAILED, "Failed, so not timed"), (NOT_APPLICABLE, "Not applicable")):
        lines = [
            (row["operation"], row["case_id"], entry["implementation"], entry["reason"] or "")
            for row in payload["cases"]
            for entry in (row, *row.get("beside", ()))
            if entry["status"] == status
        ]
        if lines:
            found.append(Table(title, ("operation", "case", "implementation", "reason"), list(lines)))
    return found


def _times_of(operation: str, rows: list[Mapping[str, Any]]) -> Table:
    table = Table(operation, _HEADER)
    for row in rows:
        comparison = row["comparison"]
        counts = "yes" if comparison["valid"] else "NO: " + "; ".join(comparison["invalid_because"])
        for entry in row["beside"]:
            if "timing" not in entry:
                continue
            table.rows.append(
                (
                    row["case_id"],
                    _role(entry, row),
                    entry["implementation"],
                    _times(entry["timing"], "warm"),
                    _times(entry["timing"], "cold"),
                    _factor(entry, row, "warm"),
                    _factor(entry, row, "cold"),
                    _rate(entry),
                    _bytes(entry.get("peak_bytes")),
                    counts,
                )
            )
    return table


def _limits(limits: Mapping[str, Any]) -> Table:
    table = Table("The machine, measured", ("what", "rate"))
    table.rows.append(("copy in memory, bytes read and written", f"{limits['copy_bytes_per_second'] / 1e9:.4g} GB/s"))
    for dtype, rate in limits["flops_per_second"].items():
        table.rows.append((f"product of square matrices, {dtype}", f"{rate / 1e9:.4g} GFLOP/s"))
    return table
