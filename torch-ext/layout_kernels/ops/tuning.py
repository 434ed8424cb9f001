"""Which products are ours on this processor: measured on it once, before a model runs, and kept in a file.

Limits that were measured on one processor cannot speak for another. So `prepare` times our product beside PyTorch's
for each dtype at a few numbers of rows, in at most half a second, when the CPU is initialised, a load ends or a kernel
is applied: never in a forward. What it found is kept by processor, instruction set, threads and versions, and is read
from then on; where nothing was measured the shipped limits hold.

Either way computes the same up to rounding: sums are added in another order, so results differ in their last bits
between a machine that chose one way and one that chose the other. A table fixes the choice.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from .. import _ops
from .native import DTYPES, HALVES, direct, level, operators

VARIABLE = "LAYOUT_KERNELS_CPU_TUNING"
BUDGET = 0.36  # seconds for all dtypes; a call that has begun is finished
EVEN = 1.03  # ours is taken where PyTorch's is not faster by more: it needs no second form of the weight
BUSY = 0.1  # of the processors, by others: more spoils a measurement
LOOK = 0.06  # seconds of looking at the others before it begins
# Numbers of rows by their binary length: a choice holds for all numbers of one length. Measured at some of them.
LENGTHS = 11
POINTS = {1: 1, 3: 6, 5: 24, 7: 96, 9: 384}
# A weight that no cache holds for few rows, which read it once; a smaller one for many, which compute.
FEW, MANY = (2048, 2048), (576, 1536)


@dataclass(frozen=True)
class Table:
    """By dtype, for each binary length of a number of rows, whether our product runs."""

    ours: Mapping[str, tuple[bool, ...]]
    measured: float = 0.0  # seconds since the epoch
    note: str = ""


_tables: dict[tuple[str, int], Table] = {}

# Rows of the input up to which our product is the faster one; none where PyTorch has no instructions for the dtype.
# PyTorch's own rearrange the weight for each call, which pays off with many rows (benchmarks/results/), in bf16 from
# some hundred on. In fp32 Intel's library, which PyTorch calls, is behind ours at any number of rows on an AMD
# processor; elsewhere, or where that was not measured, ours takes the few rows that a rearranged weight cannot
# pay for. AMX multiplies several times as fast as our kernels can: only memory-bound products are ours beside it,
# which is reasoned too.
_NO_LIMIT = 1 << 62
_ROWS = {
    ("avx512_bf16", torch.bfloat16): 128,
    ("portable", torch.float32): 0,
    ("avx2", torch.float32): 64,
    ("avx512", torch.float32): 64,
    ("avx512_bf16", torch.float32): 64,
}
_AHEAD_ON_AMD = ("avx2", "avx512", "avx512_bf16")
_ROWS_BESIDE_AMX = 4
_CPUINFO = Path("/proc/cpuinfo")


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in _CPUINFO.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return False


def _beside_amx(dtype: torch.dtype) -> bool:
    name = {torch.bfloat16: "_is_amx_tile_supported", torch.float16: "_is_amx_fp16_supported"}.get(dtype)
    ask = getattr(torch.cpu, name, None) if name is not None else None
    return ask is not None and bool(ask())


_AMD = _is_amd()
_AMX = frozenset(dtype for dtype in HALVES if _beside_amx(dtype))


def is_shipped(rows: int, dtype: torch.dtype, at: str) -> bool:
    """Whether the shipped limits give a product of `rows` rows to the native kernels."""
    if dtype not in DTYPES:
        return False
    if dtype in _AMX:
        return rows <= _ROWS_BESIDE_AMX
    if _AMD and dtype is torch.float32 and at in _AHEAD_ON_AMD:
        return True
    return rows <= _ROWS.get((at, dtype), _NO_LIMIT)


def choice(dtype: torch.dtype, at: str, threads: int) -> tuple[bool, ...] | None:
    """The measured choices for a dtype, or None where the shipped limits hold."""
    table = _tables.get((at, threads))
    return None if table is None else table.ours.get(str(dtype).removeprefix("torch."))


def cache_file() -> Path | None:
    """Where tables are kept; None where tuning is off."""
    given = os.environ.get(VARIABLE, "")
    if given == "off":
        return None
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given) if given else Path(folder) / "layout-kernels" / "cpu-tuning.json"


def _key(at: str, threads: int) -> str:
    return " | ".join((_processor(), at, f"{threads} threads", f"torch {torch.__version__}", _ops.NAMESPACE))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def _kept(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read(file: Path, key: str) -> Table | None:
    entry: Any = _kept(file).get(key)
    try:
        ours = {str(name): tuple(bool(value) for value in row) for name, row in entry["ours"].items()}
        table = Table(ours, float(entry["measured"]), str(entry["note"]))
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
    return table if all(len(row) == LENGTHS + 1 for row in ours.values()) else None


def _write(file: Path, key: str, table: Table) -> None:
    """Keep a table beside those that are there; a folder that cannot be written to keeps none."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent, suffix=".json")
        with os.fdopen(descriptor, "w", encoding="utf-8") as sink:
            json.dump({**_kept(file), key: asdict(table)}, sink, indent=1)
        Path(name).replace(file)
    except OSError:
        pass


