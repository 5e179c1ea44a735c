"""A closed terminal (SIGHUP) is one Ctrl+C; a second one is nothing, and so is the first under nohup."""

import signal
from collections.abc import Iterator

import pytest

from paceline import hangup
from paceline.lab.measuring.interrupts import interruptible, undisturbed


@pytest.fixture(autouse=True)
def as_found() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_it_interrupts_once() -> None:
    hangup.as_interrupt()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGHUP)


def test_who_handles_it_is_told_once_and_hears_no_more_of_it() -> None:
    told: list[str] = []
    hangup.as_interrupt()
    with hangup.handled(lambda: told.append("closed")):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGHUP)
    assert told == ["closed"]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    hangup.as_interrupt()
    with hangup.handled(lambda: told.append("again")):
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGHUP)


def test_under_nohup_it_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    hangup.as_interrupt()
    with hangup.handled(lambda: pytest.fail("told")), interruptible(), undisturbed():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_the_lab_is_interrupted_once_it_has_ended_what_it_was_ending(number: signal.Signals) -> None:
    ended = []
    with pytest.raises(KeyboardInterrupt), interruptible(), undisturbed():
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGINT)
        ended.append("all of it")
    assert ended
