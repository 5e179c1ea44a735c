"""WHO answers ops in the tests of this folder? Two worker tasks in threads of this process, over real sockets.

Gives the fixture `tasks`. The process itself is a client of that cluster, and none of its tasks.
"""

from collections.abc import Iterator

import pytest

from paceline.ingraph.neighbours import connect
from paceline.ingraph.server import Server
from paceline.launchers.ports import Reserved


class Tasks:
    """The servers of worker:0 and worker:1."""

    def __init__(self, addresses: list[str]) -> None:
        self.cluster = {"worker": addresses}
        self._servers = [Server(self.cluster, "worker", index) for index in range(len(addresses))]

    def stop(self, index: int) -> None:
        self._servers[index].stop()

    def close(self) -> None:
        for server in self._servers:
            server.stop()


@pytest.fixture
def tasks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tasks]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    monkeypatch.setattr("sys.argv", ["train.py", "--wait-s=1"])
    with Reserved() as ports:
        addresses = ports.addresses(2)
        ports.before_start()
        made = Tasks(addresses)
        try:
            with connect(made.cluster):
                yield made
        finally:
            made.close()
