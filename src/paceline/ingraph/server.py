"""HOW does a task offer itself to clients? `paceline.Server`: it listens, runs what it is called for, and joins.

Made by the user's script, as TensorFlow's programs do. It listens in a thread from the moment it is made, so a session
in the same process finds it. A client that holds the secret may call ops, the chief alone may end the task; nobody
else gets past transport/acceptor.
"""

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import msgspec

from paceline import forks, hangup
from paceline.cluster.discovery import Assignment, discover, discover_as
from paceline.cluster.listening import listen
from paceline.cluster.pinning import GpuUse, beside
from paceline.cluster.spec import Addresses, ClusterSpec, Task
from paceline.errors import EXIT_INTERRUPTED, ClusterError, Refused, UsageError
from paceline.exits import let_errors_set_the_exit_code
from paceline.frameworks.torch import devices as torch_devices
from paceline.ingraph import adopted, copies
from paceline.ingraph.aside import Aside
from paceline.ingraph.calls import Calls
from paceline.ingraph.config import ConfigProto
from paceline.ingraph.master import Master
from paceline.ingraph.neighbours import Neighbours, become, leave, remote_to, say
from paceline.ingraph.parts import Parts
from paceline.ingraph.remote import ALIVE, STOP
from paceline.telemetry import lines
from paceline.telemetry.output import keep_printing
from paceline.telemetry.paths import RunPaths
from paceline.telemetry.records import OVER, RUNS, SERVES, WorkerReport
from paceline.telemetry.sink import append
from paceline.transport import port_reservation
from paceline.transport.acceptor import Acceptor
from paceline.transport.security import Role
from paceline.worker.script import check_owner

assert copies.tower and adopted.update  # every server has what towers and placed modules call
END_S = 2.0  # how long stop() waits for calls that it has just cut off
LOOK_S = 1.0  # how often join() looks up; a signal is seen between two waits, on every system
TAIL_BYTES = 4096
LOCALHOST = "localhost"


class Server:
    """One task of a cluster that runs ops for clients.

    Without a cluster it is found where paceline.init finds it: `paceline run`, flags, settings.py or TF_CONFIG.

    >>> with Server.create_local_server() as server:  # doctest: +ELLIPSIS
    ...     server.target.partition(":")[0]
    Cluster: job local -> {0 -> localhost:...}
    Started server with target: paceline://localhost:...
    'paceline'
    """

    def __init__(
        self,
        cluster: "ClusterSpec | Mapping[str, Addresses] | None" = None,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: ConfigProto | None = None,
        start: bool = True,
    ) -> None:
        let_errors_set_the_exit_code()
        keep_printing(is_task=True)
        hangup.as_interrupt()
        self._owner = forks.Owner()
        self._assignment = _assignment(cluster, job_name, task_index)
        self.neighbours = Neighbours(self._assignment, is_serving=True)
        use = (config or ConfigProto()).gpu_use(GpuUse.of(self._assignment.settings))
        torch_devices.serve_all(use, say, beside(self.cluster, self.task, self.neighbours.serving_tasks))
        self.neighbours.is_logged = use.is_logged
        self._over = threading.Event()
        self._is_started = False
        self._phase = RUNS  # as a client, until it joins
        self._parts = Parts(self.neighbours)
        self._master = Master(self.neighbours, self._parts, say)
        verbs: dict[str, Callable[..., Any]] = {
            ALIVE: lambda: None,
            **self._parts.verbs,
            **self._master.verbs,
        }
        self._calls = Calls(self.neighbours, verbs, self._stopped_by, self._master.left)
        self._acceptor = Acceptor(self._assignment.secret, self._calls.serve)
        if start:
            self.start()

    @staticmethod
    def create_local_server(config: ConfigProto | None = None, start: bool = True) -> "Server":
        """A cluster of this process alone: job `local`, task 0, at a free port."""
        address = f"{LOCALHOST}:{port_reservation.free_port(LOCALHOST)}"
        return Server({"local": [address]}, "local", 0, config=config, start=start)

    @property
    def task(self) -> Task:
        """Who this is."""
        return self._assignment.task

    @property
    def cluster(self) -> ClusterSpec:
        return self._assignment.cluster

    @property
    def target(self) -> str:
        """What paceline.Session is opened at."""
        return f"paceline://{self.cluster.address(self.task)}"

    def start(self) -> None:
        """Listen; done already unless the server was made with start=False."""
        if self._is_started:
            return
        self._is_started = True
        for line in lines.cluster_lines(self.cluster, self.neighbours.log_style):
            say(line)
        _listen(self._acceptor, self._assignment)
        become(self.neighbours)
        _servers.append(self)
        _made.append(self)
        atexit.register(self.stop)
        _tell_phase(self._assignment, self._phase)

    def join(self) -> None:
        """Serve until this task is stopped: by SIGTERM, Ctrl+C, stop(), or the end of a launched run's client."""
        check_owner(self._owner, "server.join()")
        self._phase = SERVES
        _tell_phase(self._assignment, self._phase)
        aside = Aside(self._assignment)
        try:
            with _on_sigterm(self._over.set):
                aside.tell()
                while not self._over.wait(LOOK_S):
                    if _client_is_over(self._assignment):  # it failed, or ended before this task could be told
                        break
                    aside.tell()
        except KeyboardInterrupt:
            say("Interrupted.")
            self.stop()
            raise SystemExit(EXIT_INTERRUPTED) from None
        finally:
            aside.close()
        self.stop()

    def stop(self) -> None:
        """Listen no more; calls that run are cut off, and join() returns. In a forked child nothing is done."""
        if not self._owner.is_here:
            return
        self._over.set()
        if self not in _servers:
            return
        _servers.remove(self)
        atexit.unregister(self.stop)
        self._acceptor.shut()
        self._parts.close()
        self._acceptor.wait(END_S)
        leave(self.neighbours)

    def stop_others(self) -> None:
        """Let every other task of the cluster that is there return from join(), which they do for the chief only."""
        for task in self.neighbours.serving_tasks:
            if task != self.task:
                remote = remote_to(self._assignment, task.device, self.cluster.address(task), Role.WORKER)
                with suppress(ClusterError):  # whoever is not there need not be stopped
                    remote.call(STOP, (str(self.task),), wait_s=0.0)
                remote.close()

    def _stopped_by(self, name: str) -> None:
        """Another task says that all is over; as at a ps, that is the chief's to say."""
        chief = self.cluster.workers[0] if self.cluster.workers else None
        if chief is None or name != str(chief):
            who = f"only the chief, {chief}, may" if chief is not None else "nobody but itself may"
            raise Refused(f"{name} asked for the end of a task: {who} stop {self.task.device}")
        self._over.set()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def finish(is_ok: bool) -> None:
    """After a script that was launched: when the chief is done as a client, the tasks that only join are done too."""
    while _made:
        server = _made.pop()
        if not server._owner.is_here:
            continue
        if is_ok and server._assignment.source == "launcher" and server.task in server.cluster.workers:
            _report(server._assignment, server._phase)
            if server.task == server.cluster.chief:
                server.stop_others()
        server.stop()


