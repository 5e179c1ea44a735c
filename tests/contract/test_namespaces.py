"""WHAT is one host? An abstract socket does not cross network namespaces, so shm is never taken for two (trap 14)."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from lane_pairs import listening

from paceline.errors import ConnectionLost
from paceline.transport import LANES

CONNECT = """
import sys
from paceline.errors import ConnectionLost
from paceline.transport import LANES

try:
    LANES["shm"].connect(sys.argv[1], 1.0)
    print("connected")
except ConnectionLost:
    print("no way")
"""
BY_PATH = """
import socket, sys
socket.socket(socket.AF_UNIX).connect(sys.argv[1])
print("connected")
"""


def elsewhere(program: str, *args: str) -> str:
    """What a Python program prints in a network namespace of its own."""
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("NOT TESTED: two network namespaces need root and unshare")
    command = ["unshare", "--net", sys.executable, "-c", program, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"NOT TESTED: no second network namespace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_shm_does_not_reach_into_another_namespace() -> None:
    with listening("shm") as (address, listener):
        assert elsewhere(CONNECT, address) == "no way"
        here = LANES["shm"].connect(address, 1.0)
        listener.accept().close()
        here.close()


def test_a_path_would_have_crossed(tmp_path: Path) -> None:
    """Why the name is abstract; and that the test above could fail."""
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        assert elsewhere(BY_PATH, path) == "connected"


def test_the_same_address_may_be_served_in_two_namespaces() -> None:
    with listening("shm") as (address, _):
        program = f"from paceline.transport import LANES; LANES['shm'].listen({address!r}); print('served')"
        assert elsewhere(program) == "served"
        with pytest.raises(OSError, match="in use"):
            LANES["shm"].listen(address)


def test_localhost_and_its_number_are_one_name() -> None:
    with listening("shm") as (address, listener):
        stream = LANES["shm"].connect(address.replace("127.0.0.1", "localhost"), 1.0)
        listener.accept().close()
        stream.close()
        with pytest.raises(ConnectionLost):
            LANES["shm"].connect(address.replace("127.0.0.1", "no-such-host.invalid"), 1.0)
