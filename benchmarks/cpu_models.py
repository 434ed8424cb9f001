"""The benchmark's rows of SmolLM2-135M: prefill, decode and peak memory, each variant in a process of its own.

The processes live side by side and are measured in turns, so that a slow minute hits all of them; the shortest time
and the lowest peak of several sets of processes count. Tokens are compared, as the demo does, before any speed counts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.cpu_row import EQUAL, MET, Row, bound
from benchmarks.model_process import KINDS, PREFILL, Process
from layout_kernels.benchmark.limits import Limit, Limits
from layout_kernels.benchmark.turns import in_turns
from tools.make_checkpoint import ensure_checkpoint

NAME = "SmolLM2-135M"
STOCK, OURS = KINDS[0], KINDS[1:]
# Speed over stock, without and with Linear.
TARGETS = {"prefill": dict(zip(OURS, (1.8, 5.0), strict=True)), "decode": dict(zip(OURS, (1.4, 2.5), strict=True))}
CASES = {"prefill": f"prefill {PREFILL}", "decode": "decode"}
# Peaks of the same load differ by some tenths of a percent; `kernels` and this package add 1 % of code to 700 MiB.
MEMORY_NOISE = 1.02
STEPS, LEAST_ROUNDS = 8, 2
Key = tuple[int, str, str]  # threads, prefill or decode, kind


@dataclass
class Findings:
    """What was measured of one machine: times in microseconds, peaks in MiB."""

    times: dict[Key, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    limits: dict[int, Limit] = field(default_factory=dict)
    rests: dict[Key, float] = field(default_factory=dict)
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)
    profiles: dict[Key, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)

    def speed_row(self, machine: str, key: Key, native_bf16: bool) -> Row:
        """The row of prefill or decode. A variant whose tokens differ has no time."""
        threads, what, kind = key
        wanted = 1.0 if native_bf16 else TARGETS[what][kind]
        row = Row(machine, threads, f"{NAME} {CASES[what]}, {kind}", "bf16", target=f"{wanted:g} stock", wanted=wanted)
        if kind in self.wrong:
            return replace(row, failure=self.wrong[kind])
        stock = self.times[threads, what, STOCK]
        tokens = PREFILL if what == "prefill" else 1
        sizes, rest = self.sizes[kind], self.rests[key]
        # The output layer sees the last position only.
        operations = 2 * (sizes["layers"] * tokens + sizes["head"])
        least = bound(self.limits[threads], 2 * (sizes["layers"] + sizes["head"]), operations)
        least |= {"limit_us": least["limit_us"] + rest, "rest": rest}
        required = stock / (wanted if wanted > 1 else EQUAL)
        found = {"stock": stock, "ours": self.times[key]}
        return row.timed(found, required, row.target, profile=self.profiles.get(key, ""), **least)

    def memory_row(self, machine: str, threads: int, kind: str) -> Row:
        """The row of the peak of memory."""
        row = Row(machine, threads, f"{NAME} peak memory, {kind}", "bf16", unit="MiB",
                  target=f"stock + {MEMORY_NOISE - 1:.0%}")  # fmt: skip
        if kind in self.wrong:
            return replace(row, failure=self.wrong[kind])
        stock = self.peaks[STOCK]
        return replace(row, stock=stock, ours=self.peaks[kind], required=stock * MEMORY_NOISE)


def model_rows(machine: str, options: argparse.Namespace, native_bf16: bool, limits: Limits) -> Iterator[Row]:
    """The rows of one machine, for every number of threads. Where the model cannot be run each of them says why."""
    findings, most = Findings(), max(options.threads)
    keys = [(threads, what, kind) for threads in options.threads for what in CASES for kind in OURS]
    try:
        checkpoint = ensure_checkpoint()
        for last in (True,) if options.quick else (False, True):
            with ExitStack() as stack:
                processes = [stack.enter_context(Process(kind, checkpoint, most)) for kind in KINDS]
                _measure_set(findings, processes, options, limits)
                if last:
                    _profile(
                        findings, processes, [findings.speed_row(machine, key, native_bf16) for key in keys], keys
                    )
    except (RuntimeError, OSError) as error:
        findings.wrong = dict.fromkeys(OURS, " ".join(str(error).split()))
    yield from (findings.speed_row(machine, key, native_bf16) for key in keys)
    yield from (findings.memory_row(machine, most, kind) for kind in OURS)


def _measure_set(findings: Findings, processes: list[Process], options: argparse.Namespace, limits: Limits) -> None:
    """Measure fresh processes of each variant in turns."""
    for process in processes:
        findings.peaks[process.kind] = min(
            process.answer()["peak_mib"], findings.peaks.get(process.kind, float("inf"))
        )
    if not findings.sizes:
        findings.sizes = {process.kind: process.ask("sizes") for process in processes}
        _compare(findings, processes)
    right = [process for process in processes if process.kind not in findings.wrong]
    for threads in options.threads:
        _measure_turns(findings, right, threads, 8 * options.seconds, limits)


def _compare(findings: Findings, processes: list[Process]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.pt"
        processes[0].ask(f"write_trace {path}")
        for process in processes[1:]:
            found = process.ask(f"compare_trace {path}")
            if found["equal"] != found["total"]:
                differ = f"{found['total'] - found['equal']} of {found['total']}"
                findings.wrong[process.kind] = f"tokens differ at {differ} positions; no speed counts"


def _measure_turns(findings: Findings, processes: list[Process], threads: int, seconds: float, limits: Limits) -> None:
    torch.set_num_threads(threads)
    for process in processes:
        process.ask(f"threads {threads}")
        process.ask("prefill")

    def measure(_: object) -> dict[str, float]:
        taken = in_turns([partial(process.ask, f"turn {STEPS}") for process in processes], LEAST_ROUNDS, seconds)
        for process, turns in zip(processes, taken, strict=True):
            for kept, name in ((findings.times, "times"), (findings.rests, "rests")):
                for what in turns[0][name]:
                    key = (threads, what, process.kind)
                    kept[key] = min(kept.get(key, float("inf")), *(turn[name][what] for turn in turns))
        return {}

    _, limit = limits.around(measure, sys.maxsize)
    best = findings.limits.get(threads, limit)
    findings.limits[threads] = Limit(max(best.bandwidth, limit.bandwidth), max(best.rate, limit.rate))


def _profile(findings: Findings, processes: list[Process], rows: list[Row], keys: list[Key]) -> None:
    """The operators that take most of each row that is not met, by torch.profiler."""
    for key, row in zip(keys, rows, strict=True):
        threads, what, kind = key
        if row.failure or row.verdict == MET:
            continue
        (process,) = (process for process in processes if process.kind == kind)
        process.ask(f"threads {threads}")
        parts = process.ask(f"profile {what}")
        findings.profiles[key] = ", ".join(f"{_operator(name)} {share:.0%}" for name, share in parts)


def _operator(name: str) -> str:
    return "attention" if "scaled_dot_product" in name else name.split("::")[-1]
