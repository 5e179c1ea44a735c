"""A ps whose run is over has no thread left: one that still frees tensors would abort the interpreter's end."""

import gc
import os
import socket
import threading
from typing import Any

import pytest
import torch

import paceline
from paceline.cluster.discovery import Assignment
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import ConnectionLost
from paceline.launchers.ports import Reserved
from paceline.launchers.serving import make_service
from paceline.transport import acceptor

UNWINDS_S = 0.3  # how long the connection's thread takes to end, which is what close() has to wait for


def test_no_thread_of_a_ps_outlives_its_service(ports: Reserved, monkeypatch: pytest.MonkeyPatch) -> None:
    connected = threading.Event()

    def slow_to_end(stream: Any, secret: bytes) -> None:
        connected.set()
        with pytest.raises(ConnectionLost):
            stream.recv_into(memoryview(bytearray(1)))
        threading.Event().wait(UNWINDS_S)
        raise ConnectionLost("it ended")

    monkeypatch.setattr(acceptor, "accept", slow_to_end)
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


def test_a_cluster_leaves_no_descriptor_behind() -> None:
    """Many clusters in one process, as in a notebook or a test suite: memory that was handed over is given back."""

    def work(ctx: paceline.Context) -> None:
        model = torch.nn.Linear(3, 2)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    counts = []
    for _ in range(3):
        for lane in ("shm", "tcp", "inproc"):
            paceline.launch(work, ps=2, workers=2, mode="sync", lane=lane)
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1] == counts[2], counts
