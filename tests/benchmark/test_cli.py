"""The command over an operation that it does not know."""

from __future__ import annotations

import json

import pytest

from layout_kernels.benchmark import main, session
from layout_kernels.numerics.modes import CaptureError, ModePlugin
from tests.numerics import toy
from tests.numerics.graphs import BrokenGraph, FakeGraph, spoil

pytestmark = pytest.mark.usefixtures("clock", "load")


def run(words=(), function=toy.correct, **options):
    suites = {"toy": toy.make_suite(function, **options)}
    short = ["--iterations", "3", "--repeats", "1", "--seconds", "0", "--warmup", "0", "--attempts", "3"]
    return main(["--operation", "toy", *short, *map(str, words)], suites)


def report_of(tmp_path, words=(), function=toy.correct, expect=0, **options):
    path = tmp_path / "report.json"
    assert run([*words, "--output", path, tmp_path / "report.md"], function, **options) == expect
    return json.loads(path.read_text())


def test_an_operation_that_passes_is_timed_beside_its_baseline(tmp_path):
    report = report_of(tmp_path, ["--sizes", 4, 13])
    passed, skipped = report["cases"]
    assert report["success"]
    assert passed["comparison"]["valid"]
    # The clock adds milliseconds up in floating point.
    assert passed["comparison"]["speedup"] == pytest.approx({"warm": 1.0, "cold": 1.0})
    assert {entry["implementation"] for entry in passed["beside"]} == {"candidate.toy", "reference.toy"}
    for entry in passed["beside"]:
        assert entry["rates"]["bytes_per_second"]["warm"] == pytest.approx(32 / 1e-3)
        assert entry["peak_bytes"] >= 16
    assert skipped["status"] == "not_applicable"
    assert skipped["comparison"] is None
    text = (tmp_path / "report.md").read_text()
    assert "reference.toy" in text
    assert "1 ms (p90 1 ms" in text
    assert "### Not applicable" in text


def test_a_numerical_failure_is_not_timed(tmp_path):
    report = report_of(tmp_path, function=lambda x, scale: toy.correct(x, scale + 1), expect=1)
    row = report["cases"][0]
    assert row["status"] == "failed"
    assert row["comparison"] is None
    assert row["beside"] == []
    text = (tmp_path / "report.md").read_text()
    assert "Failed, so not timed" in text
    assert "x warm" not in text


def test_a_baseline_that_fails_is_no_baseline(tmp_path):
    report = report_of(tmp_path, baseline=lambda x, scale: toy.correct(x, scale + 1), expect=1)
    row = report["cases"][0]
    assert row["status"] == "failed"
    assert row["reason"].startswith("baseline reference.toy: first call")
    assert row["comparison"] is None


def test_a_peer_that_fails_is_named_and_not_timed_and_ours_still_is(tmp_path):
    wrong = toy.plan(lambda x, scale: toy.correct(x, scale + 1), "peer.wrong")
    right = toy.plan(toy.correct, "peer.right")
    report = report_of(tmp_path, ["--peers"], peers=(wrong, right))
    beside = {entry["implementation"]: entry for entry in report["cases"][0]["beside"]}
    assert beside["peer.wrong"]["status"] == "failed"
    assert "timing" not in beside["peer.wrong"]
    assert "timing" in beside["peer.right"]
    assert report["success"]


def test_without_peers_none_is_run(tmp_path):
    def never(x, scale):
        raise RuntimeError("a peer ran")

    report = report_of(tmp_path, peers=(toy.plan(never, "peer.never"),))
    assert len(report["cases"][0]["beside"]) == 2


def test_a_peer_can_be_the_baseline(tmp_path):
    peers = (toy.plan(toy.correct, "peer.other"),)
    report = report_of(tmp_path, ["--baseline", "peer.other"], peers=peers)
    assert report["cases"][0]["comparison"]["baseline"] == "peer.other"


def test_a_baseline_that_is_not_there_ends_with_2(capsys):
    assert run(["--baseline", "peer.other"]) == 2
    assert "toy has no peer 'peer.other'" in capsys.readouterr().err


def test_drift_is_no_success_and_shows_no_speedup(tmp_path, clock):
    clock.growth = 0.02
    report = report_of(tmp_path, expect=1)
    comparison = report["cases"][0]["comparison"]
    assert comparison["speedup"] is None
    assert not comparison["valid"]
    assert len(comparison["discarded"]) == 2
    assert report["invalid"] == 1
    assert not report["success"]
    text = (tmp_path / "report.md").read_text()
    assert "NO: the baseline drifted" in text
    assert "1.00" not in text


def test_load_is_no_success(tmp_path, load):
    load(0.5, None, 1.0)
    report = report_of(tmp_path, expect=1)
    assert "other processes used 50.0%" in report["cases"][0]["comparison"]["invalid_because"][0]
    assert report["cases"][0]["comparison"]["load"]["cpu_share"] == 0.5


def test_a_kernel_that_goes_wrong_while_it_is_timed_is_found_afterwards(tmp_path):
    calls = []

    def tires(x, scale):
        calls.append(1)
        # Verification calls it five times.
        return toy.correct(x, scale + (len(calls) > 8))

    report = report_of(tmp_path, function=tires, expect=1)
    row = report["cases"][0]
    assert row["status"] == "failed"
    assert row["reason"].startswith("candidate.toy after timing")
    assert row["comparison"] is None


