"""WHAT does Ctrl+C look like in a script started by hand? A word where paceline waits, else Python's own traceback."""

import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from op_servers import Serving, serving

import paceline
from paceline import exits
from paceline.cluster.devices import Device
from paceline.errors import EXIT_INTERRUPTED, ConnectionLost
from paceline.ingraph.mirror import remote_for
from paceline.ingraph.remote import Remote
from paceline.launchers.ports import Reserved

__all__ = ["serving"]


def ended_with(error: BaseException) -> object:
    """The exit code that our hook asks for; None: it leaves that to Python."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as asked:
        return asked.code
    return None


@pytest.fixture(autouse=True)
def hooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("sys.excepthook", sys.__excepthook__)
    exits.let_errors_set_the_exit_code()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(line: str = "") -> None:
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_ctrl_c_while_paceline_waits_is_one_word_and_130(capsys: pytest.CaptureFixture[str]) -> None:
    with Reserved() as ports:
        address = ports.addresses(1)[0]
        ports.before_start()
        with pytest.raises(KeyboardInterrupt) as found:
            Remote("/job:a/replica:0/task:0", address, b"", 30.0, say=interrupt).call("f:g")
    assert ended_with(found.value) == EXIT_INTERRUPTED
    assert capsys.readouterr().err == "Interrupted.\n"


def test_ctrl_c_in_the_scripts_own_code_stays_pythons_business(capsys: pytest.CaptureFixture[str]) -> None:
    interrupt()
    with pytest.raises(KeyboardInterrupt) as found:
        queue.Queue().get(timeout=120)
    assert ended_with(found.value) is None
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_ends_the_waits_of_other_threads_so_that_the_process_can_end(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.excepthook", sys.__excepthook__)
    exits.let_errors_set_the_exit_code()
    monkeypatch.setattr("sys.argv", ["script.py", "--wait-s=60"])
    with paceline.connect(serving.cluster), ThreadPoolExecutor(1) as pool:
        waits = threading.Event()
        remote = remote_for(Device.parse("/job:worker/task:0"))  # a tower's
        assert remote is not None
        remote._say = lambda line: waits.set()
        asked = pool.submit(remote.call, "f:g")
        assert waits.wait(30)
        ended_with(KeyboardInterrupt())
        with pytest.raises(ConnectionLost, match="this process has closed the connection"):
            asked.result(10)
