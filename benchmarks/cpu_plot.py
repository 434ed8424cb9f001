"""The plot of the CPU benchmark: speed over stock, a panel for each group of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cpu_row import Row
from layout_kernels.benchmark.plot import COLOURS, draw

STYLES = {"color": "black", "linewidth": 1, "linestyle": ":"}
MLP, MODEL, NORM = "rms_norm_mlp ", "SmolLM2-135M ", "rms_norm"


def panels(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows that have a speed, by panel."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if not row.speedup:
            continue
        if row.case.startswith(MLP):
            title = f"norm + MLP, {row.dtype}, {row.machine}"
        elif row.case.startswith(MODEL):
            title = f"SmolLM2-135M, bf16, {row.threads} thr"
        else:
            title = f"RMSNorm, {row.threads} thr"
        if row.unit == "us":
            found.setdefault(title, []).append(row)
    kinds = ("RMSNorm", "norm + MLP", "SmolLM2")
    return dict(sorted(found.items(), key=lambda item: [item[0].startswith(kind) for kind in kinds], reverse=True))


def write_plot(rows: list[Row], path: Path) -> None:
    """Draw all panels into one file."""
    drawn = {title: partial(_panel, rows=members) for title, members in panels(rows).items()}
    draw(path, "Speed over stock transformers (1 = as fast), dotted: target", drawn)


def _panel(axes: Any, rows: list[Row]) -> None:
    if rows[0].case.startswith(MLP):
        _mlp(axes, rows)
    elif rows[0].case.startswith(MODEL):
        _bars(axes, rows, _variant, "machine")
    else:
        _bars(axes, rows, _short, "dtype")
    axes.set_yscale("log", base=2)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.8), max(high * 1.15, 2.5))
    ticks = [
        tick for tick in (0.25, 0.5, 1, 2, 3, 5, 10, 20, 50, 100) if axes.get_ylim()[0] <= tick <= axes.get_ylim()[1]
    ]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.axhline(1, color="black", linewidth=0.8)
    axes.grid(True, axis="y", alpha=0.25)
    axes.tick_params(labelsize=8)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, ncols=2)


def _mlp(axes: Any, rows: list[Row]) -> None:
    """Lines by size over the rows of x; dashed with one thread."""
    points: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        points.setdefault((row.case.split()[1], row.threads), []).append(row)
    sizes = list(dict.fromkeys(size for size, _ in points))
    counts = sorted({_rows(row) for row in rows})
    targets = {_rows(row): row.wanted for row in rows if row.wanted}
    for (size, threads), members in points.items():
        style = {"color": COLOURS[sizes.index(size) % len(COLOURS)], "linestyle": "--" if threads == 1 else "-"}
        xs = [counts.index(_rows(row)) for row in members]
        axes.plot(xs, [row.speedup for row in members], marker="o", markersize=3, linewidth=1.3,
                  label=f"{size}, {threads} thr", **style)  # fmt: skip
    axes.plot([counts.index(count) for count in targets], list(targets.values()), **STYLES)
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    axes.set_xlabel("rows", fontsize=8)


def _rows(row: Row) -> int:
    return int(row.case.split()[-1])


def _bars(axes: Any, rows: list[Row], name_of: Callable[[str], str], group_of: str) -> None:
    """Bars for each case, in the colour of their group."""
    names = list(dict.fromkeys(name_of(row.case) for row in rows))
    groups = list(dict.fromkeys(getattr(row, group_of) for row in rows))
    width = 0.8 / len(groups)
    for index, group in enumerate(groups):
        members = [row for row in rows if getattr(row, group_of) == group]
        left = [names.index(name_of(row.case)) - 0.4 + index * width for row in members]
        heights = [row.speedup for row in members]
        axes.bar(left, heights, width, align="edge", color=COLOURS[index % len(COLOURS)], label=group)
        for start, row in zip(left, members, strict=True):
            if row.wanted:
                axes.plot([start, start + width], [row.wanted] * 2, **{**STYLES, "linewidth": 1.6})
    axes.set_xticks(range(len(names)), names)


def _short(case: str) -> str:
    text = case.removeprefix(NORM).strip(", ")
    for long, short in (("geometric mean", "mean\n"), ("backward ", "back\n"), ("q_norm view ", "q_norm\n")):
        if text.startswith(long):
            return short + (text.removeprefix(long) if long != "geometric mean" else "")
    return text.replace("x", "\nx")


def _variant(case: str) -> str:
    what, kind = case.removeprefix(MODEL).split(", ", 1)
    return f"{what}\n{kind.replace('norm + fusion', 'fusion')}"
