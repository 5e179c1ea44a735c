"""A ps whose run is over has no thread left: one that still frees tensors would abort the interpreter's end."""

import socket
import threading
from typing import Any

import pytest

from paceline.cluster.discovery import Assignment
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import ConnectionLost
from paceline.launchers.ports import Reserved
from paceline.launchers.serving import make_service
from paceline.server import service as serving

UNWINDS_S = 0.3  # how long the connection's thread takes to end, which is what close() has to wait for


def test_no_thread_of_a_ps_outlives_its_service(ports: Reserved, monkeypatch: pytest.MonkeyPatch) -> None:
    connected = threading.Event()

    def slow_to_end(stream: Any, secret: bytes) -> None:
        connected.set()
        with pytest.raises(ConnectionLost):
            stream.recv_into(memoryview(bytearray(1)))
        threading.Event().wait(UNWINDS_S)
        raise ConnectionLost("it ended")

    monkeypatch.setattr(serving, "accept", slow_to_end)
    address, worker = ports.addresses(2)
    cluster = ClusterSpec({"ps": [address], "worker": [worker]})
    assignment = Assignment(cluster, Task("ps", 0), 1, Settings(run_id="r"), bytes(32), "launcher")
    service = make_service(assignment, lambda of, report: None)
    before = set(threading.enumerate())
    service.listen(address, ["tcp"])
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))):
        assert connected.wait(10)
        assert set(threading.enumerate()) - before
        service.close()
        assert not set(threading.enumerate()) - before
