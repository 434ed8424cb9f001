"""One line of the CPU benchmark's table, and the rule of its verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import geometric_mean as mean_of
from typing import Any

import torch

from layout_kernels.benchmark.limits import Limit

# "Never slower" allows for this much noise.
EQUAL = 0.97
# A row that cannot meet its target must come this near to what the machine allows.
NEAR = 0.8
MET, LIMIT, MISSED = "met", "limit", "MISSED"
# The fields of the contenders' times, and what a call is named.
COLUMNS = {"stock": "stock", "functional": "F", "compiled": "compile", "ours": "ours"}


@dataclass(frozen=True)
class Row:
    """Times in microseconds, or another unit, of one case; None where nothing was measured.

    Attributes:
        machine: the instruction set of the kernels; "as ..." where a better processor stands for a plainer one.
        threads: how many.
        case: what is measured, for example "rms_norm_mlp 576/1536 rows 8".
        dtype: bf16, fp16 or fp32.
        stock: transformers' modules.
        functional: `torch.nn.functional`.
        compiled: `torch.compile` of stock.
        ours: this package.
        required: the largest `ours` that meets every target of the row.
        target: the targets in words.
        wanted: the target as a factor over stock; None where the row has no such target.
        limit: what bounds the case: "x.clone()", "bytes" or "fp32 operations"; empty where nothing does.
        limit_us: the time that the limit allows, measured beside the row.
        rest: the part of `limit_us` that is not work of the layers that are ours: what is spent outside of them.
        work: bytes or operations of the case, of the kind that `limit` names.
        profile: where the time goes, for a row that is not met.
        failure: why there is no time of ours.
        unit: of stock to required.
    """

    machine: str
    threads: int
    case: str
    dtype: str
    stock: float | None = None
    functional: float | None = None
    compiled: float | None = None
    ours: float | None = None
    required: float | None = None
    target: str = ""
    wanted: float | None = None
    limit: str = ""
    limit_us: float | None = None
    rest: float = 0.0
    work: float = 0.0
    profile: str = ""
    failure: str = ""
    unit: str = "us"

    @classmethod
    def of(cls, machine: str, case: str, dtype: str) -> Row:
        """The row of a case with as many threads as torch has now, before anything is measured."""
        return cls(machine, torch.get_num_threads(), case, dtype)

    def timed(self, found: dict[str, float], required: float, target: str, **fields: Any) -> Row:
        """The row with the times of its contenders."""
        times = {name: found.get(key) for name, key in COLUMNS.items()}
        return replace(self, **times, required=required, target=target, **fields)

    @property
    def speedup(self) -> float | None:
        """Stock's time over ours."""
        return self.stock / self.ours if self.stock and self.ours else None

    @property
    def over_best(self) -> float | None:
        """The best of the others' times over ours."""
        others = [time for time in (self.stock, self.functional, self.compiled) if time]
        return min(others) / self.ours if others and self.ours else None

    @property
    def of_limit(self) -> float | None:
        """The time that the limit allows over ours; above 1 where a cache holds what the limit reads from memory."""
        return self.limit_us / self.ours if self.limit_us and self.ours else None

    @property
    def verdict(self) -> str:
        """`met`; `limit` where the target is out of the machine's reach and ours is near that; else `MISSED`.

        A target that one of the others reaches is not out of reach, whatever was measured as the limit.
        """
        if self.failure or not self.ours or not self.required:
            return MISSED
        if self.ours <= self.required:
            return MET
        others = [time for time in (self.stock, self.functional, self.compiled) if time]
        reach = min([self.limit_us or 0.0, *others])
        return LIMIT if self.required < reach and (self.of_limit or 0.0) >= NEAR else MISSED


def bound(limit: Limit, nbytes: float, operations: float) -> dict[str, Any]:
    """The fields of a row that say what bounds work of this size."""
    what, seconds, work = limit.of(nbytes, operations)
    return {"limit": what, "limit_us": seconds * 1e6, "work": work}


def geometric_mean(rows: list[Row]) -> Row:
    """The norms' row: geometric means of the times, whose ratio is the geometric mean of the ratios; at least 4."""
    first = rows[0]
    row = Row(first.machine, first.threads, f"rms_norm, geometric mean of {len(rows)}", first.dtype,
              target="4 stock", wanted=4.0)  # fmt: skip
    failed = [row.case for row in rows if not row.ours]
    if failed:
        return replace(row, failure=f"no time of {', '.join(failed)}")
    means: dict[str, Any] = {}
    for name in (*COLUMNS, "limit_us", "work"):
        known = [getattr(row, name) for row in rows if getattr(row, name)]
        means[name] = mean_of(known) if len(known) == len(rows) else None
    means["work"] = means["work"] or 0.0
    return replace(row, **means, required=means["stock"] / 4 if means["stock"] else None, limit=first.limit)
