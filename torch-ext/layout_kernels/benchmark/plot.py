"""Plots of measurements; that of a benchmark: rate against size, every implementation, and the machine's limit.

matplotlib is imported only when a plot is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..numerics.report import Report, ReportPlugin

_COLUMNS = 2
_WIDTH, _HEIGHT, _DPI = 9.0, 3.2, 100  # inches of the page and of a line of panels, dots an inch; fits a README
# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = "osD^vP"


def draw(path: Path, title: str, panels: Mapping[str, Callable[[Any], None]]) -> None:
    """Write a figure of panels, two side by side: by title, what draws on a panel's axes.

    Raises:
        ImportError: matplotlib is not installed; the message says how.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{path}: a plot needs matplotlib; pip install matplotlib, or leave it out") from error
    lines = max(1, -(-len(panels) // _COLUMNS))
    figure = Figure(figsize=(_WIDTH, _HEIGHT * lines + 0.5), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    for index, (name, panel) in enumerate(panels.items()):
        axes = figure.add_subplot(lines, _COLUMNS if len(panels) > 1 else 1, index + 1)
        panel(axes)
        axes.set_title(name, fontsize=11)
    figure.suptitle(title, fontsize=11)
    # The same measurements give the same file, whose text can be searched.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "layout_kernels"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def series(rows: Sequence[Mapping[str, Any]], work: str) -> dict[str, list[tuple[float, float]]]:
    """For each implementation its points (size, work a second on a cold cache), of valid measurements only."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if not (row.get("comparison") or {}).get("valid") or "size" not in row["metadata"]:
            continue
        for entry in row["beside"]:
            rate = (entry.get("rates") or {}).get(f"{work}_per_second")
            if rate is not None:
                found.setdefault(entry["implementation"], []).append((row["metadata"]["size"], rate["cold"]))
    return {name: sorted(points) for name, points in found.items()}


def limit(rows: Sequence[Mapping[str, Any]], work: str, limits: Mapping[str, Any]) -> list[tuple[float, float]]:
    """The machine's limit at each size: copying for bytes, the lower of copying and multiplying for operations."""
    points = []
    for row in rows:
        data = row["metadata"]
        if "size" not in data or work not in data:
            continue
        bandwidth = limits["copy_bytes_per_second"]
        rate = bandwidth
        if work == "flops":
            by_memory = bandwidth * data["flops"] / data["bytes"] if "bytes" in data else float("inf")
            rate = min(by_memory, limits["flops_per_second"].get(data.get("dtype"), float("inf")))
        points.append((data["size"], rate))
    return sorted(points)


def _work(rows: Sequence[Mapping[str, Any]]) -> str:
    """What a panel shows: operations where a suite counts them, else bytes."""
    return "flops" if any("flops" in row["metadata"] for row in rows) else "bytes"


def _panel(axes: Any, operation: str, rows: Sequence[Mapping[str, Any]], payload: Mapping[str, Any]) -> None:
    work = _work(rows)
    candidate = rows[0]["implementation"]
    lines = series(rows, work)
    for index, name in enumerate(sorted(lines, key=lambda name: (name != candidate, name))):
        sizes, rates = zip(*lines[name], strict=True)
        width = 2.2 if name == candidate else 1.2
        style = {"color": COLOURS[index % len(COLOURS)], "marker": _MARKERS[index % len(_MARKERS)]}
        label = name.removesuffix(f".{operation}")
        axes.plot(sizes, [rate / 1e9 for rate in rates], linewidth=width, markersize=4, label=label, **style)
    if payload["limits"]:
        edge = limit(rows, work, payload["limits"])
        sizes, rates = zip(*edge, strict=True)
        label = "limit: copy in memory" if work == "bytes" else "limit: memory or product"
        axes.plot(sizes, [rate / 1e9 for rate in rates], "k--", linewidth=1, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylabel("GB/s" if work == "bytes" else "GFLOP/s")
    axes.set_xlabel("elements of the input")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=8)


def write_plot(report: Report, path: Path) -> None:
    """Rate against size, a panel for each operation.

    Raises:
        ValueError: the report is no benchmark's, or has no valid measurement.
        ImportError: matplotlib is not installed; the message says how.
    """
    payload = report.payload
    if payload["kind"] != "benchmark":
        raise ValueError(f"{path}: a plot shows a benchmark; {payload['kind']} writes .json and .md")
    panels: dict[str, Callable[[Any], None]] = {}
    for operation in dict.fromkeys(row["operation"] for row in payload["cases"]):
        rows = [row for row in payload["cases"] if row["operation"] == operation and row.get("comparison")]
        if series(rows, _work(rows)):
            panels[operation] = partial(_panel, operation=operation, rows=rows, payload=payload)
    if not panels:
        raise ValueError(f"{path}: no measurement counts, so there is nothing to plot")
    surroundings = payload["environment"]
    where = (surroundings["accelerator"] or {}).get("name") or surroundings["processor"]
    threads = f", threads: {surroundings['threads']}" if surroundings["accelerator"] is None else ""
    draw(path, f"{where}{threads}, {payload['created'][:10]}, cold cache, higher is better", panels)


for _format in ("png", "svg"):
    ReportPlugin(_format).register()(write_plot)
