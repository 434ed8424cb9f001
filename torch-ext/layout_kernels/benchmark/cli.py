"""`python -m layout_kernels.benchmark`: prove implementations, then time them."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields

from ..numerics.arguments import Request, positive, read
from ..numerics.catalog import suites as all_suites
from ..numerics.cli import finish, go_through, planned, selection
from ..numerics.environment import environment
from ..numerics.modes import CaptureError, check_target, current_device
from ..numerics.report import Report, coverage, is_success, new_payload
from ..numerics.suite import OperationSuite
from . import plot  # noqa: F401, registers its formats
from .limits import last_level_cache, machine_limits
from .measure import Settings
from .memory import keep_freed_memory
from .report import tables
from .session import Session

DESCRIPTION = "Prove implementations, then time what passed: baseline, candidate, baseline, on warm and cold caches."


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, not {text}")
    return value


def _duration(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0 on, not {text}")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that this command has and the other has not."""
    parser.add_argument("--iterations", type=positive, default=5, metavar="N", help="samples of a turn (default: 5)")
    parser.add_argument(
        "--repeats",
        type=positive,
        default=10,
        metavar="N",
        help="rounds, at least: baseline, others, baseline, others (default: 10)",
    )
    parser.add_argument(
        "--seconds", type=_duration, default=4.0, metavar="S", help="of rounds for a case, at least (default: 4)"
    )
    parser.add_argument(
        "--baseline", default="reference", metavar="NAME", help="what to compare with, as --implementation"
    )
    parser.add_argument("--peers", action="store_true", help="time every other implementation and torch's own beside")
    parser.add_argument(
        "--drift-limit", type=_share, default=0.05, metavar="SHARE", help="of the baseline's own time (default: 0.05)"
    )
    parser.add_argument(
        "--load-limit", type=_share, default=0.05, metavar="SHARE", help="of the CPUs, by others (default: 0.05)"
    )
    parser.add_argument(
        "--attempts", type=positive, default=10, metavar="N", help="tries where something disturbs (default: 10)"
    )
    # A suite that tells real sizes from those that look for faults takes the real ones here.
    parser.set_defaults(cases="grid")


def _settings(common: argparse.Namespace) -> Settings:
    asked = {field.name: getattr(common, field.name) for field in fields(Settings) if hasattr(common, field.name)}
    return Settings(**asked, cache_bytes=2 * last_level_cache(common.device))


def run(request: Request) -> tuple[Report, BaseException | None]:
    """Prove and time every case of a request; the report, and the capture failure or interrupt that ended it early.

    Raises:
        ValueError: options that do not fit together.
    """
    common = request.common
    work = planned(request)
    settings = _settings(common)
    session = Session(common.baseline, common.mode, common.peers, settings)
    for suite, _ in request.suites:
        session.check(suite)
    described = {"mode": common.mode, "baseline": common.baseline, "peers": common.peers, **vars(settings)}
    described["freed_memory_kept"] = keep_freed_memory(common.device)
    payload = new_payload("benchmark", request.command, common.revision, environment(common.device), described)
    plans = {suite.operation: plan for suite, plan, _, _ in work}
    payload["selection"] = [selection(operation, "candidate", plan) for operation, plan in plans.items()]
    payload["selection"] += [
        selection(suite.operation, "baseline", session.baseline(suite)) for suite, _ in request.suites
    ]
    payload["cases"] = [{**row, "comparison": None, "beside": []} for *_, row in work]

    def prove_and_time(index: int) -> CaptureError | None:
        payload["cases"][index], error = session.run_case(*work[index][:3])
        return error

    stopped = go_through(work, prove_and_time, payload)
    dtypes = [row["metadata"]["dtype"] for row in payload["cases"] if "dtype" in row["metadata"]]
    payload["limits"] = machine_limits(common.device, dtypes) if stopped is None else None
    payload["coverage"] = coverage(payload["cases"])
    payload["invalid"] = sum(
        row.get("comparison") is not None and not row["comparison"]["valid"] for row in payload["cases"]
    )
    payload["success"] = is_success(payload["coverage"]) and payload["invalid"] == 0
    if payload["invalid"]:
        payload["error"] = payload["error"] or f"{payload['invalid']} timings do not count"
    return Report(payload, tables(payload)), stopped


def main(argv: Sequence[str] | None = None, suites: Mapping[str, OperationSuite] | None = None) -> int:
    """The command; returns its exit status: 0 proven and timed, 1 not, 2 cannot be done.

    Args:
        argv: its words; None: those of the process.
        suites: what can be timed; None: every operation of the package.

    Raises:
        SystemExit: help, or options that do not parse.
        CaptureError: a call could not be compiled or captured; the report is written before.
        KeyboardInterrupt: somebody interrupted it; the report of what was done is written before.
    """
    prog = "python -m layout_kernels.benchmark"
    known = all_suites() if suites is None else suites
    request = read(argv, known, prog=prog, description=DESCRIPTION, own=add_arguments)
    try:
        check_target(request.common.mode, request.common.device)
        with current_device(request.common.device):
            report, stopped = run(request)
    except ValueError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 2
    return finish(report, request, stopped)
