"""HOW slow is a worker that is slowed on purpose? Exactly as --slow says, and only in its own time."""

import pytest

from paceline.cluster.slow import parse
from paceline.cluster.spec import Task
from paceline.errors import UsageError
from paceline.worker.slowness import Slowness, of


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


def test_a_step_takes_so_many_times_as_long(time: Time) -> None:
    slow = Slowness(5.0, time.clock, time.sleep)
    ends = []
    for own_s in (0.25, 0.5):
        time.now_s += own_s
        slow.hold_back()
        ends.append(time.now_s - 100.0)
    assert time.sleeps == [1.0, 2.0], "the sleep itself is no work that would be slowed again"
    assert ends == [1.25, 3.75]
    assert slow.slept_s == 3.0


def test_waiting_for_others_is_not_slowed(time: Time) -> None:
    slow = Slowness(3.0, time.clock, time.sleep)
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
    slow = Slowness(2.0, time.clock, time.sleep)
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
