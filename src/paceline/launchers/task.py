"""Make of this process what its task says: a ps that serves, a worker with its session, or nothing without a cluster.

Called by paceline.init in a script, by launchers/entry and by launchers/threads; the only place that knows both sides.
"""

import atexit
import errno
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from paceline import hangup
from paceline.cluster.cores import usable_cores
from paceline.cluster.discovery import Assignment, discover
from paceline.cluster.listening import by_whom
from paceline.cluster.membership import incarnation_by_hand
from paceline.cluster.spec import Addresses, ClusterSpec, Task
from paceline.errors import UsageError
from paceline.exits import let_errors_set_the_exit_code
from paceline.launchers.entry import TENSORFLOW_THREADS, THREADS, loaded_with
from paceline.launchers.gpus import environ_of
from paceline.launchers.notice import tell_lost
from paceline.telemetry import lines, losses
from paceline.telemetry.output import keep_printing
from paceline.telemetry.paths import ByHand, RunPaths
from paceline.transport import port_reservation
from paceline.transport.base import split
from paceline.worker.context import Context
from paceline.worker.script import script_line
from paceline.worker.session import WorkerSession

NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
JOINED = "run folder"  # how a worker found its run that joins one

_here = threading.local()  # launchers/threads puts a thread's own assignment here
_sessions: list[WorkerSession] = []


@contextmanager
def in_this_thread(assignment: Assignment) -> Iterator[list[WorkerSession]]:
    """Let paceline.init() in this thread find this assignment; the sessions it starts are in the list."""
    _here.assignment, _here.sessions = assignment, []
    try:
        yield _here.sessions
    finally:
        _here.assignment = None


def init(
    cluster: ClusterSpec | Mapping[str, Addresses] | None = None, flags: bool = False, mode: str | None = None
) -> Context:
    """Find this process's task. In a ps task this serves and never returns; without a cluster it changes nothing.

    `mode` is the script's own choice, for tasks started by hand; a --mode on the command line wins.

    >>> init().num_workers
    1
    """
    return Context(start_session(cluster, flags, mode))


def start_session(
    cluster: ClusterSpec | Mapping[str, Addresses] | None = None, flags: bool = False, mode: str | None = None
) -> WorkerSession:
    """Find this process's task and start its session; see init."""
    given = getattr(_here, "assignment", None)
    if given is None:
        let_errors_set_the_exit_code()
    argv = sys.argv[1:] if mode is None else [f"--mode={mode}", *sys.argv[1:]]  # the last one counts
    assignment: Assignment | None = given or discover(cluster=cluster, flags=flags, argv=argv)
    if assignment is None:
        return WorkerSession(None, flush_line)
    if given is None:
        keep_printing(is_task=True)
        hangup.as_interrupt()
        assignment = _by_hand(assignment)
        _heed_threads()
    for session in _sessions if given is None else _here.sessions:
        if session.assignment is not None and session.assignment.task == assignment.task:
            session.check_owner("paceline.init()")
    if assignment.task.job == "ps":
        serve_ps(assignment)
        sys.exit(0)
    if given is not None:
        session = WorkerSession(assignment, _quiet)
        _here.sessions.append(session)
        return session
    announce(assignment)
    if mode not in (None, assignment.settings.mode):
        flush_line(
            f"This script's own mode is {mode}, but the cluster was started with mode {assignment.settings.mode}"
        )
    _reserve(assignment)
    session = WorkerSession(assignment, flush_line)
    if "torch" in sys.modules:
        session.pin()  # from here on plain "cuda" means this worker's own card
    _sessions.append(session)
    atexit.register(_close_at_exit)
    return session


def _by_hand(assignment: Assignment) -> Assignment:
    """By hand nobody counts restarts, so the clock does."""
    if assignment.source == "launcher":
        return assignment
    _share_cores(assignment)
    _write_cluster(assignment)
    return msgspec.structs.replace(assignment, incarnation=incarnation_by_hand(time.time()))


def _write_cluster(assignment: Assignment) -> None:
    """Write cluster.json of tasks that were started by hand, where `paceline ctl` and `kv` look for it."""
    settings = assignment.settings
    if settings.run_dir is None or assignment.source in ("launcher", JOINED):
        return
    paths = RunPaths(settings.run_dir)
    try:
        paths.write_by_hand(assignment.cluster, ByHand(settings.tls, settings.insecure))
    except OSError as error:
        if error.errno in NOT_OURS:
            raise UsageError(
                f"--run-dir {settings.run_dir} cannot be used by {assignment.task} ({error.strerror}), so nothing "
                "could be saved; give another folder, or ask for access to this one."
            ) from error
        losses.tell(paths.cluster, error, "`paceline ctl` and `kv` need the address of a ps instead of this folder")


