"""End a pytest process that no longer advances, and name the test.

pytest-timeout raises in a test once. This ends the process where that is not enough: the test catches the exception,
its fixtures wait in their teardown, or a thread or an exit handler keeps the process from ending. The timer is
faulthandler's: a C thread, which prints all stacks and needs no interpreter lock. tests/time_limit.py, which starts
pytest for `make`, reads what each process writes down here.
"""

import atexit
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.workermanage import NodeManager

RECORDS = "TEST_PROCESS_RECORDS"  # a folder: one file per pytest process that has not ended yet
DONE = "after "  # a test, before the name of the last one
COLLECT_S = 300.0

_stderr = sys.stderr  # replaced by a copy of the descriptor, which no capturing changes
_deadline = 0.0
_starters: dict[threading.Thread, str] = {}  # threads that keep a process from ending, and the test that started each


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("grace_timeout", "seconds for a test's fixtures to end after its own limit", default="60")
    parser.addini("exit_timeout", "seconds for a pytest process to end after its last test", default="60")


def pytest_configure(config: pytest.Config) -> None:
    """Keep stderr before tests capture it, and print all stacks on SIGUSR2."""
    global _stderr
    _stderr = os.fdopen(os.dup(2), "w", buffering=1)
    faulthandler.register(signal.SIGUSR2, file=_stderr)
    if folder := os.environ.get(RECORDS):
        record, pid = Path(folder, str(os.getpid())), os.getpid()
        # The first handler that is registered runs last: a record that stays is a process that did not come so far.
        atexit.register(lambda: record.unlink(missing_ok=True) if os.getpid() == pid else None)
    NodeManager.EXIT_TIMEOUT = _seconds(config, "exit_timeout") + 10  # xdist kills a worker without its stacks
    _arm(COLLECT_S, "collecting tests")


def pytest_collection_finish() -> None:
    _disarm("waiting for tests")


def pytest_xdist_node_collection_finished() -> None:
    """In the process that gives the tests out: it collects none itself, so pytest_collection_finish is not called."""
    _disarm("waiting for tests")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Limit a test as a whole, and remember which threads it leaves."""
    global _deadline
    before = set(threading.enumerate())
    limit_s = _limit_s(item)
    with_grace_s = limit_s + _seconds(item.config, "grace_timeout") if limit_s else 0.0
    _deadline = time.monotonic() + with_grace_s
    _arm(with_grace_s, item.nodeid)
    try:
        return (yield)
    finally:
        _disarm(f"{DONE}{item.nodeid}")
        new = [each for each in threading.enumerate() if not each.daemon and each not in before]
        _starters.update(dict.fromkeys(new, item.nodeid))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Arm again: pytest disarms when a test fails, and pytest-timeout does not limit what follows its exception."""
    if _limit_s(item):
        _arm(max(_seconds(item.config, "grace_timeout"), _deadline - time.monotonic()), item.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Limit the end of the process, and name the threads that it will wait for."""
    faulthandler.dump_traceback_later(_seconds(config, "exit_timeout"), exit=True, file=_stderr)
    for thread in threading.enumerate():
        if test := _starters.get(thread):
            print(f"The thread {thread.name} still runs; it was started by {test}.", file=_stderr)


def _limit_s(item: pytest.Item) -> float:
    """The limit that pytest-timeout has for this test; 0: none."""
    marker = item.get_closest_marker("timeout")
    if marker is not None and marker.args:
        return float(marker.args[0])
    given = item.config.getoption("timeout", None)
    return float(given if given is not None else item.config.getini("timeout") or 0)


def _seconds(config: pytest.Config, name: str) -> float:
    return float(config.getini(name))


def _arm(limit_s: float, what: str) -> None:
    """Begin to do this, for so long; 0: without a limit."""
    _write(what)
    if limit_s:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=_stderr)


def _disarm(what: str) -> None:
    _write(what)
    faulthandler.cancel_dump_traceback_later()


def _write(what: str) -> None:
    """Write down what this process does; a test is seen as running since this moment."""
    if folder := os.environ.get(RECORDS):
        Path(folder, str(os.getpid())).write_text(what)
