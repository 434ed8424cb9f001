"""The life of a case, from its inputs to a verdict. Knows no operation, and reads no tensor's role."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..dispatch import PreparedKernel
from .checks import failed, have_same_bits, shared_memory, tensors_in
from .modes import GRAPH_CALLS, CaptureError, ModePlugin, Runner
from .preparation import in_use
from .suite import FAILED, NOT_APPLICABLE, NOT_RUN, PASSED, KernelCase, PreparedCase

# The seeds of the inputs that a runner is judged with: others than it was made with, then those again.
_SEEDS = (1, 0)


@dataclass
class Outcome:
    """What became of a case with one implementation.

    Attributes:
        row: its entry in a report.
        prepared: its inputs and function, where it passed.
        runner: the call made ready in the mode, where it passed.
        single: the same as a runner of one call, where it was asked for and passed.
        error: why it could not be compiled or captured; to be raised once it is reported.
    """

    row: dict[str, Any]
    prepared: PreparedCase | None = None
    runner: Runner | None = None
    single: Runner | None = None
    error: CaptureError | None = None
    _stages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return self.row["status"] == PASSED

    def settle(self, stage: str, verdict: Any) -> bool:
        """Record the verdict of one stage; whether it passed. What a suite returns stands below `validation` alone."""
        if not isinstance(verdict, Mapping) or verdict.get("status") not in (PASSED, FAILED):
            verdict = failed(f"validate returned {verdict!r}; it must return a mapping with status passed or failed")
        self._stages.append({**verdict, "stage": stage})
        self.row["validation"] = self._stages
        self.row["status"] = verdict["status"]
        self.row["reason"] = None
        if verdict["status"] == FAILED:
            self.row["reason"] = f"{stage}: {verdict.get('reason', 'no reason was given')}"
        return bool(verdict["status"] == PASSED)


def new_row(operation: str, case: KernelCase, plan: PreparedKernel) -> dict[str, Any]:
    """The entry of a case that has not been run. Results go below keys of their own, never over these."""
    return {
        "operation": operation,
        "implementation": plan.spec.name,
        "case_id": case.case_id,
        "parameters": dict(case.parameters),
        "status": NOT_RUN,
        "reason": None,
        "validation": [],
        "metadata": {},
    }


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that torch hands out holds NaN, so that an element which nobody wrote shows."""
    import torch

    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def verify_case(
    operation: str, case: KernelCase, plan: PreparedKernel, *, device: str, mode: str, warmup: int
) -> Outcome:
    """Prove one implementation in one case and one mode.

    A failure of the implementation, exceptions included, is a verdict; a failed capture is one too, and stands in
    `Outcome.error` to be raised. Nothing is run in another mode or by another implementation instead.
    """
    outcome = Outcome(new_row(operation, case, plan))
    with _failures_of(outcome):
        reason = case.unsupported_reason(plan)
        if reason is not None:
            outcome.row.update(status=NOT_APPLICABLE, reason=reason)
            return outcome
        with in_use(plan, device):
            _prove(outcome, case, plan, device, mode, warmup)
    return outcome


def verify_single(outcome: Outcome, plan: PreparedKernel, *, device: str, mode: str) -> None:
    """Make what has passed ready as a runner of one call too, which is another graph, and judge that one as well."""
    prepared, runner = outcome.prepared, outcome.runner
    if prepared is None or runner is None:
        return
    if runner.calls == 1:
        outcome.single = runner
        return
    with _failures_of(outcome), in_use(plan, device):
        single = ModePlugin(mode).prepare(prepared.function, device, 1)
        if verify_runner(outcome, prepared, single, "one call, "):
            outcome.single = single


@contextmanager
def _failures_of(outcome: Outcome) -> Iterator[None]:
    """Whatever is raised meanwhile is a failure of this case, and ends no run; an implementation may not end it."""
    try:
        yield
    except CaptureError as error:
        outcome.settle("capture", failed(str(error)))
        outcome.error = error
    except (Exception, SystemExit) as error:  # noqa: BLE001
        outcome.settle("run", failed(f"{type(error).__name__}: {error}"))


def _prove(outcome: Outcome, case: KernelCase, plan: PreparedKernel, device: str, mode: str, warmup: int) -> None:
    prepared = case.prepare(plan)
    outcome.row["metadata"] = dict(prepared.metadata)
    with poisoned_memory():
        if not outcome.settle("first call", prepared.validate(prepared.function)):
            return
    first = prepared.function()
    reason = shared_memory(prepared.function(), first, "the result of the call before")
    if not outcome.settle("second call", {"status": PASSED} if reason is None else failed(reason)):
        return
    del first
    for _ in range(warmup):
        prepared.function()
    runner = ModePlugin(mode).prepare(prepared.function, device, GRAPH_CALLS)
    if verify_runner(outcome, prepared, runner):
        outcome.prepared, outcome.runner = prepared, runner


def verify_runner(outcome: Outcome, prepared: PreparedCase, runner: Runner, what: str = "") -> bool:
    """Judge all outputs of a runner, with changed inputs and with the first ones again; whether all passed.

    Args:
        outcome: where the verdicts are recorded.
        prepared: of the case.
        runner: what is judged.
        what: with which the names of its stages begin.
    """
    if prepared.change is None:
        if runner.is_graph:
            reason = "the suite's PreparedCase has no `change`; a graph is proven only by replaying on other inputs"
            return outcome.settle(f"{what}changed inputs", failed(reason))
        return outcome.settle(f"{what}unchanged inputs", judge_outputs(prepared, runner))
    for seed in _SEEDS:
        prepared.change(seed)
        if not outcome.settle(f"{what}inputs of seed +{seed}", judge_outputs(prepared, runner)):
            return False
    return True


def judge_outputs(prepared: PreparedCase, runner: Runner) -> Mapping[str, Any]:
    """Run once and judge every output; the snapshot that `validate` takes is older than the run."""
    if runner.is_graph:
        _poison(runner.outputs())

    def first() -> Any:
        runner.run()
        return runner.outputs()[0]

    verdict = prepared.validate(first)
    outputs = runner.outputs()
    if not isinstance(verdict, Mapping) or verdict.get("status") != PASSED:
        return verdict
    for index in range(1, len(outputs)):
        reason = shared_memory(outputs[index], list(outputs[:index]), "the outputs of other calls")
        if reason is not None:
            return failed(f"call {index + 1} of {len(outputs)}: {reason}")
        # What has the bits of a result that passed, for the same inputs, passes.
        if not have_same_bits(outputs[index], outputs[0]):
            verdict = prepared.validate(_reader(outputs[index]))
            if verdict.get("status") != PASSED:
                return failed(f"call {index + 1} of {len(outputs)}: {verdict.get('reason')}")
    return verdict


def _reader(output: Any) -> Callable[[], Any]:
    return lambda: output


def _poison(outputs: Any) -> None:
    """Spoil captured outputs: what the next replay does not write shows."""
    for _, tensor in tensors_in(list(outputs)):
        tensor.fill_(float("nan") if tensor.is_floating_point() else 113)
