"""HOW do tests get a Ray? `ray start` as a user would call it, with a token, in the foreground, ended with the test.

Used by tests of `paceline run --on ray`. Must never touch another Ray of this machine: ports and folders are its own,
and nothing is stopped but what was started here.
"""

import json
import re
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from processes import BIN, GONE_S, Process, Processes

from paceline.launchers.ports import Reserved

HOURS_S = 3600.0
STARTED = "Ray runtime started"
HEAD = f"{'f' * 51}00000"  # the name that Ray's own provider of such machines gives the first one

PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
OLDER_BESIDE = """
import json, sys
from ray.autoscaler._private.monitor import Monitor
Monitor(sys.argv[1], lambda: json.load(open(sys.argv[2]))).run()
"""
NEWER_BESIDE = """
import sys
from ray.autoscaler.v2.instance_manager.config import FileConfigReader
from ray.autoscaler.v2.monitor import AutoscalerMonitor
AutoscalerMonitor(sys.argv[1], FileConfigReader(sys.argv[2], skip_content_hash=True), log_dir=sys.argv[3]).run()
"""


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
        self._port = ""  # that was reserved before
        self._more: dict[str, str] = {}  # for Ray itself

    def start_head(self, num_cpus: int, *words: str, host: str = "127.0.0.1") -> None:
        """The first machine."""
        ports = free_ports(3)
        ports[0] = self._port or ports[0]
        head = ["--head", "--port", ports[0], "--ray-client-server-port", ports[1], "--temp-dir", str(self._folder)]
        self.address, self.client = f"{host}:{ports[0]}", f"ray://{host}:{ports[1]}"
        self.dashboard = f"http://127.0.0.1:{ports[2]}"
        self._start([*head, "--node-ip-address", host, "--dashboard-port", ports[2], *words], num_cpus, self._enter)

    def start_growing(
        self, num_cpus: int, at_most: int, host: str = "127.0.0.1", is_beside: bool = False, is_newer: bool = False
    ) -> None:
        """A first machine whose autoscaler, Ray's own, adds up to so many with a CPU each: processes of this host.

        `is_beside`: it is nobody's child, and has its settings in memory, as KubeRay's; `is_newer`: Ray's second one.
        """
        [self._port] = free_ports(1)
        config = self._folder / "autoscaling.json"
        config.write_text(json.dumps(growing(num_cpus, at_most, f"{host}:{self._port}")))
        self._more = {
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_FAKE_CLUSTER": "1",
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
        }
        if is_newer:
            self._more |= {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": HEAD}
            self._more |= {"RAY_NODE_TYPE_NAME": "ray.head.default"}
        self.start_head(num_cpus, "--no-monitor" if is_beside else f"--autoscaling-config={config}", host=host)
        if is_beside:
            program = NEWER_BESIDE if is_newer else OLDER_BESIDE
            words = ["-c", program, self.address, config, self._folder]
            beside = self._processes.start(sys.executable, *words, within_s=HOURS_S, **self.environ, **self._more)
            self._started.append(beside)

    def add(self, num_cpus: int, *words: str, enter: Sequence[str] | None = None) -> Process:
        """Another machine."""
        return self._start(["--address", self.address, *words], num_cpus, self._enter if enter is None else enter)

    def _start(self, words: list[str], num_cpus: int, enter: Sequence[str]) -> Process:
        command = [*enter, BIN / "ray", "start", "--block", "--disable-usage-stats", "--num-cpus", num_cpus, *words]
        process = self._processes.start(*command, name="ray start", within_s=HOURS_S, **self.environ, **self._more)
        self._started.append(process)
        process.wait_for(STARTED)
        return process

    def close(self) -> None:
        """End it, machine by machine, the head last."""
        for process in reversed(self._started):
            process.signal(signal.SIGTERM)
            process.popen.wait(30)
        if self._more:
            for each in self._processes.alive():  # machines that the autoscaler has added outlive it for a while
                each.kill()

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


def free_ports(count: int) -> list[str]:
    """None that the system gives away by itself (from 32768 on): Ray takes some of those before it listens here."""
    first = 20_000 + secrets.randbelow(11_000)
    with Reserved() as reserved:
        return [str(port) for port in reserved.anywhere(count, (first, first + 1000))]


def growing(num_cpus: int, at_most: int, address: str) -> dict[str, object]:
    """What Ray's autoscaler is told: machines with a CPU each, made of processes, while somebody waits for one."""
    return {
        "cluster_name": "growing", "max_workers": at_most, "upscaling_speed": 1.0, "idle_timeout_minutes": 5,
        "provider": {
            "type": "external", "module": PROVIDER,
            "use_node_id_as_ip": True, "gcs_address": address, "head_node_id": HEAD,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": num_cpus}, "node_config": {}, "max_workers": 0},
            "small": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": at_most},
        },
        "auth": {}, "docker": {}, "file_mounts": {}, "cluster_synced_files": [], "file_mounts_sync_continuously": False,
        **{f"{what}commands": [] for what in ("initialization_", "setup_", "head_setup_", "worker_setup_",
                                              "head_start_ray_", "worker_start_ray_")},
    }  # fmt: skip


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