def prepare(measure: Callable[[str], Table] | None = None) -> Table | None:
    """Find or make the table for the present instruction set and number of threads.

    Args:
        measure: makes one, for tests.

    Returns:
        It, or None where tuning is off.
    """
    file = cache_file()
    if file is None:
        return None
    here = level(), torch.get_num_threads()
    if here not in _tables:
        key = _key(*here)
        table = _read(file, key)
        if table is None:
            table = (measure or _measure)(here[0])
            if not table.note:
                _write(file, key, table)
        _tables[here] = table
    return _tables[here]


def _measure(at: str) -> Table:
    begin, busy = time.perf_counter(), _busy_seconds()
    time.sleep(LOOK)
    if (others := _others(begin, busy)) <= BUSY:
        with torch.inference_mode():
            generator = torch.Generator().manual_seed(0)
            data = {shape: torch.randn(shape, generator=generator) for shape in (FEW, MANY)}
            rows = {str(dtype).removeprefix("torch."): _row(dtype, at, data) for dtype in DTYPES}
        others = _others(begin, busy)
    if others > BUSY:
        return Table(
            {}, time.time(), f"other processes took {others:.0%} of the processors while it was to be measured"
        )
    return Table({name: row for name, row in rows.items() if row}, time.time())


def _others(begin: float, busy: float) -> float:
    """The share of the processors that other processes have taken since."""
    return (_busy_seconds() - busy) / ((time.perf_counter() - begin) * (os.cpu_count() or 1))


def _row(dtype: torch.dtype, at: str, data: Mapping[Any, Any]) -> tuple[bool, ...]:
    """The choices for a dtype, from those that there was time to measure."""
    found: dict[int, bool] = {}
    begin = time.perf_counter()
    for length, rows in POINTS.items():
        if time.perf_counter() - begin > BUDGET / len(DTYPES):
            break
        weight = data[FEW if rows < POINTS[7] else MANY].to(dtype)
        ours, theirs = _times(weight, rows)
        found[length] = ours <= EVEN * theirs
    if not found:
        return ()
    return tuple(_choice_at(length, found, dtype, at) for length in range(LENGTHS + 1))


def _choice_at(length: int, found: Mapping[int, bool], dtype: torch.dtype, at: str) -> bool:
    """What was measured at this length, or on both sides of it; where these differ, or one is missing, as shipped."""
    below = max(point for point in found if point <= max(length, 1))
    above = min((point for point in found if point >= length), default=None)
    is_known = below == max(POINTS) if above is None else found[above] == found[below]
    return found[below] if is_known else is_shipped((3 << length) >> 2, dtype, at)


def _times(weight: Any, rows: int) -> tuple[float, float]:
    """The shortest of a few calls of our product and of PyTorch's, in turns. A wrong product is never the faster."""
    x = weight[:1].expand(rows, -1).contiguous()
    ways = (lambda: direct(operators.cpu_linear)(x, weight, None), lambda: functional.linear(x, weight))
    first, second = (way().float() for way in ways)
    if not torch.allclose(first, second, rtol=0.05, atol=0.05 * float(second.abs().max())):
        return float("inf"), 0.0
    best = [float("inf")] * 2
    begin = time.perf_counter()
    for _ in range(9):
        for number, way in enumerate(ways):
            start = time.perf_counter()
            way()
            best[number] = min(best[number], time.perf_counter() - start)
        if time.perf_counter() - begin > BUDGET / len(DTYPES) / (len(POINTS) + 1):
            break
    return best[0], best[1]


def _busy_seconds() -> float:
    """What other processes have computed since the machine started; 0 where the system does not say."""
    try:
        words = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    ticks = [int(word) for word in words[:8]]
    everyone = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
    own = os.times()
    return everyone - own.user - own.system


def describe() -> list[str]:
    """For `doctor`: up to how many rows our products run, and where that is from."""
    file = cache_file()
    if file is None:
        return [f"products: the shipped limits ({VARIABLE}=off)"]
    table = prepare()
    if table is None:
        return []
    if table.note:
        return [f"products: the shipped limits, since {table.note}"]
    age = time.time() - table.measured
    lines = [f"products: measured {age / 3600:.1f} hours ago, kept in {file}"]
    for name, row in table.ours.items():
        taken = [length for length in range(1, LENGTHS + 1) if row[length]]
        whole = taken == list(range(1, len(taken) + 1))
        spans = "none" if not taken else f"up to {(1 << len(taken)) - 1}" if whole else f"of {taken} binary digits"
        lines.append(f"  {name}: rows {'any' if len(taken) == LENGTHS else spans}")
    return lines
