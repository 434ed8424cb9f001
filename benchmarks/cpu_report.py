"""The rows of the CPU benchmark as a table with the profiles below it, and as JSON."""

from __future__ import annotations

import datetime
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.cpu_models import MEMORY_NOISE
from benchmarks.cpu_plot import write_plot
from benchmarks.cpu_row import EQUAL, LIMIT, MET, MISSED, NEAR, Row
from layout_kernels.benchmark.load import Load
from layout_kernels.numerics.environment import processor

TITLES = ("machine", "threads", "case", "dtype", "stock", "F", "compile", "ours", "x stock", "x best other",
          "of its limit", "target", "verdict")  # fmt: skip
REACHES = {
    "x.clone()": "x.clone() reaches",
    "bytes": "reading reaches",
    "fp32 operations": "fp32 products reach",
}
HEAD = f"""\
Times are the shortest of many in microseconds, measured in turns in one process, with one thread the thread's processor
time; the first quarter of a turn of several calls is not timed, since it finds in the caches what another turn left. A result is compared with stock's before it is timed, and a peer whose result is wrong has no time. `stock` is
transformers' modules, `F` the same written with `torch.nn.functional`, `compile` is `torch.compile` of stock, with static
shapes for the norms and any number of rows for the MLP. `as avx512` and `as avx2` are the same processor as one without
bf16 instructions and one without AVX-512: oneDNN, MKL, PyTorch and ours are limited to it.

- **of its limit**: the time that the limit allows over ours. Of a norm the limit is `x.clone()`, of the rest the bytes of
  the weights at the read bandwidth (of memory, or of a cache that holds them) or the operations at the rate of fp32
  products, whichever takes longer. Reading takes turns with the row's calls, products are measured before and after it. Far above 1 only where
  the processor multiplies bf16 itself. Of a model the limit is that of the weights of the layers that are ours and, on
  top, the time that the model spends outside of them (attention, the cache, Python), measured while they work.
- **verdict**: `met`; `limit` where the target is out of reach on this machine, since it asks for less time than the limit
  allows and none of the others reaches it, and ours is at {NEAR} of the limit or better; else `MISSED`, and only then the
  benchmark fails.
- "1 stock" and "best of the others" are "never slower", to {1 - EQUAL:.0%} of noise. A number in bold: one of the others is faster than ours by more.
- The C allocator keeps what is freed, for every contender, but in the processes of the model: else a large result gets
  fresh pages from the system at some calls and not at others.
- Peak memory, in MiB, is of a process that loads the model and answers, the lowest of several; {MEMORY_NOISE - 1:.0%} above stock
  is allowed, for noise and for the code that a process with kernels imports.
"""  # noqa: E501  a paragraph of Markdown


def line(row: Row) -> str:
    """A row of the Markdown table."""
    times = " | ".join(map(_number, (row.stock, row.functional, row.compiled, row.ours)))
    ratio, best = (_number(value, 2) for value in (row.speedup, row.over_best))
    if row.over_best and row.over_best < EQUAL:
        best = f"**{best}**"
    limit = f"{row.of_limit:.2f} of {row.limit}" if row.of_limit else "-"
    verdict = f"{row.verdict}: {_cell(row.failure)}" if row.failure else row.verdict
    what = f"{row.machine} | {row.threads} | {row.case} | {row.dtype}"
    return f"| {what} | {times} | {ratio} | {best} | {limit} | {row.target} | {verdict} |"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def needs(row: Row) -> str:
    """The rate that the target needs beside what the machine and each contender reach, all a thread."""
    if not row.limit or not row.limit_us or not row.required:
        return ""
    unit = "GFLOP/s" if row.limit == "fp32 operations" else "GB/s"

    def rate(time: float) -> str:
        left = time - row.rest
        return f"{row.work / left / 1e3 / row.threads:.1f}" if left > 0 else "without bound"

    # What stock takes for the rest is not known.
    stock = None if row.rest else row.stock
    contenders = {"ours": row.ours, "stock": stock, "F": row.functional, "compile": row.compiled}
    reached = ", ".join(f"{name} {rate(time)}" for name, time in contenders.items() if time)
    what = f"needs {rate(row.required)} {unit} a thread, {REACHES[row.limit]} {rate(row.limit_us)}, {reached}"
    if row.required < row.limit_us:
        what += f"; the target asks for {row.limit_us / row.required:.2f} times the limit"
    if row.rest:
        what += f"; beside {row.rest:.0f} us of the rest of the model"
    return what


def profile(rows: list[Row]) -> list[str]:
    """A line for each row that is not met: what the target needs, and where ours spends its time."""
    lines = []
    for row in rows:
        if row.verdict == MET:
            continue
        name = f"{row.machine}, {row.threads} thr, {row.case}, {row.dtype}"
        parts = [part for part in (row.failure, needs(row), row.profile) if part]
        if not parts:
            parts = [f"{_number(row.ours)} {row.unit}, allowed {_number(row.required)}"]
        lines.append(f"- {name}: **{row.verdict}**. {_cell('; '.join(parts))}.")
    return lines


def summary(rows: list[Row]) -> str:
    """How many rows of each verdict."""
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in (MET, LIMIT, MISSED)}
    return f"{len(rows)} rows: {counts[MET]} met, {counts[LIMIT]} at the machine's limit, {counts[MISSED]} missed."


def status(rows: list[Row]) -> int:
    """The exit status: 1 where a row missed its target, or where there is none."""
    return int(not rows or any(row.verdict == MISSED for row in rows))


def markdown(rows: list[Row], load: Load) -> str:
    """The whole report; `load` is what others did while it ran."""
    table = [f"| {' | '.join(TITLES)} |", f"|{' --- |' * len(TITLES)}", *map(line, rows)]
    others = "not known" if load.cpu_share is None else f"{load.cpu_share:.0%} of the CPUs"
    text = [
        f"# The native CPU kernels, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
        "",
        f"{processor()}, {os.cpu_count()} cores, torch {torch.__version__}, python {platform.python_version()}; "
        f"{load.seconds / 60:.0f} minutes, other processes meanwhile: {others}. {summary(rows)}",
        "",
        HEAD,
        *table,
    ]
    lines = profile(rows)
    if lines:
        text += ["", "## What the rows that are not met need, and where their time goes", "", *lines]
    return "\n".join([*text, ""])


def write(rows: list[Row], folder: Path, load: Load) -> None:
    """cpu.md, cpu.json and cpu.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.md").write_text(markdown(rows, load), encoding="utf-8")
    entries = [{**asdict(row), "verdict": row.verdict} for row in rows]
    (folder / "cpu.json").write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    write_plot(rows, folder / "cpu.svg")
