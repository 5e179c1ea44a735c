"""WHICH faults were injected? Each is a "chaos" event in the victim's telemetry file, written before it happens.

Called by whoever injects: a task just before it kills itself, the launcher just before it does. So it writes at once,
by itself, and not through the sink, whose thread would die with the task. Must never count a fault that did not fire.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline import files
from paceline.cluster.chaos import Fault
from paceline.cluster.spec import Task
from paceline.telemetry import read
from paceline.telemetry.paths import RunPaths

CHAOS = "chaos"


class Injected(msgspec.Struct, frozen=True, kw_only=True):
    """How often one fault hit one task; 0 times: never, and nobody."""

    fault: str
    task: str | None
    times: int
    steps: list[int] = []  # where that is known


class FaultLog:
    """The faults of one task."""

    def __init__(self, paths: RunPaths, task: Task) -> None:
        self._paths = paths
        self._task = task

    def write(self, fault: Fault, step: int | None = None, times: int = 1) -> None:
        """It happens now. A line of its own, also where a killed task left half a line."""
        event = {"t": time.time(), "kind": CHAOS, "task": str(self._task), "fault": fault.text, "step": step}
        line = b"\n" + msgspec.json.encode({**event, "times": times}) + b"\n"
        with files.appending(self._paths.root, self._paths.telemetry(self._task)) as file:
            file.write(line)

    def done(self) -> set[str]:
        """The faults that have happened to this task, in this process or in one before it."""
        events = read.records(self._paths.root, self._task)
        return {str(event.fields.get("fault")) for event in events if event.kind == CHAOS}


def began_s(paths: RunPaths) -> float:
    """When the run began, which timed faults count from: all its tasks, also those started again, find it there."""
    return paths.config.stat().st_mtime if paths.config.exists() else time.time()


def injected(run_dir: Path, faults: Sequence[Fault]) -> list[Injected]:
    """What was injected, fault by fault in the order they were asked for, also those that never came."""
    times: dict[tuple[str, str], int] = {}
    steps: dict[tuple[str, str], list[int]] = {}
    for event in read.records(run_dir):
        if event.kind == CHAOS:
            key = str(event.fields.get("fault")), event.task
            count, step = event.fields.get("times"), event.fields.get("step")
            times[key] = times.get(key, 0) + (count if isinstance(count, int) else 1)
            steps.setdefault(key, []).extend([step] if isinstance(step, int) else [])
    told = []
    for fault in faults:
        hit = sorted(key for key in times if key[0] == fault.text)
        told += [Injected(fault=key[0], task=key[1], times=times[key], steps=steps[key]) for key in hit]
        told += [] if hit else [Injected(fault=fault.text, task=None, times=0)]
    return told


def told(faults: Sequence[Injected]) -> str:
    """All of them in a line.

    >>> told([Injected(fault="kill=ps:0@5", task="ps:0", times=1), Injected(fault="cut=…", task=None, times=0)])
    'kill=ps:0@5 1x; cut=… never'
    """
    parts = []
    for each in faults:
        whom = f" {each.task}" if each.task and each.task not in each.fault else ""
        parts.append(f"{each.fault}{whom} {f'{each.times}x' if each.times else 'never'}")
    return "; ".join(parts)