def _report(assignment: Assignment, phase: str) -> None:
    """A worker that served ops has done its part, though it trained nothing: the summary is not to call it lost."""
    if assignment.settings.run_dir is not None:
        path = RunPaths(assignment.settings.run_dir).telemetry(assignment.task)
        report = WorkerReport(index=assignment.cluster.worker_index(assignment.task), ops=phase)
        append(path, "report", task=str(assignment.task), report=msgspec.to_builtins(report))


def _tell_phase(assignment: Assignment, phase: str) -> None:
    """What a worker of a launched run does, for whoever looks on."""
    if assignment.source == "launcher" and assignment.settings.run_dir is not None:
        append(RunPaths(assignment.settings.run_dir).telemetry(assignment.task), "tick", phase=phase)


def _client_is_over(assignment: Assignment) -> bool:
    """Whether the chief of a launched run has ended for good, as the launcher has written down."""
    run_dir, workers = assignment.settings.run_dir, assignment.cluster.workers
    if assignment.source != "launcher" or run_dir is None or not workers or assignment.task == workers[0]:
        return False
    try:
        with RunPaths(run_dir).telemetry(workers[0]).open("rb") as records:
            records.seek(max(0, records.seek(0, os.SEEK_END) - TAIL_BYTES))
            return f'"kind":"{OVER}"'.encode() in records.read()
    except OSError:
        return False


def _assignment(
    cluster: "ClusterSpec | Mapping[str, Addresses] | None", job_name: str | None, task_index: int | None
) -> Assignment:
    if cluster is None:
        if job_name is not None or task_index is not None:
            raise UsageError("A server with job_name or task_index needs the cluster too: Server(cluster, …).")
        found = discover(flags=True, is_training=False)
        if found is None:
            raise UsageError(
                "No cluster was found for this server; give Server(cluster, job_name=…, task_index=…), start it with "
                "`paceline run`, or take Server.create_local_server()."
            )
        return found
    spec = ClusterSpec(cluster)
    if job_name is None and len(spec.jobs) == 1:
        job_name = spec.jobs[0]
    if job_name is None:
        raise UsageError(f"Which job is this server of? Give job_name, one of: {', '.join(spec.jobs)}.")
    return discover_as(spec, job_name, task_index)


def _listen(acceptor: Acceptor, assignment: Assignment) -> None:
    address, lane = assignment.cluster.address(assignment.task), assignment.settings.lane
    port_reservation.release(address)
    try:
        listen(assignment, acceptor.listen, "auto" if lane == "inproc" else lane, say)
    except UsageError:
        acceptor.shut()
        raise
    say(lines.started_line(address, assignment.settings.log_style))


@contextmanager
def _on_sigterm(act: Callable[[], None]) -> Iterator[None]:
    """A script's own handler stays; another thread than the main one may set none."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        act()

    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


_servers: list[Server] = []  # that listen
_made: list[Server] = []  # since the script began
