"""Trap 6: progress in the lease evicts healthy workers, and the children of a DataLoader keep a dead worker alive."""

import os
import signal
import socket
from collections.abc import Callable

import pytest

from paceline.cluster.membership import Membership
from paceline.errors import ConnectionLost, WaitTimeout
from paceline.transport.base import Stream

LEASE_S = 5.0


def test_a_worker_that_compiles_is_not_silent() -> None:
    """16 s without a step, with a heartbeat a second. A lease on progress would have given it up after five."""
    members = Membership(2)
    for worker in (0, 1):
        members.join(worker, incarnation=1, now_s=0.0)
    last_step_s = 0.0
    for second in range(1, 17):
        members.heard(0, 1, float(second))
        if second <= 4:
            members.heard(1, 1, float(second))
        gone = members.expired(float(second), LEASE_S)
        assert (0, 1) not in gone
        assert ((1, 1) in gone) == (second - 4 > LEASE_S), "silence is what ends a lease"
    assert 16 - last_step_s > LEASE_S, "which the wrong way would have taken for a death"


def orphaned(make: Callable[[socket.socket], object]) -> tuple[socket.socket, int]:
    """A worker that has connected, forked a child and been killed. Returns the ps's end and the child's lifeline.

    The child lives until the lifeline is closed; it holds whatever descriptors it has inherited.
    """
    ours, theirs = socket.socketpair()
    lifeline_child, lifeline = os.pipe()
    told, tell = os.pipe()
    worker = os.fork()
    if worker == 0:
        ours.close()
        os.close(lifeline)
        stream = make(theirs)
        if os.fork() == 0:
            os.write(tell, b"1")
            os.read(lifeline_child, 1)
            os._exit(0)
        os.read(told, 1)
        assert stream is not None
        os.kill(os.getpid(), signal.SIGKILL)
    theirs.close()
    os.close(lifeline_child)
    os.waitpid(worker, 0)
    for descriptor in (told, tell):
        os.close(descriptor)
    return ours, lifeline


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_end_of_a_killed_worker_is_seen_although_its_child_lives() -> None:
    ours, lifeline = orphaned(lambda sock: sock)
    naive = Stream(ours)
    naive.set_timeout(0.2)
    with pytest.raises(WaitTimeout):
        naive.recv_into(memoryview(bytearray(1)))
    os.close(lifeline)
    with pytest.raises(ConnectionLost):  # only now that the child is gone too
        naive.set_timeout(10)
        naive.recv_into(memoryview(bytearray(1)))
    naive.close()

    ours, lifeline = orphaned(Stream)
    stream = Stream(ours)
    stream.set_timeout(10)
    with pytest.raises(ConnectionLost):
        stream.recv_into(memoryview(bytearray(1)))
    os.close(lifeline)
    stream.close()
