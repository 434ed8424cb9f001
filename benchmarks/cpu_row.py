"""One line of the CPU benchmark's table, and the rule of its verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

# "Never slower" allows for this much noise.
EQUAL = 0.97
# A row that cannot meet its target must come this near to what the machine allows.
NEAR = 0.8
MET, LIMIT, MISSED = "met", "limit", "MISSED"


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


def geometric_mean(rows: list[Row]) -> Row:
    """The norms' row: geometric means of the times, whose ratio is the geometric mean of the ratios; at least 4."""
    first = rows[0]
    what: dict[str, Any] = {"machine": first.machine, "threads": first.threads, "dtype": first.dtype}
    case = f"rms_norm, geometric mean of {len(rows)}"
    failed = [row.case for row in rows if not row.ours]
    if failed:
        return Row(**what, case=case, target="4 stock", wanted=4.0, failure=f"no time of {', '.join(failed)}")
    times: dict[str, Any] = {
        name: _mean([getattr(row, name) for row in rows]) for name in ("stock", "functional", "compiled", "ours")
    }
    required = times["stock"] / 4 if times["stock"] else None
    limit, work = _mean([row.limit_us for row in rows]), _mean([row.work for row in rows])
    return Row(**what, case=case, **times, required=required, target="4 stock", wanted=4.0, limit=first.limit,
               limit_us=limit, work=work or 0.0)  # fmt: skip


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value]
    return math.exp(sum(map(math.log, known)) / len(known)) if len(known) == len(values) else None
