"""WHO serves ops in a test? Tasks of a cluster as threads of this process, over real connections.

Used by the tests of ops and sessions through the fixture `serving`; each finds a secret of its own.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import paceline
from paceline.errors import PacelineError
from paceline.ingraph import neighbours
from paceline.ingraph.server import Server
from paceline.launchers.ports import Reserved

WAIT_S = 5.0
meeting = threading.Barrier(2)


class Serving:
    """The tasks of job `worker`; this process is their client."""

    def __init__(self, addresses: list[str]) -> None:
        self.cluster = paceline.ClusterSpec({"worker": addresses})
        self.servers: dict[int, Server] = {}
        self.client = paceline.connect(self.cluster)

    def start(self, *indices: int) -> None:
        for index in indices:
            self.servers[index] = Server(self.cluster, "worker", index)
        neighbours._latest.remove(self.client)
        neighbours.become(self.client)  # and not the server that was made last

    def target(self, index: int) -> str:
        return f"paceline://{self.cluster.task_address('worker', index)}"


@pytest.fixture
def serving(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    """Two places for tasks, of which none is started yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    monkeypatch.setattr("sys.argv", ["script.py", f"--wait-s={WAIT_S}"])
    monkeypatch.setattr("sys.excepthook", lambda *args: None)  # a server in a script changes it; here nobody should
    with Reserved() as ports, ExitStack() as stack:
        made = Serving(ports.addresses(2))
        ports.before_start()
        stack.callback(lambda: [server.stop() for server in made.servers.values()])
        stack.enter_context(made.client)
        yield made


@paceline.op
def where() -> str:
    """The task that runs this."""
    return neighbours.current().task.device


@paceline.op
def meet(x: object = None) -> object:
    """Returns only when another one is running at the same time."""
    meeting.wait(10)
    return x


@paceline.op
def double(x: object) -> object:
    return x + x  # type: ignore[operator]


@paceline.op
def fails(message: str) -> None:
    raise ValueError(message)


@paceline.op
def asks(device: str) -> str:
    """An op that calls an op elsewhere."""
    with paceline.device(device):
        return where()


@paceline.op
def returns_a_set() -> object:
    return {1, 2}


@paceline.op
def refuses() -> None:
    raise PacelineError("not today")