def test_a_graph_is_timed_by_64_calls_and_its_cold_call_by_one(tmp_path, monkeypatch):
    monkeypatch.setitem(ModePlugin._registry, "cudagraph", FakeGraph)
    report = report_of(tmp_path, ["--mode", "cudagraph"])
    timing = report["cases"][0]["beside"][0]["timing"]
    assert timing["warm"]["calls_per_sample"] == 64
    assert timing["cold"]["calls_per_sample"] == 1
    assert timing["warm"]["wall"]["median"] == pytest.approx(1e-3 / 64)


def test_a_capture_failure_is_written_and_raised(tmp_path, monkeypatch):
    monkeypatch.setitem(ModePlugin._registry, "cudagraph", BrokenGraph)
    path = tmp_path / "r.json"
    with pytest.raises(CaptureError, match="while capturing"):
        run(["--sizes", 3, 4, "--mode", "cudagraph", "--output", path])
    report = json.loads(path.read_text())
    assert report["coverage"] == {"passed": 0, "failed": 1, "not_applicable": 0, "not_run": 1}


def test_an_operation_of_the_package_is_timed_with_its_peers(tmp_path):
    path = tmp_path / "r.json"
    words = ["--operation", "rms_norm", "--rows", "2", "--widths", "16", "--peers", "--output", str(path)]
    assert main([*words, "--iterations", "2", "--repeats", "1", "--seconds", "0"]) == 0
    beside = json.loads(path.read_text())["cases"][0]["beside"]
    assert {"peer.torch.rms_norm", "peer.torch.compile.rms_norm"} <= {entry["implementation"] for entry in beside}
    assert all(entry["status"] == "passed" for entry in beside)


def lasts(calls):
    """A kernel that is right until it has been called so often."""
    made = []

    def tires(x, scale):
        made.append(1)
        if len(made) > calls:
            raise RuntimeError("no more")
        return toy.correct(x, scale)

    return tires


# Five calls prove it, and its two turns are of seven calls each.
@pytest.mark.parametrize(("calls", "when"), [(8, "while timing"), (5 + 2 * 7, "after timing")])
def test_a_kernel_that_raises_when_it_is_timed_fails_and_the_cases_after_it_are_run(tmp_path, calls, when):
    report = report_of(tmp_path, ["--sizes", 3, 4], lasts(calls), expect=1)
    assert [row["status"] for row in report["cases"]] == ["failed", "failed"]
    assert report["cases"][0]["reason"] == f"candidate.toy {when}: RuntimeError: no more"
    assert report["cases"][0]["comparison"] is None


def test_a_peer_that_raises_when_it_is_timed_is_named_and_ours_still_is_timed(tmp_path):
    report = report_of(tmp_path, ["--peers"], peers=(toy.plan(lasts(8), "peer.tires"),))
    assert report["success"]
    beside = {entry["implementation"]: entry for entry in report["cases"][0]["beside"]}
    assert beside["peer.tires"]["reason"] == "while timing: RuntimeError: no more"
    assert "timing" not in beside["peer.tires"]
    assert "timing" in beside["candidate.toy"]


def test_the_graph_of_one_call_is_proven_too(tmp_path, monkeypatch):
    prepare = FakeGraph.prepare.__func__

    def capture(cls, function, device, calls=64):
        runner = prepare(cls, function, device, calls)
        return type(runner)(runner.run if calls > 1 else lambda: None, calls, runner.outputs, is_graph=True)

    monkeypatch.setattr(FakeGraph, "prepare", classmethod(capture))
    monkeypatch.setitem(ModePlugin._registry, "cudagraph", FakeGraph)
    row = report_of(tmp_path, ["--mode", "cudagraph"], expect=1)["cases"][0]
    assert row["reason"].startswith("one call, inputs of seed +1")
    assert row["comparison"] is None


@pytest.mark.parametrize("spoiled", [64, 1])
def test_each_graph_that_was_timed_is_judged_again(tmp_path, monkeypatch, spoiled):
    """One of the two replays wrong numbers from the end of the timing on; the other stays right."""
    prepare, compare, timed = FakeGraph.prepare.__func__, session.compare, []

    def capture(cls, function, device, calls=64):
        runner = prepare(cls, function, device, calls)

        def run():
            runner.run()
            if timed and calls == spoiled:
                spoil(runner.outputs()[0]["scaled"])

        return type(runner)(run, calls, runner.outputs, is_graph=True)

    monkeypatch.setattr(session, "compare", lambda *arguments: (compare(*arguments), timed.append(1))[0])
    monkeypatch.setattr(FakeGraph, "prepare", classmethod(capture))
    monkeypatch.setitem(ModePlugin._registry, "cudagraph", FakeGraph)
    row = report_of(tmp_path, ["--mode", "cudagraph"], expect=1)["cases"][0]
    assert "after timing: " in row["reason"]
    assert row["comparison"] is None


def test_an_interrupt_leaves_a_report_of_what_was_timed(tmp_path):
    def interrupted(x, scale):
        if x.numel() == 4:
            raise KeyboardInterrupt
        return toy.correct(x, scale)

    path = tmp_path / "r.json"
    with pytest.raises(KeyboardInterrupt):
        run(["--sizes", 3, 4, 5, "--output", path], interrupted)
    report = json.loads(path.read_text())
    assert [row["comparison"] is not None for row in report["cases"]] == [True, False, False]
    assert report["limits"] is None
    assert report["coverage"]["not_run"] == 2
