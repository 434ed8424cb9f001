"""What is timed, and when a time counts."""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from layout_kernels.benchmark import load as load_module
from layout_kernels.benchmark.load import Load, LoadPlugin
from layout_kernels.benchmark.measure import Subject, compare, own_median
from layout_kernels.benchmark.memory import keep_freed_memory, peak_bytes
from layout_kernels.benchmark.statistics import deviation, drift, nearest_rank, summary
from layout_kernels.benchmark.timers import Burst, TimerPlugin


def nothing():
    pass


def subject(name, run=nothing, calls=1, cold=None):
    return Subject(name, run, calls, cold or run)


def test_p90_is_a_sample_and_the_deviation_is_that_of_the_median():
    samples = [5.0, 1.0, 4.0, 2.0, 3.0, 6.0, 7.0, 8.0, 9.0, 100.0]
    assert nearest_rank(samples, 0.9) == 9.0
    assert nearest_rank(samples, 0.91) == 100.0
    assert nearest_rank([3.0], 0.9) == 3.0
    assert deviation([1.0, 1.0, 2.0, 4.0, 100.0]) == 1.0
    found = summary(samples)
    # A summary, never the samples: a report of all operations is megabytes of them.
    assert found == {"count": 10, "median": 5.5, "p10": 1.0, "p90": 9.0, "mad": 2.5, "min": 1.0, "max": 100.0}


def test_a_graph_of_64_calls_is_divided_by_64(clock):
    sample = TimerPlugin("cpu").sample(Burst(nothing, 64), "cpu")
    assert sample.wall == pytest.approx(1e-3 / 64)
    assert sample.device is None
    assert sample.own == sample.wall


class Queue:
    """A device whose queue is worked off only when the host waits for it: a second for each call."""

    def __init__(self, clock):
        self.clock, self.time, self.waiting = clock, 100.0, []

    def Event(self, enable_timing):  # noqa: N802, torch's name
        assert enable_timing
        event = SimpleNamespace(time=None)
        event.record = lambda: self.waiting.append(lambda: setattr(event, "time", self.time))
        event.elapsed_time = lambda last: (last.time - event.time) * 1e3
        return event

    def call(self, seconds=1.0):
        self.waiting.append(lambda: self.work(seconds))

    def work(self, seconds):
        self.time += seconds
        self.clock.now += seconds

    def synchronize(self, device):
        assert device == "some:1"
        while self.waiting:
            self.waiting.pop(0)()


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_events_tell_the_host_s_time_from_the_device_s_and_both_from_the_wall_s(clock, monkeypatch, kind):
    queue = Queue(clock)
    monkeypatch.setattr(torch, "get_device_module", lambda device: queue)
    # What comes before is on the queue too, and is waited for before anything is timed.
    sample = TimerPlugin(kind).sample(Burst(queue.call, 2, 4, lambda: queue.call(50.0)), "some:1")
    assert sample.enqueue == pytest.approx(1e-3 / 8)
    assert sample.device == pytest.approx(4.0 / 8)
    assert sample.wall == pytest.approx((4.0 + 2e-3) / 8)
    assert sample.own == sample.device


def test_a_host_that_enqueues_while_the_device_still_works_leaves_no_gap_in_the_device_s_time(clock, monkeypatch):
    queue, order = Queue(clock), []
    monkeypatch.setattr(torch, "get_device_module", lambda device: queue)
    synchronize = queue.synchronize
    queue.synchronize = lambda device: (order.append("wait"), synchronize(device))

    def flush():
        order.append("flush")
        queue.call(50.0)

    sample = TimerPlugin("cuda").sample(Burst(queue.call, 2, 4, flush, waits=False), "some:1")
    assert order == ["wait", "flush", "wait"]
    assert sample.device == pytest.approx(4.0 / 8)


def test_what_comes_before_a_sample_is_not_timed(clock):
    def slow():
        clock.now += 50.0

    assert TimerPlugin("cpu").sample(Burst(nothing, 1, 1, slow), "cpu").wall == pytest.approx(1e-3)


