"""What is timed, and when a time counts."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from layout_kernels.benchmark import load as load_module
from layout_kernels.benchmark.load import Load, LoadPlugin
from layout_kernels.benchmark.measure import Subject, compare, own_median
from layout_kernels.benchmark.memory import peak_bytes
from layout_kernels.benchmark.statistics import deviation, nearest_rank, summary
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
    assert (found["median"], found["min"], found["samples"]) == (5.5, 1.0, samples)


def test_a_graph_of_64_calls_is_divided_by_64(clock):
    sample = TimerPlugin("cpu").sample(Burst(nothing, 64), "cpu")
    assert sample.wall == pytest.approx(1e-3 / 64)
    assert sample.device is None
    assert sample.own == sample.wall


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
            assert len(timing[cache]["wall"]["samples"]) == 10 + (timing is found.timings["base"]) * 5
    assert len(found.baseline_rounds["warm"]) == 3


def test_the_cold_call_follows_a_flush_and_the_warm_does_not(clock, load, settings):
    calls = []
    compare(subject("base", lambda: calls.append("warm"), 1, lambda: calls.append("cold")), [], settings)
    # 64 fit into a sample of the warm calls at most; the clock says a millisecond, so each sample is one call.
    assert calls[:6] == ["warm"] * 6
    assert calls[6:11] == ["cold"] * 5


def test_a_drifting_clock_makes_the_result_invalid(clock, load, settings):
    clock.growth = 0.01
    found = compare(subject("base"), [subject("ours")], settings)
    assert not found.valid
    assert "the baseline drifted by +" in found.invalid_because[0]
    assert found.drift["warm"] > 0.05
    # It was tried again before it was given up.
    assert len(found.discarded) == 1


def test_a_drift_below_its_limit_counts(clock, load, settings):
    clock.growth = 1e-5
    assert compare(subject("base"), [subject("ours")], settings).valid


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
        load(0.5 if len(ran) < 4 else 0.0, None, 1.0)
        yield

    found = compare(replace(subject("base"), context=context), [], replace(settings, attempts=3))
    assert found.valid
    assert len(found.discarded) == 1
    assert "50.0%" in found.discarded[0][0]


def test_the_watch_tells_our_own_work_from_that_of_others(monkeypatch, tmp_path):
    stat = tmp_path / "stat"
    monkeypatch.setattr(load_module, "_STAT", stat)
    monkeypatch.setattr(load_module.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(load_module.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(load_module, "_own", lambda: 7.0)
    stat.write_text("cpu 1000 0 500 9000 10 0 0 5 0 0\n")
    reading = replace(LoadPlugin("cpu").start("cpu"), time=load_module.time.monotonic() - 10.0)
    # Ten seconds of two CPUs; others used 4 s, of which the hypervisor took 1 s; we used 3 s.
    stat.write_text("cpu 1550 0 550 9900 10 0 0 105 0 0\n")
    monkeypatch.setattr(load_module, "_own", lambda: 10.0)
    assert LoadPlugin("cpu").stop(reading).cpu_share == pytest.approx(4.0 / 20.0, rel=0.02)


def test_a_machine_that_does_not_tell_is_reported_as_not_watched(monkeypatch, tmp_path):
    monkeypatch.setattr(load_module, "_STAT", tmp_path / "absent")
    found = LoadPlugin("cpu").stop(LoadPlugin("cpu").start("cpu"))
    assert found.cpu_share is None
    assert found.disturbance(0.0) is None
    assert Load(0.0, None, 1.0).disturbance(0.0) is None


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
