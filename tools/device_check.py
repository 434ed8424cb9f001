"""Proves and times the Triton kernels on a GPU: one command of at most eight minutes, one report.

    python tools/device_check.py --output benchmarks/results/h100

It needs torch and Triton, and takes transformers and Liger into the comparison where they are installed; nothing is
built or installed first. First the numerics of every operation, in eager mode and as CUDA graphs; then the kernels
beside stock transformers, `F.rms_norm`, torch.compile and Liger, each result checked before it is timed. What does not
fit into the time is listed as such. Exit status: 0 all right, 1 a result is wrong or a target missed, 2 no GPU.

    TRITON_INTERPRET=1 python tools/device_check.py --interpret --output tried

runs the script itself on small cases without a GPU; its times mean nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import tools  # noqa: F401, which adds the package of this tree


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/device_check.py", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="where the report is written")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which nothing new is begun (default: 8)")
    parser.add_argument("--interpret", action="store_true", help="try the script without a GPU, on small cases")
    return parser.parse_args(argv)


def _numerics(folder: Path, end: float) -> dict[str, str]:
    """How the numerics of each mode ended; each runs in a process of its own, since a device is bound once."""
    from tools.npu_check import check, in_a_process

    def run(command: str, words: list[str]) -> int:
        return in_a_process(command, words, max(1.0, (end - time.monotonic()) / 2))

    steps = check(("eager", "cudagraph"), folder, run, device="cuda", commands=("numerics",))
    return {step.mode: step.reason or step.status for step in steps}


def _tried() -> dict[str, str]:
    """In place of the numerics while interpreting: a case of each operation."""
    from importlib import import_module

    from tools import triton_interpreter

    triton_interpreter.repair()
    found = {}
    for operation in ("rms_norm", "gated_activation", "gated_rms_norm", "rms_norm_mlp"):
        suite = import_module(f"layout_kernels.numerics.{operation}")
        kernel = getattr(import_module(f"layout_kernels.ops.{operation}.triton"), operation)
        arguments = suite.arguments(suite.CASES[1])
        found[operation] = suite.compare(kernel(*arguments), arguments) or "passed"
    return found


def _check(arguments: argparse.Namespace, end: float) -> int:
    import torch

    arguments.output.mkdir(parents=True, exist_ok=True)
    numerics = _tried() if arguments.interpret else _numerics(arguments.output, end)
    print(f"numerics: {numerics}", flush=True)

    from layout_kernels.benchmark.limits import machine_limits
    from layout_kernels.benchmark.load import LoadPlugin
    from layout_kernels.benchmark.turns import LIMIT
    from layout_kernels.numerics.environment import environment
    from layout_kernels.numerics.report import coverage, new_payload, verdict
    from tools.device import measuring, report

    plan = measuring.SMALL if arguments.interpret else measuring.FULL
    watch = LoadPlugin(plan.device)
    reading = watch.start(plan.device)
    cases = chain(measuring.norm_cases(plan), measuring.mlp_cases(plan))
    rows = [_shown(case.measure(plan.device, end)) for case in cases]
    name = "interpreted on a CPU" if arguments.interpret else torch.cuda.get_device_name()
    payload = new_payload("device_check", sys.argv, None, environment(plan.device), {"minutes": arguments.minutes})
    payload |= {
        "device": name,
        "numerics": numerics,
        "disturbance": watch.stop(reading).disturbance(LIMIT),
        "copy_bytes_per_second": machine_limits(plan.device, ())["copy_bytes_per_second"],
        "peak_bytes_per_second": report.peak_bandwidth(name),
        "verdicts": [] if arguments.interpret else report.verdicts(rows, report.peak_bandwidth(name)),
        "coverage": coverage(map(vars, rows)),
    }
    wrong = sum(row.contender in ("layout-kernels", "composed") and row.status == "failed" for row in rows)
    missed = sum(not item["met"] for item in payload["verdicts"])
    failed = sum(how != "passed" for how in numerics.values())
    payload["success"] = not (wrong or missed or failed)
    payload["error"] = f"{wrong} of ours failed, {missed} targets missed, {failed} numerics failed"
    print("\n".join([*report.write(arguments.output, payload, rows), verdict(payload)]))
    return 0 if payload["success"] else 1


def _shown(row: Any) -> Any:
    took = f"{row.seconds * 1e6:.1f} us" if row.seconds else row.reason
    print(f"{row.kind:20} {row.problem:6} {row.contender:30} {took}", flush=True)
    return row


def main(argv: list[str] | None = None) -> int:
    """0 all right, 1 wrong or missed, 2 no GPU."""
    arguments = _arguments(argv)
    end = time.monotonic() + 60 * arguments.minutes
    import torch

    if arguments.interpret and os.environ.get("TRITON_INTERPRET") != "1":
        print("set TRITON_INTERPRET=1: Triton reads it when it is imported")
        return 2
    if not arguments.interpret and not torch.cuda.is_available():
        print("no CUDA device; --interpret tries the script without one")
        return 2
    return _check(arguments, end)


if __name__ == "__main__":
    sys.exit(main())