def test_a_steady_clock_counts_and_everyone_is_timed_on_both_caches(clock, load, settings):
    found = compare(subject("base"), [subject("ours"), subject("peer")], settings)
    assert found.valid
    assert list(found.timings) == ["base", "ours", "peer"]
    for timing in found.timings.values():
        for cache in ("warm", "cold"):
            assert own_median(timing[cache]) == pytest.approx(1e-3)
            assert timing[cache]["wall"]["count"] == 20
    assert found.baseline_turns["warm"]["count"] == 4


def test_the_cold_call_follows_a_flush_and_the_warm_does_not(clock, load, settings):
    calls = []
    compare(subject("base", lambda: calls.append("warm"), 1, lambda: calls.append("cold")), [], settings)
    # 64 fit into a sample of the warm calls at most; the clock says a millisecond, so each sample is one call.
    # One call is made before the first that is timed, which says how many make a sample.
    assert calls[:7] == ["warm"] * 7
    assert calls[7:12] == ["cold"] * 5


@pytest.mark.parametrize("sign", ["+", "-"])
def test_a_baseline_that_drifts_either_way_makes_the_result_invalid(clock, load, settings, sign):
    clock.growth = float(f"{sign}0.01")
    found = compare(subject("base"), [subject("ours")], settings)
    assert not found.valid
    assert f"the baseline drifted by {sign}" in found.invalid_because[0]
    assert abs(found.drift["warm"]) > 0.05
    # It was tried again before it was given up.
    assert len(found.discarded) == 1


def test_a_drift_below_its_limit_counts(clock, load, settings):
    clock.growth = 1e-5
    assert compare(subject("base"), [subject("ours")], settings).valid


def test_a_drift_is_the_change_in_a_round_and_not_that_of_the_machine_between_rounds():
    assert drift([1.0, 1.1] * 4) == pytest.approx(0.1)
    assert drift([1.1, 1.0] * 5) == pytest.approx(-1 / 11)
    # Half as fast from some round on, for the baseline and the others alike.
    assert drift([1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]) == 0.0
    # One round of many.
    assert drift([1.0, 1.0, 1.0, 5.0, 1.0, 1.0]) == 0.0


def test_the_baseline_never_follows_itself_and_everyone_has_as_many_turns(clock, load, settings):
    ran = []
    subjects = [subject(name, lambda name=name: ran.append(name)) for name in ("base", "ours", "peer")]
    compare(subjects[0], subjects[1:], settings)
    turns = [name for name, _ in itertools.groupby(ran)]
    # The peer's two turns of a round are neighbours only around the baseline's.
    assert turns == ["base", "ours", "peer", "base", "peer", "ours"] * 2


def test_rounds_go_on_for_the_time_that_was_asked(clock, load, settings):
    found = compare(subject("base"), [], replace(settings, seconds=0.2))
    assert found.baseline_turns["cold"]["count"] > 2 * settings.repeats


