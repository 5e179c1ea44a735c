"""HOW do tests get a Ray? `ray start` as a user would call it, with a token, in the foreground, ended with the test.

Used by tests of `paceline run --on ray`. Must never touch another Ray of this machine: ports and folders are its own,
and nothing is stopped but what was started here.
"""

import re
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from processes import BIN, GONE_S, Process, Processes

from paceline.launchers.ports import Reserved

HOURS_S = 3600.0
STARTED = "Ray runtime started"


class RayCluster:
    """One Ray cluster. `environ` is what whoever uses it needs: its token."""

    def __init__(self, processes: Processes, folder: Path, enter: Sequence[str] = ()) -> None:
        self._processes = processes
        self._folder = folder
        self._enter = enter
        self.environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_TMPDIR": str(folder)}
        self.address = ""
        self.client = ""
        self.dashboard = ""
        self._started: list[Process] = []

    def start_head(self, num_cpus: int, *words: str, host: str = "127.0.0.1") -> None:
        """The first machine."""
        with Reserved() as reserved:
            ports = [address.rpartition(":")[2] for address in reserved.addresses(3)]
        head = ["--head", "--port", ports[0], "--ray-client-server-port", ports[1], "--temp-dir", str(self._folder)]
        self.address, self.client = f"{host}:{ports[0]}", f"ray://{host}:{ports[1]}"
        self.dashboard = f"http://127.0.0.1:{ports[2]}"
        self._start([*head, "--node-ip-address", host, "--dashboard-port", ports[2], *words], num_cpus, self._enter)

    def add(self, num_cpus: int, *words: str, enter: Sequence[str] | None = None) -> Process:
        """Another machine."""
        return self._start(["--address", self.address, *words], num_cpus, self._enter if enter is None else enter)

    def _start(self, words: list[str], num_cpus: int, enter: Sequence[str]) -> Process:
        command = [*enter, BIN / "ray", "start", "--block", "--disable-usage-stats", "--num-cpus", num_cpus, *words]
        process = self._processes.start(*command, name="ray start", within_s=HOURS_S, **self.environ)
        self._started.append(process)
        process.wait_for(STARTED)
        return process

    def close(self) -> None:
        """End it, machine by machine, the head last."""
        for process in reversed(self._started):
            process.signal(signal.SIGTERM)
            process.popen.wait(30)

    def tasks(self) -> list[psutil.Process]:
        """The actors and the tasks' processes that run in it."""
        named = [(each, " ".join(_words(each))) for each in self._processes.alive()]
        return [each for each, text in named if re.match(r"ray::TaskActor|paceline (ps|worker):", text)]

    def actor_of(self, task: str) -> psutil.Process:
        """The actor in which a task runs."""
        for process in self.tasks():
            if " ".join(_words(process)).startswith(f"paceline {task}"):
                parent = process.parent()
                assert parent is not None
                return parent
        raise AssertionError(f"{task} does not run")

    def is_clear(self) -> bool:
        """Whether nothing of a run is left, at the latest after a while."""
        _, left = psutil.wait_procs(self.tasks(), timeout=2 * GONE_S)
        return not left


@contextmanager
def ray_cluster(processes: Processes, enter: Sequence[str] = ()) -> Iterator[RayCluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray-test-"))  # a short path: Ray's sockets lie below it
    cluster = RayCluster(processes, folder, enter)
    try:
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
