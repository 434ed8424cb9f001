"""Calls beside each other: their order, the shortest time of each, medians, and that what is wrong is not timed."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from layout_kernels.benchmark import proof, timers, turns
from layout_kernels.benchmark.proof import WrongResultError, check, difference, right_ones
from layout_kernels.benchmark.timers import Burst
from layout_kernels.benchmark.turns import in_turns, medians, shortest


class Machine:
    """A clock that calls move by what they take, more where another call ran before."""

    def __init__(self, monkeypatch):
        self.now, self.order = 0.0, []
        monkeypatch.setattr(timers, "clock", lambda: self.now)
        for module in (proof, turns):
            monkeypatch.setattr(module, "processor_clock", lambda: lambda: self.now)

    def call(self, name, warm, cold):
        self.now += warm if self.order and self.order[-1] == name else cold
        self.order.append(name)

    def calls(self, **durations):
        """Calls that take these times one after the other."""
        left = {name: iter(times) for name, times in durations.items()}
        return {name: lambda name=name: self.call(name, *[next(left[name])] * 2) for name in durations}


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_the_first_has_a_turn_before_each_of_the_orders_of_the_others_and_never_follows_itself():
    ran = []
    found = in_turns([lambda name=name: ran.append(name) or len(ran) for name in "abc"], 2)
    assert "".join(ran) == "abcacb" * 2
    assert found == [[1, 4, 7, 10], [2, 6, 8, 12], [3, 5, 9, 11]]


def test_calls_are_measured_in_turns_and_the_shortest_counts(machine):
    calls = machine.calls(stock=(5.0, 7.0), ours=(3.0, 1.0))
    assert shortest(calls, {"ours": 3.0, "stock": 5.0}, 0.0) == {"ours": 1.0, "stock": 5.0}
    assert machine.order == ["stock", "ours"] * 2


def test_a_call_does_not_pay_for_what_another_turn_left_in_the_caches(machine):
    calls = {"stock": partial(machine.call, "stock", 2.0, 9.0), "ours": partial(machine.call, "ours", 1.0, 9.0)}
    # Stock is called once in a turn, ours more often: neither is timed cold.
    assert shortest(calls, {"ours": 1e-4, "stock": 1e-2}, 0.01) == {"ours": 1.0, "stock": 2.0}


@pytest.mark.usefixtures("load")
def test_a_ratio_is_the_median_of_the_turns_and_the_first_run_of_each_does_not_count(machine):
    calls = machine.calls(stock=(9.0, 1.0, 4.0, 4.0, 3.0), ours=(9.0, 2.0, 2.0, 2.0, 1.0))
    found = medians({name: Burst(call, 1) for name, call in calls.items()}, "cpu", rounds=2)
    assert machine.order == ["stock", "ours"] * 5
    assert (found.summary("stock")["median"], found.summary("ours")["median"]) == (3.5, 2.0)
    assert found.ratio("stock", "ours") == 2.0  # of 0.5, 2, 2 and 3


def test_medians_tell_what_disturbed_them(machine, load):
    def take(times):
        return medians({"stock": Burst(machine.calls(stock=times)["stock"], 1)}, "cpu", rounds=1).disturbance()

    assert take((1.0, 1.0, 1.0)) is None
    assert take((1.0, 1.0, 1.1)) == "stock drifted by +10.0% while timing; the limit is 5.0%"
    load(0.5, None, 1.0)
    assert "other processes used 50.0%" in take((1.0, 1.0, 1.0))


def test_with_one_thread_the_processor_s_time_counts(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert timers.processor_clock() is timers.time.thread_time
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert timers.processor_clock() is timers.clock


def test_a_difference_is_in_parts_of_the_largest_element_and_covers_every_tensor():
    right = torch.tensor([1.0, 4.0])
    assert difference(torch.tensor([1.5, 4.0]), right) == 0.125
    assert difference((right, right + 1), (right, right)) == 0.25
    assert difference(torch.ones(1), right) == float("inf")
    assert check("case", right, right, 0.0) == 0.0
    for bad in (right + 1, right * float("nan"), torch.ones(1)):
        with pytest.raises(WrongResultError, match=r"case is off by .* allowed: 1\.00e-01; not timed"):
            check("case", bad, right, 0.1)


def test_a_wrong_result_of_ours_has_no_speed_and_a_wrong_peer_no_column():
    right, wrong = torch.ones(4), torch.tensor([1.0, 1.0, 1.0, 1.1])
    calls = {"stock": lambda: right, "ours": lambda: right, "F": lambda: wrong, "clone": lambda: None}
    found, once = right_ones("case", calls, ours="ours", unchecked=("clone",))
    assert set(found) == set(once) == {"stock", "ours", "clone"}
    for bad in (wrong, right * float("nan"), torch.ones(1)):
        with pytest.raises(WrongResultError, match="case by ours"):
            right_ones("case", {**calls, "ours": lambda bad=bad: bad}, ours="ours", unchecked=("clone",))


def test_a_slow_call_is_not_repeated_to_learn_how_long_it_takes(machine):
    calls = machine.calls(stock=(0.25,), ours=(0.2, 0.1))
    _, once = right_ones("case", {**calls}, ours="ours", unchecked=("ours",))
    assert once == pytest.approx({"stock": 0.25, "ours": 0.1})
