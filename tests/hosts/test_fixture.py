"""DO the hosts of the tests behave as hosts do? They reach each other by ssh, and cables can be cut and limited."""

import time
from collections.abc import Callable

import pytest
from running_hosts import RunningHost

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(120)]
Hosts = Callable[[int], list[RunningHost]]
REACH = """
import socket
try:
    socket.create_connection(('{0}', 22), 2.0)
    print('reached')
except OSError as error:
    print(type(error).__name__)
"""
SEND = "import socket; c = socket.create_connection(('{0}', 9000)); c.sendall(bytes(1_000_000)); c.recv(1)"
TAKE = """
import socket
with socket.create_server(('{0}', 9000)) as server:
    print('ready', flush=True)
    peer, _ = server.accept()
    left = 1_000_000
    while left:
        left -= len(peer.recv(65536))
"""


def test_ssh_reaches_every_host_and_its_python_is_ours(hosts: Hosts) -> None:
    first, *others = hosts(3)
    for other in others:
        said = first.ssh_to(other, "pwd; python -c 'import paceline, os; print(os.environ[\"SSH_CONNECTION\"])'")
        said.ends_with(0)
        assert said.lines[0] == str(other.folder) and said.lines[-1].split()[:3:2] == [first.address, other.address]


def test_a_cable_is_cut_and_mended(hosts: Hosts) -> None:
    first, second = hosts(2)
    second.cut()
    (how,) = first.start("python", "-c", REACH.format(second.address)).ends_with(0).lines
    assert how in ("TimeoutError", "OSError"), "nobody answers, nor refuses"
    second.mend()
    until = f"until (: </dev/tcp/{second.address}/22); do :; done 2>/dev/null"
    first.start("bash", "-c", until).ends_with(0)  # a moment later: the kernel is still asking whose address it is


def test_a_cable_is_limited(hosts: Hosts) -> None:
    first, second = hosts(2)
    second.limit("10mbit")
    taking = second.start("python", "-c", TAKE.format(second.address))
    taking.wait_for("ready")
    began_s = time.monotonic()
    sending = first.start("python", "-c", SEND.format(second.address))
    taking.ends_with(0)
    assert 0.7 < time.monotonic() - began_s < 5.0  # a megabyte
    sending.end()


def test_what_is_left_running_is_found(hosts: Hosts) -> None:
    first, second = hosts(2)
    first.ssh_to(second, "setsid sleep 100 >/dev/null 2>&1 & echo begun").ends_with(0)
    assert [each.name() for each in second.running()] == ["sleep"]
    assert first.running() == []
    second.kill()