def _heed_threads() -> None:
    """A script that sets OMP_NUM_THREADS before it imports torch means it, also where torch was there before it."""
    wanted = os.environ.get(THREADS, "")
    if loaded_with and wanted != loaded_with[THREADS] and wanted.isdecimal() and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(max(1, int(wanted)))


def _share_cores(assignment: Assignment) -> None:
    """As `paceline run` does: the workers of one host divide its cores, unless the user has said how many threads."""
    if "OMP_NUM_THREADS" in os.environ or assignment.task not in assignment.cluster.tasks_beside(assignment.task):
        return
    started = assignment.cluster.workers[: assignment.settings.started_workers]
    workers = [t for t in assignment.cluster.tasks_beside(assignment.task) if t in started]
    threads = max(1, usable_cores() // max(1, len(workers)))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    for name in TENSORFLOW_THREADS:
        os.environ.setdefault(name, str(threads))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    flush_line(f"OMP_NUM_THREADS={threads}: {len(workers)} workers on this host; set it to choose otherwise")


def announce(assignment: Assignment) -> None:
    """The first lines of a task's log."""
    flush_line(lines.job_line(assignment.task.job))
    flush_line(lines.task_line(assignment.task.index))
    for line in lines.cluster_lines(assignment.cluster, assignment.settings.log_style):
        flush_line(line)
    flush_line(f"Found by: {assignment.source}")


def serve_ps(assignment: Assignment) -> None:
    """Be a ps until every worker has closed or is gone for good."""
    from paceline.launchers.serving import serve

    os.environ.update(environ_of(assignment.task, assignment.settings))  # a ps needs no GPU
    announce(assignment)
    _write_cluster(assignment)
    serve(assignment, flush_line, is_main=threading.current_thread() is threading.main_thread())


def finish(is_ok: bool, is_interrupted: bool = False) -> None:
    """After the script: close what it left open. After a failure without a word, so that the ps sees a death."""
    servers = sys.modules.get("paceline.ingraph.server")
    if servers is not None:
        servers.finish(is_ok)
    while _sessions:
        _sessions.pop().close(is_ok, is_interrupted)


def give_up() -> None:
    """After Ctrl+C: whoever pressed it at a task started by hand does not start it again, so the ps need not wait."""
    given_up = [session.assignment for session in _sessions if session.owner.is_here]
    finish(is_ok=False, is_interrupted=True)
    for each in given_up:
        if each is not None and each.source != "launcher" and each.task in each.cluster.workers:
            lane, run_dir = each.settings.lane, each.settings.run_dir
            tell_lost(each.cluster, each.secret, each.task, each.incarnation, lane, 0.0, run_dir)


def _close_at_exit() -> None:
    error = getattr(sys, "last_value", None)
    if isinstance(error, KeyboardInterrupt):
        give_up()
    else:
        finish(error is None)


def flush_line(text: str) -> None:
    """Print a line so that it is in the log at once, even when the log is a file."""
    print(text, flush=True)


def _quiet(line: str) -> None:
    """Print nothing: threads of one process share its output."""


def _reserve(assignment: Assignment) -> None:
    if assignment.task.job in assignment.cluster.jobs:
        hold(assignment.cluster, assignment.task)
        address = assignment.cluster.address(assignment.task)
        if port_reservation.is_reserved(address):
            flush_line(lines.started_line(address, assignment.settings.log_style))


def _is_spawned() -> bool:
    """Whether multiprocessing has started this process and imported the script; elsewhere the name is an alias of
    __main__, or missing."""
    return getattr(sys.modules.get("__mp_main__"), "__name__", "") == "__mp_main__"


def hold(cluster: ClusterSpec, task: Task) -> None:
    """A worker holds its own address too, so that two tasks cannot be started as one by mistake; UsageError if taken.

    Nothing happens when this process holds it already.
    """
    address = cluster.address(task)
    try:
        port_reservation.reserve(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and _is_spawned():
            raise UsageError(
                f"paceline.init(){script_line()} in a process that the script has started, while {task} itself runs: "
                "such a process imports the script, so put what only the worker does under "
                '`if __name__ == "__main__":`'
            ) from error
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"{address} of {task} is in use{by_whom(split(address)[1])}") from error
        return  # not an address of this host: behind NAT, say. Nobody needs to reach a worker
