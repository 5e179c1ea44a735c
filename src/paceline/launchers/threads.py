"""HOW does a whole cluster run in one process? ps and workers as threads, for tests, notebooks and small runs.

`paceline.launch(fn, ps=1, workers=2)`. The same services, clients and frames as between processes; only the lane
differs (inproc), and random number generators are shared, so a `fn` that wants repeatable numbers brings its own.
"""

import inspect
import os
import secrets
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from paceline import forks
from paceline.cluster import chaos
from paceline.cluster.certificate import make_certificate
from paceline.cluster.discovery import Assignment
from paceline.cluster.secret import INSECURE, Secret
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.cluster.validate import check
from paceline.errors import TrainingFailed
from paceline.launchers import task as tasks
from paceline.launchers.entry import guarded
from paceline.launchers.notice import TRY_S, tell_lost
from paceline.launchers.ports import Reserved
from paceline.launchers.serving import serve
from paceline.telemetry import read, summary


def launch(
    fn: Callable[..., Any], ps: int = 1, workers: int = 2, mode: str = "async", **options: Any
) -> dict[str, Any]:
    """Run `fn` as every worker of a cluster in this process; returns the summary.

    `fn` takes the context, or nothing and calls paceline.init() itself. `options` are the flags of run by their
    Python names (lane, placement, replicas_to_aggregate, data, run_dir, …). With `started_workers` only the first so
    many are started; the others of the cluster may join.
    """
    options.setdefault("lane", "inproc")
    with tempfile.TemporaryDirectory() as folder, Reserved() as ports:
        options.setdefault("run_dir", folder)
        cluster = ClusterSpec({"ps": ports.addresses(ps), "worker": ports.addresses(workers)})
        settings = Settings(run_id=f"threads-{secrets.token_hex(4)}", mode=mode, **options)
        check(settings, cluster)
        chaos.refuse_signals(settings.chaos)
        ports.before_start()
        return _Cluster(cluster, settings, fn).run()


class _Cluster:
    def __init__(self, cluster: ClusterSpec, settings: Settings, fn: Callable[..., Any]) -> None:
        self._cluster = cluster
        self._settings = settings
        self._fn = fn
        self._secret = _new_secret(settings)
        self._errors: dict[Task, BaseException] = {}
        self._began = time.monotonic()

    def run(self) -> dict[str, Any]:
        servers = [self._thread(self._serve, t) for t in self._cluster.ps]
        workers = [self._thread(self._work, t) for t in self._cluster.workers[: self._settings.started_workers]]
        for thread in [*workers, *servers]:
            thread.join()
        told = self._sum_up()
        if self._errors:
            task, error = next(iter(self._errors.items()))
            text = "".join(traceback.format_exception(error))
            raise TrainingFailed(f"{task} failed: {error!r}\n{text}") from error
        return told

    def _thread(self, target: Callable[[Assignment], None], task: Task) -> threading.Thread:
        assignment = Assignment(self._cluster, task, 1, self._settings, self._secret, "launcher")
        thread = threading.Thread(target=target, args=(assignment,), name=str(task), daemon=True)
        thread.start()
        return thread

    def _serve(self, assignment: Assignment) -> None:
        try:
            serve(assignment, lambda line: None, is_main=False)
        except BaseException as error:
            self._errors[assignment.task] = error

    def _work(self, assignment: Assignment) -> None:
        owner = forks.Owner()
        try:
            with tasks.in_this_thread(assignment) as sessions:
                if inspect.signature(self._fn).parameters:
                    self._fn(tasks.init())
                else:
                    self._fn()
                if not owner.is_here:
                    _end_child(SystemExit())
                for each in sessions:
                    each.close()
        except BaseException as error:
            if not owner.is_here:
                _end_child(error)
            self._errors[assignment.task] = error
            has_joined = any(each.training_step is not None for each in sessions)
            for each in sessions:
                each.close(is_ok=False)
            try_s = 0.0 if has_joined else TRY_S  # a ps that it has joined, and that is not there, has ended
            tell_lost(self._cluster, self._secret, assignment.task, assignment.incarnation, self._settings.lane, try_s)

    def _sum_up(self) -> dict[str, Any]:
        run_dir = Path(self._settings.run_dir or ".")
        told = summary.build(
            self._settings,
            self._cluster,
            read.reports(run_dir),
            ok=not self._errors,
            wall_s=time.monotonic() - self._began,
            restarts=0,
            lost=[str(t) for t in self._errors],
            error=None,
        )
        summary.write(run_dir, told)
        return dict(msgspec.to_builtins(told))


def _end_child(error: BaseException) -> NoReturn:
    """End a child that the function has forked, as the end of its program would. This thread is all that there is of
    the child, and Python cannot end it in an orderly way."""

    def raises() -> None:
        raise error

    code = guarded(raises)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _new_secret(settings: Settings) -> Secret:
    value = INSECURE if settings.insecure else secrets.token_bytes(32)
    if not settings.tls or settings.run_dir is None:
        return Secret(value)
    folder = Path(settings.run_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    make_certificate(folder)
    return Secret(value, folder)