def test_freed_memory_is_kept_on_the_cpu_only():
    assert not keep_freed_memory("cuda:0")
    program = (
        "import resource, torch\n"
        "from layout_kernels.benchmark.memory import keep_freed_memory\n"
        "kept = keep_freed_memory('cpu')\n"
        "for _ in range(50): torch.ones(1 << 20)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(50): torch.ones(1 << 20)\n"
        "print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    path = {"PYTHONPATH": str(Path(load_module.__file__).parents[2])}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env={**os.environ, **path}, capture_output=True, text=True, check=True)
    kept, faults = result.stdout.split()
    # A fresh four million bytes a time would be over 50,000 pages of 4 KiB.
    assert kept == "False" or int(faults) < 5_000
    assert kept == str(sys.platform.startswith("linux") and platform.libc_ver()[0] == "glibc")


def test_other_processes_make_the_result_invalid(clock, load, settings):
    load(0.2, None, 1.0)
    found = compare(subject("base"), [subject("ours")], settings)
    assert found.invalid_because == ["other processes used 20.0% of the CPUs while timing; the limit is 5.0%"]
    load(0.01, 2, 1.0)
    assert "2 other processes held the device" in compare(subject("base"), [], settings).invalid_because[0]
    load(None, None, 1.0)
    assert compare(subject("base"), [], settings).valid


def test_a_disturbance_that_passes_leaves_a_result_and_is_recorded(clock, load, settings):
    ran = []

    @contextmanager
    def context():
        ran.append(1)
        load(0.5 if len(ran) <= 4 else 0.0, None, 1.0)
        yield

    found = compare(replace(subject("base"), context=context), [], replace(settings, attempts=3))
    assert found.valid
    assert len(found.discarded) == 1
    assert "50.0%" in found.discarded[0][0]


def test_the_watch_tells_our_own_work_from_that_of_others(monkeypatch, tmp_path):
    stat = tmp_path / "stat"
    monkeypatch.setattr(load_module, "_STAT", stat)
    monkeypatch.setattr(load_module.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(load_module, "_allowed", lambda: {1, 3})
    monkeypatch.setattr(load_module, "_own", lambda: 7.0)
    idle = "cpu0 0 0 0 0 0 0 0 0 0 0\ncpu2 0 0 0 0 0 0 0 0 0 0\n"
    one, other = "1000 0 500 9000 10 0 0 5 0 0", "0 0 0 0 0 0 0 0 0 0"
    stat.write_text(f"cpu {one}\n{idle}cpu1 {one}\ncpu3 {other}\nintr 5 6\n")
    reading = replace(LoadPlugin("cpu").start("cpu"), time=load_module.time.monotonic() - 10.0)
    # Ten seconds of the two CPUs that are ours; others used 4 s there, of which the hypervisor took 1 s; we used 3 s.
    # What happens on the other two is no disturbance.
    one, other = "1550 0 550 9900 10 0 0 5 0 0", "0 0 0 0 0 0 0 100 0 0"
    busy = idle.replace("cpu0 0", "cpu0 900000")
    stat.write_text(f"cpu 901550 0 550 9900 10 0 0 105 0 0\n{busy}cpu1 {one}\ncpu3 {other}\nintr 5 6\n")
    monkeypatch.setattr(load_module, "_own", lambda: 10.0)
    assert LoadPlugin("cpu").stop(reading).cpu_share == pytest.approx(4.0 / 20.0, rel=0.02)


def test_every_sample_is_of_as_many_calls(clock, load, settings):
    # A call that gets a hundred times faster after the first turn is still timed by as many as in that turn.
    clock.step, ran = 1e-4, []

    def faster():
        ran.append(1)
        clock.step = 1e-6 if len(ran) > 20 else 1e-4

    found = compare(subject("base", faster), [], replace(settings, drift_limit=1.0))
    assert found.timings["base"]["warm"]["calls_per_sample"] in (2, 3)
    assert found.timings["base"]["warm"]["wall"]["min"] < 2e-6


def test_a_clock_too_coarse_for_the_call_is_a_drift_unless_it_never_moves():
    assert drift([0.0, 0.0]) == 0.0
    assert drift([0.0, 1.0]) == float("inf")


def test_a_machine_that_does_not_tell_is_reported_as_not_watched(monkeypatch, tmp_path):
    monkeypatch.setattr(load_module, "_STAT", tmp_path / "absent")
    found = LoadPlugin("cpu").stop(LoadPlugin("cpu").start("cpu"))
    assert found.cpu_share is None
    assert found.disturbance(0.0) is None
    assert Load(0.0, None, 1.0).disturbance(0.0) is None


def test_a_driver_that_does_not_answer_is_not_watched(monkeypatch):
    def hangs(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(load_module.shutil, "which", lambda name: name)
    monkeypatch.setattr(load_module.subprocess, "run", hangs)
    assert LoadPlugin("cuda").stop(LoadPlugin("cuda").start("cuda")).device_processes is None


def test_peak_memory_is_what_was_held_at_once_not_the_sum(capfd):
    x = torch.ones(1000, 1000)

    def chain():
        y = x + 1
        y = y * 2
        del y
        return x + 3

    # Two results of four million bytes are held at once, never three; torch's own scalars add some bytes.
    assert 8_000_000 <= peak_bytes(chain, "cpu") < 8_001_000
    assert capfd.readouterr().err == ""
