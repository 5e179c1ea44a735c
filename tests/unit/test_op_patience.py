"""HOW long is a task waited for that is not there, or says nothing? As was asked for; the number said is true."""

import re
import threading
import time
from collections.abc import Iterator

import pytest
from op_servers import Serving, serving

import paceline
from paceline.errors import WaitTimeout
from paceline.ingraph.remote import Remote
from paceline.launchers.ports import Reserved
from paceline.transport.channel import accept
from paceline.transport.tcp import TcpLane

__all__ = ["serving"]
NAME = "/job:worker/replica:0/task:0"
SECRET = b"s" * 32
SLACK_S = 3.0  # of a busy machine


@pytest.fixture
def free() -> Iterator[str]:
    """An address where nobody is."""
    with Reserved() as ports:
        address = ports.addresses(1)[0]
        ports.before_start()
        yield address


def given_up(call: object) -> tuple[str, float]:
    """What was said, and after how many seconds."""
    began_s = time.monotonic()
    with pytest.raises(WaitTimeout) as found:
        call()  # type: ignore[operator]
    return str(found.value), time.monotonic() - began_s


def said_s(told: str) -> float:
    found = re.search(r"gave up after ([\d.]+) s", told)
    assert found is not None, told
    return float(found[1])


def stopped(address: str, answers: int) -> object:
    """A task as a client sees it that was stopped: the kernel takes connections, of which only the first ones are
    answered, and no call."""
    listener = TcpLane.listen(address)
    held: list[object] = [listener]

    def answer() -> None:
        for _ in range(answers):
            held.append(accept(listener.accept(), SECRET))

    threading.Thread(target=answer, daemon=True).start()
    return held


def test_a_call_to_a_stopped_task_ends_at_the_limit_and_says_the_time_that_passed(free: str) -> None:
    held = stopped(free, answers=1)
    remote = Remote(NAME, free, SECRET, wait_s=1.5, lane="tcp")
    told, took_s = given_up(lambda: remote.call("f:g"))
    assert "has our call and says nothing: it is stopped, or lost" in told and held
    assert 1.5 <= took_s < 1.5 + SLACK_S and abs(said_s(told) - took_s) < 1


def test_a_task_that_was_stopped_before_ends_the_wait_at_its_limit(free: str) -> None:
    held = stopped(free, answers=0)
    remote = Remote(NAME, free, SECRET, wait_s=1.5, lane="tcp")
    told, took_s = given_up(lambda: remote.call("f:g"))
    assert f"{NAME} at {free} did not answer" in told and held
    assert 1.5 <= took_s < 1.5 + SLACK_S and abs(said_s(told) - took_s) < 1


def test_operation_timeout_holds_for_a_master_that_is_not_there(serving: Serving) -> None:
    config = paceline.ConfigProto(operation_timeout_in_ms=300)
    told, took_s = given_up(lambda: paceline.Session(serving.target(0), config=config))
    assert took_s < SLACK_S, "and not the 5 s of --wait-s"
    assert f"{NAME} at " in told and said_s(told) < SLACK_S


def test_operation_timeout_holds_for_a_task_that_the_master_waits_for(serving: Serving) -> None:
    serving.start(1)
    config = paceline.ConfigProto(operation_timeout_in_ms=300)
    told, took_s = given_up(lambda: paceline.Session(serving.target(1), config=config))
    assert took_s < SLACK_S and f"{NAME} at " in told


def test_a_host_name_that_does_not_exist_is_said_while_waiting_and_at_the_end() -> None:
    said: list[str] = []
    remote = Remote(NAME, "nohost.invalid:22", SECRET, wait_s=0.3, lane="tcp", say=said.append)
    told, _ = given_up(lambda: remote.call("f:g"))
    assert said[0].startswith(f"Still waiting for response from worker: {NAME} (")
    for each in (said[0], told):
        assert "the host name 'nohost.invalid' was not found" in each
