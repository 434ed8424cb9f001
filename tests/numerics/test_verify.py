"""Each rule of the verification, by a fault that it must catch."""

from __future__ import annotations

import re
from collections import namedtuple

import pytest
import torch

from layout_kernels.numerics.checks import on_cpu, structure_difference
from layout_kernels.numerics.modes import CaptureError, ModePlugin
from layout_kernels.numerics.verify import verify_case

from . import toy
from .graphs import BrokenGraph, FakeGraph, spoil


def verify(function, mode="eager", case=None):
    case = toy.ToyCase(5, 2.0) if case is None else case
    return verify_case("toy", case, toy.plan(function), device="cpu", mode=mode, warmup=1)


@pytest.fixture
def graph(monkeypatch):
    monkeypatch.setitem(ModePlugin._registry, "cudagraph", FakeGraph)
    return lambda **faults: [monkeypatch.setattr(FakeGraph, name, fault) for name, fault in faults.items()]


def wrong_element(x, scale):
    result = toy.correct(x, scale)
    spoil(result["scaled"])
    return result


def mutates(x, scale):
    result = toy.correct(x.clone(), scale)
    x[0] += 1
    return result


def view_of_input(x, scale):
    return {**toy.correct(x, scale), "scaled": x[:]}


def wrong_dtype(x, scale):
    return {**toy.correct(x, scale), "scaled": (x * scale).double()}


def wrong_shape(x, scale):
    return {**toy.correct(x, scale), "scaled": (x * scale)[None]}


def wrong_keys(x, scale):
    return {"parts": toy.correct(x, scale)["parts"], "scaled": x * scale}


def wrong_container(x, scale):
    result = toy.correct(x, scale)
    return {**result, "parts": tuple(result["parts"])}


def wrong_device(x, scale):
    return {**toy.correct(x, scale), "scaled": (x * scale).to("meta")}


def unwritten(x, scale):
    result = toy.correct(x, scale)
    out = torch.empty_like(x)
    out[:-1] = (x * scale)[:-1]
    return {**result, "scaled": out}


def same_memory_by_another_name(x, scale):
    return {**toy.correct(x, scale), "parts": [torch.from_numpy(x.numpy()[1:]), (x * 0).to(torch.int32)]}


def turns_its_input(x, scale):
    result = toy.correct(x.clone(), scale)
    x.unsqueeze_(0)
    return result


def ends_the_process(x, scale):
    raise SystemExit(0)


def raises(x, scale):
    raise RuntimeError("no such device")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (wrong_element, "is not"),
        (mutates, "x was written to"),
        (view_of_input, r"shares memory with inputs\['x']"),
        (same_memory_by_another_name, r"\['parts'\]\[0\] shares memory with inputs\['x']"),
        (turns_its_input, "x has another shape"),
        (ends_the_process, "SystemExit: 0"),
        (wrong_dtype, "torch.float64"),
        (wrong_shape, r"\(1, 5\)"),
        (wrong_keys, "must be a mapping with"),
        (wrong_container, "must be list of 2"),
        (wrong_device, "on meta"),
        (unwritten, "nan"),
        (raises, "RuntimeError: no such device"),
    ],
)
def test_a_fault_in_the_first_call_is_caught_before_values_are_read(function, reason):
    outcome = verify(function)
    assert outcome.row["status"] == "failed"
    assert outcome.runner is None
    assert re.search(reason, outcome.row["reason"]), outcome.row["reason"]


def test_a_correct_implementation_passes_every_stage_in_eager_and_in_a_graph(graph):
    for mode in ("eager", "cudagraph"):
        outcome = verify(toy.correct, mode)
        assert outcome.passed, outcome.row["reason"]
        stages = [stage["stage"] for stage in outcome.row["validation"]]
        assert stages == ["first call", "second call", "inputs of seed +1", "inputs of seed +0"]
    assert outcome.runner.calls == 64
    assert len(outcome.runner.outputs()) == 64


def test_memory_that_two_calls_share_is_caught():
    out = torch.empty(5)

    def reuses(x, scale):
        return {**toy.correct(x, scale), "scaled": torch.mul(x, scale, out=out)}

    assert "shares memory with the result of the call before" in verify(reuses).row["reason"]


def test_a_kernel_that_is_wrong_only_after_the_inputs_change_is_caught():
    remembered = {}

    def caches(x, scale):
        remembered.setdefault("x", x.clone())
        return toy.correct(remembered["x"], scale)

    outcome = verify(caches)
    assert outcome.row["reason"].startswith("inputs of seed +1")


def test_a_graph_that_is_wrong_in_the_last_of_its_calls_is_caught(graph):
    graph(after_replay=lambda outputs: spoil(outputs[-1]["scaled"]))
    assert "call 64 of 64" in verify(toy.correct, "cudagraph").row["reason"]


