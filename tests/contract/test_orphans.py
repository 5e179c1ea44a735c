"""WHO holds a dead worker's socket? Nobody: a forked child, as a DataLoader makes it, gives it up (trap 6)."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from lane_pairs import listening

from paceline.errors import ConnectionLost, WaitTimeout
from paceline.transport.base import Stream

PARENT = """
import os, signal, sys
from paceline import forks
from paceline.transport import LANES

stream = LANES[sys.argv[1]].connect(sys.argv[2], 10.0)
stream.send([b"hi"])
if sys.argv[3] == "keeps":
    forks._held.clear()
child = os.fork()
if child == 0:
    os.read(0, 1)  # until the test lets go
    os._exit(0)
print(child, flush=True)
signal.pause()
"""


@contextmanager
def forked_worker(lane: str, child: str) -> Iterator[tuple[Stream, subprocess.Popen[str], int]]:
    """The server's end, the worker's process and its child's id."""
    with listening(lane) as (address, listener):
        worker = subprocess.Popen(
            [sys.executable, "-c", PARENT, lane, address, child],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert worker.stdin is not None and worker.stdout is not None
        try:
            server = listener.accept()
            server.recv_into(memoryview(bytearray(2)))
            yield server, worker, int(worker.stdout.readline())
            server.close()
        finally:
            worker.kill()
            worker.stdin.close()  # the child ends by itself
            worker.stdout.read()
            worker.stdout.close()
            worker.wait(60)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("lane", ["shm", "tcp"])
def test_the_end_of_a_killed_worker_is_seen_though_its_child_lives(lane: str) -> None:
    with forked_worker(lane, "gives up") as (server, worker, child):
        worker.send_signal(signal.SIGKILL)
        server.set_timeout(1.0)
        with pytest.raises(ConnectionLost):
            server.recv_some(memoryview(bytearray(1)))
        assert is_running(child)


@pytest.mark.parametrize("lane", ["shm", "tcp"])
def test_a_child_that_keeps_the_socket_hides_the_death(lane: str) -> None:
    """What the test above would see without the hook."""
    with forked_worker(lane, "keeps") as (server, worker, _):
        worker.send_signal(signal.SIGKILL)
        worker.wait(60)
        server.set_timeout(0.2)
        with pytest.raises(WaitTimeout):
            server.recv_some(memoryview(bytearray(1)))
