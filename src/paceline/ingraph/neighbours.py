"""WHOM can this process call? The tasks of its cluster, each reached when it is first needed.

Asked by ingraph/op for a scope that names a task, and by the master of a session. Who this process is comes from its
paceline.Server, from paceline.connect, or from where paceline.init would find it.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from paceline.cluster.devices import Device
from paceline.cluster.discovery import Assignment, discover, discover_as
from paceline.cluster.pinning import mark
from paceline.cluster.spec import Addresses, ClusterSpec, Task
from paceline.errors import UsageError
from paceline.exits import ends_waits, let_errors_set_the_exit_code
from paceline.frameworks.torch.devices import here, say_once
from paceline.ingraph import scope
from paceline.ingraph.hardware import run_on
from paceline.ingraph.remote import Remote
from paceline.telemetry.lines import placed_line
from paceline.transport.base import Stream
from paceline.transport.security import Role

if TYPE_CHECKING:
    from paceline.ingraph.op import Op

LOCALHOST = Task("localhost", 0)  # TensorFlow's name for the task of a process that is in no cluster


class Neighbours:
    """The cluster as one of its tasks, or a client outside it, sees it."""

    def __init__(self, assignment: Assignment, is_serving: bool = False) -> None:
        self.assignment = assignment
        self.is_serving = is_serving  # then what is meant for this very task needs no connection
        self.is_logged = assignment.settings.log_device_placement
        self._logged: set[str] = set()
        self._remotes: dict[Task, Remote] = {}
        self._lock = threading.Lock()

    @property
    def cluster(self) -> ClusterSpec:
        return self.assignment.cluster

    @property
    def task(self) -> Task:
        return self.assignment.task

    @property
    def log_style(self) -> str:
        return self.assignment.settings.log_style

    @property
    def address(self) -> str:
        """Where this process serves; nowhere: empty."""
        return self.cluster.address(self.task) if self.is_serving else ""

    @property
    def serving_tasks(self) -> list[Task]:
        """Who can run ops: everybody, but a launched ps, and one that was found to be one, holds parameters."""
        jobs = [job for job in self.cluster.jobs if job != "ps" or self.assignment.source != "launcher"]
        with self._lock:
            ps = [task for task, remote in self._remotes.items() if remote.is_ps]
        tasks = [Task(job, index) for job in jobs for index in self.cluster.task_indices(job)]
        return [task for task in tasks if task not in ps]

    def remote(self, task: Task) -> Remote:
        """The way to a task of the cluster; nothing is sent yet."""
        address = self.cluster.address(task)
        self.check_serves(task)
        with self._lock:
            if task not in self._remotes:
                self._remotes[task] = remote_to(self.assignment, task.device, address)
            return self._remotes[task]

    def check_serves(self, task: Task) -> None:
        """Refuse a task that is known to run no ops."""
        serving_tasks = self.serving_tasks
        if task not in serving_tasks:
            names = ", ".join(str(each) for each in serving_tasks)
            raise UsageError(f"{task} holds parameters and runs no ops; name one of: {names}.")

    def call(self, device: Device, op: "Op[..., Any]", args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an op on a device of the cluster, wherever that is."""
        task = self.task_of(device)
        if self.is_logged:
            self.log(op.kind, device.filled(task), lambda: self.gpus_of(task))
        if task == self.task and self.is_serving:
            return run_here(device, op, args, kwargs)
        remote = self.remote(task)
        try:
            return remote.call(op.name, args, kwargs, str(device.hardware))
        except UsageError:
            self.check_serves(task)  # what it has turned out to be says more
            raise

    def task_of(self, device: Device) -> Task:
        """The task that a device string means, or a sentence about why there is none."""
        if device.job is None and self.task.job not in self.cluster.jobs:
            raise UsageError(
                f"Device '{device}' names no job; name one of this cluster's: {', '.join(self.cluster.jobs)}."
            )
        task = device.filled(self.task).check(self.cluster).task_of()
        assert task is not None
        return task

    def gpus_of(self, task: Task) -> list[str]:
        """The GPUs of a task, as tables show them."""
        if task == self.task and self.is_serving:
            return here().names
        return list(self.remote(task).call("hello")["gpus"])

    def log(self, kind: str, device: Device, gpus: Callable[[], Sequence[str]]) -> None:
        """Where an op went, once; `gpus` are those of that task, as tables show them."""
        line = placed_line(kind, kind, device, self.log_style)
        with self._lock:
            is_new = line not in self._logged
            self._logged.add(line)
        if is_new:
            say(f"{line}{mark(device, gpus()) if device.kind == 'GPU' else ''}")

    def close(self) -> None:
        with self._lock:
            remotes, self._remotes = list(self._remotes.values()), {}
        for each in remotes:
            each.close()

    def __enter__(self) -> "Neighbours":
        return self

    def __exit__(self, *_: object) -> None:
        leave(self)


