"""`python -m layout_kernels.numerics`: prove implementations."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..dispatch import PreparedKernel
from ..dispatch.catalog import discover
from .arguments import Request, read
from .catalog import suites as all_suites
from .environment import environment
from .modes import CaptureError, check_target, current_device
from .preparation import check_override
from .progress import Progress
from .report import Report, Table, coverage, is_success, new_payload, verdict, write_reports
from .suite import FAILED, NOT_APPLICABLE, PASSED, KernelCase, OperationSuite
from .verify import new_row, verify_case

DESCRIPTION = "Prove implementations: values, structure, memory, changed inputs, in the mode that they will run in."


def _nothing(parser: argparse.ArgumentParser) -> None:
    """This command has no options of its own."""


def selection(operation: str, role: str, plan: PreparedKernel) -> dict[str, Any]:
    """The entry of a report that says which implementation was taken for what, and what was left out."""
    return {
        "operation": operation,
        "role": role,
        "implementation": plan.spec.name,
        "solution": plan.spec.solution,
        "input_domain": plan.spec.input_domain,
        "contract_version": plan.spec.contract.version,
        "numerical_mode": plan.spec.contract.numerical_mode,
        "excluded": dict(plan.excluded),
    }


def planned(request: Request) -> list[tuple[OperationSuite, PreparedKernel, KernelCase, dict[str, Any]]]:
    """Every case with its implementation and its row, before anything runs.

    Raises:
        ValueError: options that do not fit together, or no implementation that fits them.
    """
    common = request.common
    work = []
    for suite, options in request.suites:
        if common.implementation is not None and suite.operation in discover():
            check_override(suite.operation, common.device, common.mode, common.implementation)
        plan = suite.prepare(common.device, common.mode, common.implementation)
        for case in suite.cases(options):
            work.append((suite, plan, case, new_row(suite.operation, case, plan)))
    return work


def run(request: Request) -> tuple[Report, BaseException | None]:
    """Prove every case of a request; the report, and the capture failure or interrupt that ended it early."""
    common = request.common
    work = planned(request)
    settings = {"device": common.device, "mode": common.mode, "warmup": common.warmup}
    payload = new_payload("numerics", request.command, common.revision, environment(common.device), settings)
    plans = {suite.operation: plan for suite, plan, _, _ in work}
    payload["selection"] = [selection(operation, "candidate", plan) for operation, plan in plans.items()]
    payload["cases"] = [row for *_, row in work]

    def prove(index: int) -> CaptureError | None:
        suite, plan, case, _ = work[index]
        outcome = verify_case(
            suite.operation, case, plan, device=common.device, mode=common.mode, warmup=common.warmup
        )
        payload["cases"][index] = outcome.row
        return outcome.error

    stopped = go_through(work, prove, payload)
    payload["coverage"] = coverage(payload["cases"])
    payload["success"] = is_success(payload["coverage"])
    return Report(payload, tables(payload)), stopped


def go_through(
    work: Sequence[tuple[OperationSuite, PreparedKernel, KernelCase, dict[str, Any]]],
    step: Callable[[int], CaptureError | None],
    payload: dict[str, Any],
) -> BaseException | None:
    """Do a step for each case, with a progress bar.

    Args:
        work: see `planned`.
        step: given a case's index, does its part; returns a capture failure, which ends the run.
        payload: its `error` says what ended the run early.

    Returns:
        what ended the run early, to be raised once what was found until then is written: a capture failure, or that
        somebody interrupted it.
    """
    with Progress(len(work)) as progress:
        for index, (suite, _, case, _) in enumerate(work):
            progress.say(f"{suite.operation} {case.case_id}")
            stopped: BaseException | None
            try:
                stopped = step(index)
            except KeyboardInterrupt as interrupt:
                stopped = interrupt
            if stopped is not None:
                payload["error"] = f"{case.case_id}: {stopped if str(stopped) else 'interrupted'}"
                return stopped
            progress.step()
    return None


def tables(payload: Mapping[str, Any]) -> list[Table]:
    """The counts of each operation, then what failed and what did not apply."""
    counts = Table("Cases", ("operation", "implementation", PASSED, FAILED, "not applicable", "not run"))
    for item in payload["selection"]:
        rows = [row for row in payload["cases"] if row["operation"] == item["operation"]]
        counts.rows.append((item["operation"], item["implementation"], *map(str, coverage(rows).values())))
    found = [counts]
    for status, title in ((FAILED, "Failed"), (NOT_APPLICABLE, "Not applicable")):
        rows = [row for row in payload["cases"] if row["status"] == status]
        if rows:
            lines = [(row["operation"], row["implementation"], row["case_id"], row["reason"] or "") for row in rows]
            found.append(Table(title, ("operation", "implementation", "case", "reason"), list(lines)))
    return found


def show(report: Report) -> None:
    """Print what a report found, in columns."""
    for table in report.tables:
        rows = [tuple(table.header), *map(tuple, table.rows)]
        widths = [max(len(str(row[column])) for row in rows) for column in range(len(table.header))]
        print(f"\n{table.title}")
        for row in rows:
            print("  " + "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"\n{verdict(report.payload)}")


def finish(report: Report, request: Request, stopped: BaseException | None) -> int:
    """Write and print a report; the exit status.

    Raises:
        CaptureError, KeyboardInterrupt: what ended the run early, once everything is written.
    """
    problems = write_reports(report, request.common.output)
    show(report)
    for problem in problems:
        print(problem, file=sys.stderr)
    if stopped is not None:
        raise stopped
    return 0 if report.payload["success"] and not problems else 1


def main(argv: Sequence[str] | None = None, suites: Mapping[str, OperationSuite] | None = None) -> int:
    """The command; returns its exit status: 0 passed, 1 failed, 2 cannot be done.

    Args:
        argv: its words; None: those of the process.
        suites: what can be proven; None: every operation of the package.

    Raises:
        SystemExit: help, or options that do not parse.
        CaptureError: a call could not be compiled or captured; the report is written before.
        KeyboardInterrupt: somebody interrupted it; the report of what was done is written before.
    """
    prog = "python -m layout_kernels.numerics"
    request = read(argv, all_suites() if suites is None else suites, prog=prog, description=DESCRIPTION, own=_nothing)
    try:
        check_target(request.common.mode, request.common.device)
        with current_device(request.common.device):
            report, stopped = run(request)
    except ValueError as error:
        print(f"numerics: {error}", file=sys.stderr)
        return 2
    return finish(report, request, stopped)