def test_a_graph_whose_outputs_share_memory_is_caught(graph):
    def merge(outputs):
        outputs[7]["scaled"] = outputs[3]["scaled"]

    graph(after_replay=merge)
    assert "call 8 of 64" in verify(toy.correct, "cudagraph").row["reason"]


def test_a_graph_that_replays_what_it_saw_at_capture_is_caught(graph):
    graph(stale=True)
    assert verify(toy.correct, "cudagraph").row["reason"].startswith("inputs of seed +1")


def test_a_graph_that_writes_nothing_is_caught(graph, monkeypatch):
    prepare = FakeGraph.prepare.__func__

    def silent(cls, function, device, calls=64):
        runner = prepare(cls, function, device, calls)
        return type(runner)(lambda: None, calls, runner.outputs, is_graph=True)

    monkeypatch.setattr(FakeGraph, "prepare", classmethod(silent))
    assert "nan" in verify(toy.correct, "cudagraph").row["reason"]


def test_a_graph_that_writes_to_its_input_only_when_it_is_replayed_is_caught(graph, monkeypatch):
    held = {}
    prepare = FakeGraph.prepare.__func__

    def capture(cls, function, device, calls=64):
        runner = prepare(cls, function, device, calls)

        def replay():
            runner.run()
            held["x"][0] += 1

        return type(runner)(replay, calls, runner.outputs, is_graph=True)

    def remembers(x, scale):
        held["x"] = x
        return toy.correct(x, scale)

    monkeypatch.setattr(FakeGraph, "prepare", classmethod(capture))
    assert "x was written to" in verify(remembers, "cudagraph").row["reason"]


def test_a_graph_is_not_proven_where_inputs_cannot_be_changed(graph):
    case = toy.ToyCase(5, 2.0, can_change=False)
    assert "no `change`" in verify(toy.correct, "cudagraph", case).row["reason"]
    assert verify(toy.correct, "eager", case).passed


def test_a_capture_that_fails_is_a_failure_and_kept_to_be_raised(monkeypatch):
    monkeypatch.setitem(ModePlugin._registry, "cudagraph", BrokenGraph)
    outcome = verify(toy.correct, "cudagraph")
    assert outcome.row["status"] == "failed"
    assert isinstance(outcome.error, CaptureError)
    assert outcome.runner is None


def test_a_graph_break_is_a_capture_failure_and_no_eager_run():
    def breaks(x, scale):
        torch._dynamo.graph_break()
        return toy.correct(x, scale)

    outcome = verify(breaks, "compile")
    assert isinstance(outcome.error, CaptureError)
    assert outcome.row["reason"].startswith("capture: torch.compile")


def test_what_a_suite_returns_cannot_change_what_the_row_is_about():
    class Lying(toy.ToyCase):
        def prepare(self, plan):
            prepared = super().prepare(plan)
            lie = {"status": "passed", "case_id": "other", "operation": "other", "implementation": "other"}
            return type(prepared)(prepared.function, lambda function: {**lie, **prepared.validate(function)}, lie)

    row = verify(toy.correct, case=Lying(5, 2.0)).row
    assert (row["operation"], row["implementation"]) == ("toy", "candidate.toy")
    assert row["case_id"] == "size=5,scale=2.0,seed=0"
    assert row["validation"][0]["case_id"] == "other"
    assert row["validation"][0]["stage"] == "first call"


@pytest.mark.parametrize("verdict", [None, {}, {"status": "ok"}, {"status": "not_run"}, True])
def test_a_validation_without_a_verdict_is_a_failure(verdict):
    class Silent(toy.ToyCase):
        def prepare(self, plan):
            prepared = super().prepare(plan)
            return type(prepared)(prepared.function, lambda function: verdict)

    assert "must return a mapping" in verify(toy.correct, case=Silent(5, 2.0)).row["reason"]


def test_a_case_that_cannot_say_whether_it_applies_is_a_failure():
    class Unsure(toy.ToyCase):
        def unsupported_reason(self, plan):
            raise ValueError("no such field")

    assert verify(toy.correct, case=Unsure(5, 2.0)).row["reason"] == "run: ValueError: no such field"


def test_a_named_tuple_stays_one_and_what_cannot_be_looked_into_does_not_pass():
    pair = namedtuple("pair", "one other")(torch.ones(2), None)
    assert type(on_cpu(pair)) is type(pair)
    assert structure_difference(pair, pair, "cpu") is None
    assert "cannot be looked into" in structure_difference([{1}], [{1}], "cpu")


def test_what_does_not_apply_is_not_run():
    outcome = verify(raises, case=toy.ToyCase(13, 2.0))
    assert (outcome.row["status"], outcome.row["reason"]) == ("not_applicable", "size 13 is not taken")
    assert outcome.row["validation"] == []
