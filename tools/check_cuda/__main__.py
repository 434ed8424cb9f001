"""Command line of the check: `python -m tools.check_cuda`, or `make check-cuda`.

A second Triton is checked by naming a virtual environment that holds it and nothing else:

    python3 -m venv /some/where && /some/where/bin/pip install --no-deps triton==3.9.0
    make check-cuda TRITON=/some/where
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tools.check_cuda.calls import DTYPES, STRICT_WIDTH, Call, calls

if TYPE_CHECKING:
    from tools.check_cuda.compiling import Cost, Launch

CAPABILITIES = (80, 90, 100)
# Of a multiprocessor of each of them.
REGISTERS = 65536
SHOWN_WIDTHS = (128, 576, 4096)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.check_cuda", description=__doc__.splitlines()[0])
    parser.add_argument("--triton", type=Path, metavar="VENV", help="take Triton from this virtual environment")
    parser.add_argument("--part", choices=("compile", "move"), help="one part only; each runs in its own process")
    parser.add_argument("--all", action="store_true", help="print every line, not only one of each width and failures")
    return parser.parse_args(argv)


def _site(venv: Path) -> str:
    found = sorted(venv.glob("lib/python*/site-packages/triton"))
    if not found:
        raise SystemExit(f"{venv} holds no triton; make it with `python3 -m venv {venv}` and install triton --no-deps")
    return str(found[0].parent)


def _title(call: Call) -> str:
    return f"{call.name}, {call.dtype} {call.width}"


def _fault(call: Call, launch: Launch, costs: list[Cost]) -> str:
    threads = 32 * launch.options["num_warps"]
    # Registers are given out to a warp 8 a thread at a time; more than all of them, and the launch fails.
    if any(-(-cost.registers // 8) * 8 * threads > REGISTERS for cost in costs):
        return "  NEEDS MORE REGISTERS THAN THERE ARE"
    return "  SPILLS" if call.width <= STRICT_WIDTH and any(cost.spilled for cost in costs) else ""


def _compile(show_all: bool) -> int:
    from tools.check_cuda import compiling

    print("registers / spilled bytes / shared bytes for " + ", ".join(f"sm_{arch}" for arch in CAPABILITIES))
    failures, seen = 0, set()
    for call in calls():
        make = functools.partial(compiling.meta, DTYPES[call.dtype])
        for launch in compiling.launches(call.run(make, 4096)[1]):
            costs = [compiling.cost(launch, capability) for capability in CAPABILITIES]
            fault = _fault(call, launch, costs)
            failures += bool(fault)
            key = (launch.kernel.__name__, str(sorted(map(str, launch.options.items()))), call.dtype)
            if fault or show_all or key not in seen:
                numbers = "  ".join(f"{cost.registers:3}/{cost.spilled}/{cost.shared:<6}" for cost in costs)
                name = launch.kernel.__name__
                print(
                    f"{_title(call):54} {name:16} {launch.options['num_warps']:2} warps  {numbers}{fault}", flush=True
                )
            seen.add(key)
    print(f"compiled for {len(CAPABILITIES)} targets, Triton {compiling.VERSION}: {failures} faults")
    return failures


def _move(show_all: bool) -> int:
    from tools import triton_interpreter

    triton_interpreter.repair()
    from tools.check_cuda.moving import checked

    failures = 0
    for call, counted in checked(calls()):
        sums_due = (
            "backward" in call.name and not call.name.startswith("gated_activation") and "x only" not in call.name
        )
        bad = counted.rows != counted.least or (counted.sums > 0) != sums_due
        failures += bad
        if bad or show_all or call.width in SHOWN_WIDTHS:
            times = f"{counted.rows / counted.least:.2f} of the least, {counted.sums} bytes of sums"
            print(f"{_title(call):54} {times}{'  TOO MUCH' if bad else ''}", flush=True)
    print(f"bytes moved: {failures} calls move more than the least up to width {STRICT_WIDTH}")
    return failures


def _both(triton: Path | None, show_all: bool) -> int:
    environment = dict(os.environ)
    if triton is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (_site(triton), environment.get("PYTHONPATH"))))
    # What the release that is asked about does by default, said before it warns.
    environment.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    worst = 0
    for part, interpret in (("compile", "0"), ("move", "1")):
        command = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "tools.check_cuda", "--part", part]
        command += ["--all"] * show_all
        done = subprocess.run(command, env={**environment, "TRITON_INTERPRET": interpret}, check=False)
        worst = max(worst, abs(done.returncode))
    return worst


def main(argv: list[str] | None = None) -> int:
    """0 when nothing spills and nothing is moved twice."""
    arguments = _arguments(argv)
    if arguments.part is None:
        return _both(arguments.triton, arguments.all)
    import triton

    print(f"Triton {triton.__version__}, {arguments.part}")
    failures = _compile(arguments.all) if arguments.part == "compile" else _move(arguments.all)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
