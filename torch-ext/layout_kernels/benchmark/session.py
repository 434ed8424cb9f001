"""Proves and times one case with everything that stands beside it. Knows no operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..dispatch import PreparedKernel
from ..numerics.checks import failed
from ..numerics.modes import GRAPH_CALLS, CaptureError
from ..numerics.preparation import compatible_names, in_use
from ..numerics.suite import FAILED, NOT_APPLICABLE, PASSED, KernelCase, OperationSuite
from ..numerics.verify import Outcome, judge_outputs, verify_case, verify_single
from .measure import CACHES, Comparison, Settings, Subject, compare, own_median
from .memory import peak_bytes

_PEER = "peer."


class _TurnError(Exception):
    """What an implementation raised while it was timed."""

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.name = name


@contextmanager
def _turn(plan: PreparedKernel, device: str) -> Iterator[None]:
    """Where an implementation has its turn; costs nothing while the clock runs."""
    with in_use(plan, device):
        try:
            yield
        except (Exception, SystemExit) as error:
            raise _TurnError(plan.spec.name, error) from error


class Session:
    """What a benchmark does with each case.

    Args:
        baseline: the name or solution that candidates are compared with.
        mode: an execution mode.
        with_peers: whether every other implementation is timed too.
        settings: how to time.
    """

    def __init__(self, baseline: str, mode: str, with_peers: bool, settings: Settings) -> None:
        self._baseline, self._mode, self._with_peers, self._settings = baseline, mode, with_peers, settings

    def baseline(self, suite: OperationSuite) -> PreparedKernel:
        """The plan of an operation's baseline.

        Raises:
            ValueError: there is none of that name.
        """
        if not self._baseline.startswith(_PEER):
            return suite.prepare(self._settings.device, self._mode, self._baseline)
        peers = {plan.spec.name: plan for plan in suite.peers(self._settings.device, self._mode)}
        if self._baseline not in peers:
            known = ", ".join(peers) or "none in this mode"
            raise ValueError(f"{suite.operation} has no peer {self._baseline!r}; it has {known}")
        return peers[self._baseline]

    def check(self, suite: OperationSuite) -> None:
        """Refuse a baseline or peers that an operation does not have, before anything runs.

        Raises:
            ValueError: as `baseline`, or an override in the environment that lets no peer be selected.
        """
        self.baseline(suite)
        self._peers(suite, set())

    def _peers(self, suite: OperationSuite, taken: set[str]) -> list[PreparedKernel]:
        if not self._with_peers:
            return []
        device, mode = self._settings.device, self._mode
        try:
            names = compatible_names(suite.operation, device, mode)
        except ValueError:
            # An operation of somebody else's suite is not in the catalog; its own peers remain.
            names = ()
        plans = [suite.prepare(device, mode, name) for name in names if name not in taken]
        return plans + [plan for plan in suite.peers(device, mode) if plan.spec.name not in taken]

    def _verify(self, suite: OperationSuite, plan: PreparedKernel, case: KernelCase) -> Outcome:
        device, mode = self._settings.device, self._mode
        outcome = verify_case(suite.operation, case, plan, device=device, mode=mode, warmup=self._settings.warmup)
        # A cold call is timed alone, as a graph of its own.
        verify_single(outcome, plan, device=device, mode=mode)
        return outcome

    def run_case(
        self, suite: OperationSuite, plan: PreparedKernel, case: KernelCase
    ) -> tuple[dict[str, Any], CaptureError | None]:
        """The row of a case, and the capture failure that must end the run. What did not pass is not timed."""
        candidate = self._verify(suite, plan, case)
        row = candidate.row
        row["comparison"], row["beside"] = None, []
        if not candidate.passed:
            return row, candidate.error
        base_plan = self.baseline(suite)
        is_baseline = base_plan.spec.name == plan.spec.name
        base = candidate if is_baseline else self._verify(suite, base_plan, case)
        if base.error is not None:
            row.update(status=FAILED, reason=f"baseline {base_plan.spec.name}: {base.row['reason']}")
            return row, base.error
        if not base.passed:
            status = NOT_APPLICABLE if base.row["status"] == NOT_APPLICABLE else FAILED
            row.update(status=status, reason=f"baseline {base_plan.spec.name}: {base.row['reason']}")
            return row, None
        found = {plan.spec.name: (plan, candidate), base_plan.spec.name: (base_plan, base)}
        for peer in self._peers(suite, set(found)):
            outcome = self._verify(suite, peer, case)
            if outcome.passed:
                found[peer.spec.name] = (peer, outcome)
            else:
                row["beside"].append({"implementation": peer.spec.name, **_verdict(outcome)})
        self._time(row, found, base_plan.spec.name)
        return row, None

    def _time(self, row: dict[str, Any], found: dict[str, tuple[PreparedKernel, Outcome]], base: str) -> None:
        comparison = None
        while comparison is None:
            subjects = {name: self._subject(plan, outcome) for name, (plan, outcome) in found.items()}
            others = [subject for name, subject in subjects.items() if name != base]
            try:
                comparison = compare(subjects[base], others, self._settings)
            except _TurnError as error:
                name = error.name
                if name in (row["implementation"], base):
                    row.update(status=FAILED, reason=f"{name} while timing: {error}")
                    return
                # A peer that does not last is left out, and the others are timed without it.
                _, outcome = found.pop(name)
                entry = {"implementation": name, **_verdict(outcome), "status": FAILED}
                row["beside"].append({**entry, "reason": f"while timing: {error}"})
        for name, (plan, outcome) in found.items():
            entry = {"implementation": name, **_verdict(outcome), "timing": comparison.timings[name]}
            with in_use(plan, self._settings.device):
                self._after(entry, outcome)
            row["beside"].append(entry)
        lost = [entry for entry in row["beside"] if "timing" not in entry and entry["implementation"] in found]
        names = {row["implementation"], base}
        for entry in lost:
            if entry["implementation"] in names:
                row.update(status=FAILED, reason=f"{entry['implementation']} after timing: {entry['reason']}")
        row["comparison"] = _described(comparison, row, base) if row["status"] == PASSED else None

    def _after(self, entry: dict[str, Any], outcome: Outcome) -> None:
        """Judge again: what went wrong in some later call was not worth timing."""
        if outcome.prepared is None or outcome.runner is None or outcome.single is None:
            return
        try:
            for runner in dict.fromkeys((outcome.runner, outcome.single)):
                verdict = judge_outputs(outcome.prepared, runner)
                if verdict.get("status") != PASSED:
                    break
            entry["peak_bytes"] = peak_bytes(outcome.prepared.function, self._settings.device)
        except (Exception, SystemExit) as error:  # noqa: BLE001, as while it was proven
            verdict = failed(f"{type(error).__name__}: {error}")
        if verdict.get("status") != PASSED:
            entry.update(status=FAILED, reason=verdict.get("reason"))
            del entry["timing"]
        entry["rates"] = _rates(entry, outcome.row["metadata"])

    def _subject(self, plan: PreparedKernel, outcome: Outcome) -> Subject:
        if outcome.runner is None or outcome.single is None:
            raise RuntimeError(f"{plan.spec.name} has not passed, so it is not timed")
        context = partial(_turn, plan, self._settings.device)
        return Subject(plan.spec.name, outcome.runner.run, outcome.runner.calls, outcome.single.run, context)


def _verdict(outcome: Outcome) -> dict[str, Any]:
    return {key: outcome.row[key] for key in ("status", "reason", "validation")}


def _rates(entry: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """Bytes and operations a second, where the suite says how many a call has."""
    if "timing" not in entry:
        return {}
    return {
        f"{work}_per_second": {cache: metadata[work] / own_median(entry["timing"][cache]) for cache in CACHES}
        for work in ("bytes", "flops")
        if work in metadata
    }


def _described(comparison: Comparison, row: dict[str, Any], base: str) -> dict[str, Any]:
    candidate, baseline = comparison.timings[row["implementation"]], comparison.timings[base]
    speedup = {cache: own_median(baseline[cache]) / own_median(candidate[cache]) for cache in CACHES}
    found = {name: value for name, value in vars(comparison).items() if name != "timings"}
    valid = {"valid": comparison.valid, "speedup": speedup if comparison.valid else None}
    return {"baseline": base, **valid, **found, "calls_per_graph": GRAPH_CALLS}
