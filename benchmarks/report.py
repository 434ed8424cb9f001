"""The rows of the CPU benchmark as a table and a plot in benchmarks/results/."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import torch

RESULTS = Path(__file__).parent / "results"
BAR, LABEL, WIDTH = 14, 360, 900


@dataclass(frozen=True)
class Row:
    """One line of the table; times in microseconds."""

    machine: str
    threads: int
    case: str
    dtype: str
    stock: float
    best_other: float
    ours: float
    limit: str
    of_limit: float
    target: str
    met: bool

    @property
    def speedup(self) -> float:
        """Stock's time over ours."""
        return self.stock / self.ours


def line(row: Row) -> str:
    """A row of the Markdown table."""
    numbers = f"{row.stock:.1f} | {row.best_other:.1f} | {row.ours:.1f} | {row.speedup:.2f}"
    verdict = "met" if row.met else "MISSED"
    limit = f"{row.of_limit:.2f} of {row.limit}"
    what = f"{row.machine} | {row.threads} | {row.case} | {row.dtype}"
    return f"| {what} | {numbers} | {limit} | {row.target} | {verdict} |"


def write(rows: list[Row]) -> None:
    """The table and its summary, as Markdown and JSON, and the plot."""
    titles = ("machine", "threads", "case", "dtype", "stock us", "best other us", "ours us", "x stock", "of its limit")
    header = f"| {' | '.join((*titles, 'target', 'verdict'))} |"
    forward = [row for row in rows if row.case.startswith("rms_norm ") and "backward" not in row.case]
    ratios = [row.speedup for row in forward if row.dtype == "bf16"]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else float("nan")
    text = "\n".join(
        [
            f"# The native CPU kernels, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
            "",
            f"{_processor()}, torch {torch.__version__}, python {platform.python_version()}; load average at the end "
            f"{os.getloadavg()[0]:.1f}. `as avx512` stands for a processor without bf16 instructions.",
            "",
            f"{sum(row.met for row in rows)} of {len(rows)} rows met; geometric mean of rms_norm in bf16: "
            f"{mean:.1f} x stock (target 4).",
            "",
            header,
            "|" + " --- |" * header.count(" | ") + " --- |",
            *map(line, rows),
            "",
        ]
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "cpu.md").write_text(text, encoding="utf-8")
    (RESULTS / "cpu.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    bars = [(f"{row.case} {row.dtype}, {row.machine}, {row.threads} thr", row.speedup, row.met) for row in rows]
    (RESULTS / "cpu.svg").write_text(svg("Speed of the native CPU kernels over stock", bars), encoding="utf-8")
    print(text.splitlines()[4])


def _processor() -> str:
    for text in (
        Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else ()
    ):
        if text.startswith("model name"):
            return f"{text.partition(':')[2].strip()}, {os.cpu_count()} cores"
    return platform.processor() or platform.machine()


def svg(title: str, bars: list[tuple[str, float, bool]]) -> str:
    """Horizontal bars on a logarithmic axis from 1/2 on, with a line at 1; bars that missed their target are red."""
    largest = max([4.0, *(value for _, value, _ in bars)])
    scale = (WIDTH - LABEL - 60) / math.log2(largest * 2)
    one = LABEL + scale
    height = BAR * (len(bars) + 3)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="10">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LABEL}" y="{BAR}" font-size="13">{escape(title)}</text>',
    ]
    for index, (label, value, met) in enumerate(bars):
        y = BAR * (index + 2)
        length = max(1.0, scale * math.log2(max(value, 0.5) * 2))
        colour = "#3a7d44" if met else "#b23a48"
        parts += [
            f'<text x="{LABEL - 6}" y="{y + 10}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LABEL}" y="{y + 2}" width="{length:.1f}" height="{BAR - 4}" fill="{colour}"/>',
            f'<text x="{LABEL + length + 4:.1f}" y="{y + 10}">{value:.2f}</text>',
        ]
    parts.append(f'<line x1="{one:.1f}" y1="{BAR * 2}" x2="{one:.1f}" y2="{height}" stroke="black"/>')
    return "\n".join([*parts, "</svg>", ""])