def remote_to(assignment: Assignment, name: str, address: str, role: Role = Role.CLIENT) -> Remote:
    """The way to any address, with this process's secret and patience."""
    settings = assignment.settings
    made = Remote(name, address, assignment.secret, settings.wait_s, settings.lane, say, role, settings.log_style)
    _ways.add(made)
    ends_waits.add(_end_waits)
    return made


def _end_waits() -> None:
    """Towers ask in threads of their own."""
    for each in list(_ways):
        each.close()


def connect(cluster: ClusterSpec | Mapping[str, Addresses]) -> Neighbours:
    """Be a client of a cluster without being one of its tasks, from now on or as a context manager.

    >>> with connect({"worker": ["localhost:2222"]}) as neighbours:
    ...     neighbours.cluster.jobs
    ['worker']
    """
    let_errors_set_the_exit_code()
    made = Neighbours(discover_as(cluster))
    become(made)
    return made


def become(made: Neighbours) -> None:
    """From now on this process sees the cluster like this."""
    _latest.append(made)
    _stopped.discard(made.address)


def leave(made: Neighbours) -> None:
    if made in _latest:
        _latest.remove(made)
        _stopped.add(made.address)
    made.close()


def was_stopped(address: str) -> bool:
    """Whether this process has served at that address, and does no more."""
    return address in _stopped


def current() -> Neighbours:
    """As this process, or the op that it serves just now, sees its cluster."""
    serving = _serving.get()
    if serving is not None:
        return serving
    with _finding:
        if not _latest:
            assignment = discover(is_training=False)
            if assignment is None:
                raise UsageError(
                    "A device with a job needs a cluster, and this process knows none; make a paceline.Server, call "
                    "paceline.connect(cluster), or start it with `paceline run`."
                )
            _latest.append(Neighbours(assignment))
        return _latest[-1]


@contextmanager
def serving(neighbours: Neighbours, caller: Stream | None = None) -> Iterator[None]:
    """What is called inside, in this thread, sees the cluster like this; `caller` is the connection it came on."""
    tokens = _serving.set(neighbours), _caller.set(caller)
    try:
        yield
    finally:
        _serving.reset(tokens[0])
        _caller.reset(tokens[1])


def served() -> Task | None:
    """The task for which this thread runs something just now; None: it runs the program itself."""
    serving = _serving.get()
    return serving.task if serving is not None else None


def caller() -> Stream | None:
    """The connection on which came what this thread runs; None: nobody called it."""
    return _caller.get()


def still_wanted() -> Callable[[], bool]:
    """Whether the caller of what this thread runs is still connected; may be asked from any thread."""
    stream = caller()
    return lambda: stream is None or not stream.is_ended()


def run_at(device: Device, op: "Op[..., Any]", args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op where a scope says; one that names hardware only stays in this process."""
    if device.job is not None or device.task is not None:
        return current().call(device, op, args, kwargs)
    if _is_logged():
        try:
            me = current()
            me.log(op.kind, device.filled(me.task), lambda: here().names)
        except UsageError:  # in no cluster
            line = placed_line(op.kind, op.kind, device.filled(LOCALHOST))
            say_once(f"{line}{mark(device, here().names)}", say)
    return run_here(device, op, args, kwargs)


def _is_logged() -> bool:
    """Whether it is to be said where ops of this process go."""
    known = _serving.get() or (_latest[-1] if _latest else None)
    return known.is_logged if known is not None else here().use.is_logged


def run_here(device: Device, op: "Op[..., Any]", args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with scope.fresh():
        return run_on(device, op.fn, args, kwargs)


def say(line: str) -> None:
    """Print a line so that it is in the log at once, even when the log is a file."""
    print(line, flush=True)


_latest: list[Neighbours] = []
_stopped: set[str] = set()  # addresses
_ways: "weakref.WeakSet[Remote]" = weakref.WeakSet()  # to other tasks, as long as somebody has them
_finding = threading.Lock()
_serving: ContextVar[Neighbours | None] = ContextVar("serving", default=None)
_caller: ContextVar[Stream | None] = ContextVar("caller", default=None)
