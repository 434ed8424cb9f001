"""The native CPU kernels beside stock transformers, PyTorch and torch.compile, a verdict a row: `make bench-cpu`.

Everything of a row is measured in turns, and the shortest time of each counts: on a machine that others use, the
shortest is what the code takes. A processor with more than AVX2 also stands for plainer ones, each in a process of its
own: PyTorch's libraries are limited by their variables, ours by LAYOUT_KERNELS_CPU_LEVEL.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.cpu_models import model_rows
from benchmarks.cpu_operations import DTYPES, mlp_rows, norm_rows
from benchmarks.cpu_report import TITLES, line, profile, status, summary, write
from benchmarks.cpu_row import Row
from layout_kernels.benchmark.limits import Limits
from layout_kernels.benchmark.load import LoadPlugin
from layout_kernels.benchmark.memory import keep_freed_memory
from tools.build_variants import build
from tools.demo.models import use_local_build
from tools.project import ROOT

RESULTS = ROOT / "benchmarks" / "results"
NATIVE = "native"
GROUPS = ("norms", "mlp", "models")
EMULATED = {
    "as avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "LAYOUT_KERNELS_CPU_LEVEL": "avx512"},
    "as avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "LAYOUT_KERNELS_CPU_LEVEL": "avx2",
    },
}
# The instruction set that a processor must have to stand for a plainer one.
ABOVE = {"as avx512": "avx512_bf16", "as avx2": "avx512"}


def machines(levels: list[str]) -> list[str]:
    """What a processor with these instruction sets is measured as."""
    return [NATIVE, *(name for name, level in ABOVE.items() if level in levels)]


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """The rows of one machine, in this process. Where it stands for a plainer one, only what bf16 changes."""
    from layout_kernels.ops import native

    emulated = options.machine != NATIVE
    has_bf16 = native.level() == "avx512_bf16"
    machine = options.machine if emulated else native.level()
    names = [name for name in options.dtypes if name == "bf16" or not emulated]
    limits = Limits()
    for threads in options.threads:
        torch.set_num_threads(threads)
        if "norms" in options.groups and not emulated:
            yield from norm_rows(machine, options, names)
        if "mlp" in options.groups:
            yield from mlp_rows(machine, options, names, has_bf16, limits)
    if "models" in options.groups and "bf16" in names:
        yield from model_rows(machine, options, has_bf16, limits)


def in_process(machine: str, arguments: list[str]) -> list[Row]:
    """The rows of a process with the variables of one machine, which prints them as they come.

    Raises:
        CalledProcessError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.bench_cpu", *arguments, "--machine", machine, "--rows", str(path)]
        subprocess.run(command, cwd=ROOT, env={**os.environ, **EMULATED.get(machine, {})}, check=True)
        return [Row(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))]


def run_machine(options: argparse.Namespace) -> int:
    """Print the rows of this process's machine and write them for the process that started it."""
    keep_freed_memory("cpu")
    rows = []
    for row in measure(options):
        rows.append(row)
        print(line(row), flush=True)
    options.rows.write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")
    return 0


def run_all(options: argparse.Namespace, arguments: list[str]) -> int:
    """Every machine's rows, the report, and the exit status."""
    from layout_kernels.ops import native  # not at the top: it needs the extension, which the report does not

    reading, rows = LoadPlugin("cpu").start("cpu"), []
    print(f"| {' | '.join(TITLES)} |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if "models" in options.groups:
            build(Path(folder), backends=["cpu"])
            use_local_build(Path(folder))
        for machine in machines(native.levels()):
            rows += in_process(machine, arguments)
    print("\n".join(["", *profile(rows), "", summary(rows)]))
    output = options.output or (None if options.quick else RESULTS)
    if output is not None:
        write(rows, output.resolve(), LoadPlugin("cpu").stop(reading))
    return status(rows)


def main(arguments: list[str]) -> int:
    """Measure, write benchmarks/results/ and return 1 where a row misses its target."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_cpu", description=main.__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--seconds", type=float, default=0.5, help="for each row; slow calls take longer")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave torch.compile out")
    parser.add_argument("--quick", action="store_true", help="a few rows; written only where --output says so")
    parser.add_argument("--output", type=Path, help="folder of the results (default: benchmarks/results)")
    parser.add_argument("--machine", choices=[NATIVE, *EMULATED], help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    return run_machine(options) if options.machine else run_all(options, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
