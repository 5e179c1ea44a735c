"""WHERE do ops and nodes go when a GPU is missing, and what is said of it? Where the server allows them to."""

from collections.abc import Iterator

import pytest
from op_servers import Serving, double, serving

import paceline
from paceline.cluster.pinning import GpuUse
from paceline.errors import UsageError
from paceline.frameworks.torch import devices as torch_devices
from paceline.ingraph import neighbours
from paceline.ingraph.graph import Graph
from paceline.ingraph.server import Server
from paceline.ingraph.session import Session

__all__ = ["serving"]


@pytest.fixture(autouse=True)
def own_config(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test says about GPUs of this process is forgotten after it."""
    monkeypatch.setattr(torch_devices, "_configured", [])
    monkeypatch.setattr(torch_devices, "_said", set())
    yield


def on_a_missing_gpu() -> Graph:
    graph = Graph()
    with graph, paceline.device("/gpu:17"):
        double(2)
    return graph


def test_a_server_that_allows_no_soft_placement_is_obeyed_by_sessions(serving: Serving) -> None:
    strict = paceline.ConfigProto(allow_soft_placement=False)
    told = "Node 'double' is placed on .*task:0/device:GPU:17, which is not there"
    with Server.create_local_server(strict) as server:
        with Session(server.target, on_a_missing_gpu()) as session, pytest.raises(UsageError, match=told):
            session.run("double")
        soft = paceline.ConfigProto(allow_soft_placement=True)
        with Session(server.target, on_a_missing_gpu(), soft) as session, pytest.raises(UsageError, match=told):
            session.run("double")


def test_a_process_that_allows_none_is_obeyed_by_its_own_sessions() -> None:
    torch_devices.configure(GpuUse(is_soft=False))
    with Session(graph=on_a_missing_gpu()) as session, pytest.raises(UsageError, match="GPU:17, which is not there"):
        session.run("double")


def test_elsewhere_the_cpu_is_used_and_that_is_said(serving: Serving, capfd: pytest.CaptureFixture[str]) -> None:
    with Server.create_local_server() as server, Session(server.target, on_a_missing_gpu()) as session:
        assert session.run("double") == 4
    assert "device:GPU:17: the CPU of that task is used instead" in capfd.readouterr().out


def test_a_scope_that_names_hardware_only_is_logged_where_it_went(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def said_of(device: str) -> list[str]:
        for _ in range(2):
            with paceline.device(device):
                double(2)
        return [line for line in capfd.readouterr().out.splitlines() if line.startswith("double")]

    assert said_of("/cpu:0") == [], "unless asked for"
    serving.start(1)
    with neighbours.serving(serving.servers[1].neighbours):
        monkeypatch.setattr(serving.servers[1].neighbours, "is_logged", True)
        assert said_of("/cpu:0") == ["double: (double): /job:worker/replica:0/task:1/device:CPU:0"]
    monkeypatch.setattr(neighbours, "_latest", [])
    torch_devices.configure(GpuUse(is_logged=True))
    in_no_cluster = "double: (double): /job:localhost/replica:0/task:0/device:GPU:17 (missing: the CPU)"
    assert said_of("/gpu:17") == [in_no_cluster]
