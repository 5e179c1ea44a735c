"""WHO starts the tasks of one host? One nursery for all of them, and a keeper for the memory of every ps.

Called by launchers/crew for this host, and by hosts/agent on every other one: the same everywhere. Must never
decide whether or when: a task is started as often as it is told.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from paceline.cluster.discovery import Assignment, encode_for_child
from paceline.cluster.settings import Settings
from paceline.cluster.spec import Task
from paceline.launchers import gpus, keeper
from paceline.launchers.children import Children
from paceline.launchers.entry import TENSORFLOW_THREADS, Program
from paceline.launchers.frameworks import compiles
from paceline.launchers.nursery import NoNursery, Nursery
from paceline.telemetry import losses
from paceline.telemetry.losses import Loss, Losses

PATIENT = {"GOMP_SPINCOUNT": "1000"}  # threads that spin for long take the cores from other tasks' threads


class Start(msgspec.Struct, frozen=True):
    """One start of a task."""

    assignment: Assignment
    program: Program | None  # None: a ps
    log: Path

    @property
    def task(self) -> Task:
        return self.assignment.task


class Starter(Protocol):
    """Who starts tasks, on this host or on many; all of them are among its `children`."""

    children: Children

    def start(self, start: Start) -> None:
        """Begin a task's process."""

    def refusal(self, task: Task) -> str:
        """Why it cannot be started again, in a few words; "": it can."""

    def has_memory(self, task: Task) -> bool:
        """Whether a ps that is started now finds what an earlier one knew."""

    def forget(self, task: Task) -> None:
        """The next start of this ps is an empty one."""

    def losses(self) -> list[Loss]:
        """Return the files that tasks could not write, as told since the last call."""

    def close(self) -> bool:
        """The run is over, and all processes have ended; whether all that they left is in the run folder now."""


class Here:
    """The tasks of this host. `environ`: what each finds around it, apart from its own assignment."""

    def __init__(self, environ: Mapping[str, str], program: Program, settings: Settings, ps: Sequence[Task]) -> None:
        self._environ = environ
        self._nursery = open_nursery(environ, will_compile(program, settings))
        is_kept = settings.max_restarts > 0 and sys.platform == "linux"
        self._keepers = {task: keeper.Keeper(str(task)) for task in ps} if is_kept else {}
        self.children = Children(self._nursery)
        self._losses = Losses()

    def start(self, start: Start) -> None:
        task, settings = start.task, start.assignment.settings
        own = {**gpus.environ_of(task, settings), **encode_for_child(start.assignment)}
        environ = {**self._environ, **own}
        keeper_of = self._keepers.get(task)
        named = {losses.VARIABLE: self._losses.writer}
        if keeper_of is None:
            self.children.start(task, start.program, environ, start.log, named)
            return
        with keeper_of.connect() as side:
            self.children.start(task, start.program, environ, start.log, {**named, keeper.VARIABLE: side.fileno()})

    def refusal(self, task: Task) -> str:
        return ""

    def has_memory(self, task: Task) -> bool:
        return task in self._keepers and bool(self._keepers[task].names)

    def forget(self, task: Task) -> None:
        if task in self._keepers:
            self._keepers[task].forget()

    def losses(self) -> list[Loss]:
        return self._losses.new()

    def close(self) -> bool:
        self._losses.close()
        for each in self._keepers.values():
            each.close()
        if self._nursery is not None:
            self._nursery.close()
        return True


def environ(around: Mapping[str, str], threads: str) -> dict[str, str]:
    """What every task of a host has in its environment, apart from its own assignment."""
    as_many = dict.fromkeys(TENSORFLOW_THREADS, threads)
    patient = {} if "OMP_WAIT_POLICY" in around else PATIENT
    return {**as_many, **patient, **around, "OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}


def open_nursery(environ: Mapping[str, str], compiles: bool) -> Nursery | None:
    """One that loads what tasks need, or None where there can be none."""
    try:
        return Nursery(environ, compiles=compiles)
    except (NoNursery, OSError):
        return None


def will_compile(program: Program, settings: Settings) -> bool:
    """Whether workers will import torch's compiler: torch's own optimizer.step() does, and a script that compiles."""
    return settings.mode == "local" or compiles(program)
