"""HOW slow is a worker that is slowed on purpose? Exactly as --slow says, and only in its own time."""

import pytest
import torch
from torch import nn

import paceline
from paceline.cluster.slow import parse
from paceline.cluster.spec import Task
from paceline.errors import UsageError
from paceline.worker.step.slowness import FIRST_STEPS, Slowness, of


class Time:
    """A clock that only moves when told, or slept."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.sleeps: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds


@pytest.fixture
def time() -> Time:
    return Time()


def warm(factor: float, time: Time, own_s: float) -> Slowness:
    """One that knows how long its steps take without sleeps."""
    slow = Slowness(factor, time.clock, time.sleep)
    for _ in range(FIRST_STEPS):
        time.now_s += own_s
        slow.hold_back()
    assert time.sleeps == [], "the first steps are left as they are"
    return slow


def test_a_step_takes_so_many_times_as_long(time: Time) -> None:
    slow = warm(5.0, time, own_s=0.25)
    began_s = time.now_s
    for _ in range(2):
        time.now_s += 0.25
        slow.hold_back()
    assert time.sleeps == [1.0, 1.0], "the sleep itself is no work that would be slowed again"
    assert time.now_s - began_s == 2.5
    assert slow.slept_s == 2.0


def test_a_longer_step_is_slowed_as_much(time: Time) -> None:
    slow = warm(3.0, time, own_s=0.5)
    time.now_s += 0.5
    slow.hold_back()
    time.now_s += 4.0
    slow.hold_back()
    assert time.sleeps[0] == 1.0
    assert 4.0 < time.sleeps[1] < 8.0, "three times as long, less what looks like a colder cache"


def test_what_sleeping_itself_costs_is_taken_off(time: Time) -> None:
    slow = warm(5.0, time, own_s=0.25)
    began_s = time.now_s
    for _ in range(200):
        time.now_s += 0.5  # from a cold cache: twice as long
        slow.hold_back()
    assert time.now_s - began_s == pytest.approx(200 * 5 * 0.25)


def test_waiting_for_others_is_not_slowed(time: Time) -> None:
    slow = warm(3.0, time, own_s=0.5)
    time.now_s += 10.0 + 0.5
    slow.waited(4.0)
    slow.waited(6.0)
    slow.hold_back()
    assert time.sleeps == [1.0]
    time.now_s += 0.5
    slow.hold_back()
    assert time.sleeps == [1.0, 1.0], "what was waited counts for one step only"
    time.now_s += 1.0
    slow.waited(2.0)  # clocks differ by a little: never a negative sleep
    slow.hold_back()
    assert time.sleeps == [1.0, 1.0]


def test_what_came_before_training_is_no_step(time: Time) -> None:
    slow = warm(2.0, time, own_s=0.5)
    time.now_s += 60.0
    slow.begin()
    time.now_s += 0.5
    slow.hold_back()
    assert time.sleeps == [0.5]


def test_each_worker_finds_its_own_factor() -> None:
    text = "worker:1=5x, worker:2=1.5"
    assert parse(text) == {Task("worker", 1): 5.0, Task("worker", 2): 1.5}
    found = of(text, Task("worker", 1))
    assert found is not None and found.factor == 5.0
    assert of(text, Task("worker", 0)) is None
    assert of("worker:0=1x", Task("worker", 0)) is None
    assert parse("") == {}


@pytest.mark.parametrize("text", ["worker:1", "worker:1=x", "worker=5x", "1=5x", "worker:1=5x,", "worker:1=-5x", ","])
def test_what_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--slow is .*; write it as worker:1=5x"):
        parse(text)


@pytest.mark.parametrize(("mode", "waits"), [("async", False), ("sync", True), ("bounded", True)])
def test_only_modes_that_wait_for_others_leave_time_out(
    mode: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(Slowness, "waited", lambda self, seconds: waited.append(seconds))

    def train(ctx: paceline.Context) -> None:
        model = nn.Linear(4, 2)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()

    paceline.launch(train, workers=1, mode=mode, slow="worker:0=2x")
    assert bool(waited) is waits


def test_first_steps_that_were_slow_do_not_count_for_ever(time: Time) -> None:
    """A host on which everybody computes at once; later steps without sleeps say how long they really take."""
    slow = warm(4.0, time, own_s=0.5)
    for _ in range(3000):
        time.now_s += 0.25
        slow.hold_back()
    began_s = time.now_s
    for _ in range(1050):
        time.now_s += 0.25
        slow.hold_back()
    assert time.now_s - began_s == pytest.approx(1050 * 4 * 0.25, rel=0.01), "probes are made up for"
