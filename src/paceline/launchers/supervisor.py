"""WHEN is a run over? Starts the tasks of a prepared run, watches them, ends what is left, sums up.

Called by launchers/local, hosts/many and ray/on_ray. Must never leave a process behind, nor a run
folder without summary.json.

A run: 1 start the tasks, 2 watch until the workers have ended, and start again who failed, 3 end the rest,
4 write and show the summary.
"""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import FrameType

import msgspec

from paceline import hangup
from paceline.checkpoint.request import AUTO, NONE
from paceline.cluster.chaos import parse as parse_chaos
from paceline.cluster.spec import Task
from paceline.errors import EXIT_CLUSTER, EXIT_INTERRUPTED, EXIT_NOT_SAVED, EXIT_OK, EXIT_TRAINING, EXIT_USAGE
from paceline.launchers import chaos, closing, resume_command
from paceline.launchers.children import Arrived, Children, Exited, Interrupted
from paceline.launchers.crew import Crew, Run
from paceline.launchers.failures import Failures
from paceline.launchers.here import Starter
from paceline.launchers.live import Ticks, View, make_view
from paceline.launchers.notice import RELEASE, save_soon
from paceline.launchers.restart import LOST, Over
from paceline.telemetry import faults, read, summary
from paceline.telemetry.output import complain, stream_of
from paceline.telemetry.records import PsReport, WorkerReport

NOTHING_TRAINED = "no worker called ctx.prepare(model, optimizer), so nothing was trained together"
PS_0 = Task("ps", 0)
SILENT_S = 10.0  # a tick of ps:0 that is older tells nothing
STEP_FOLDERS = "step-*[0-9]"  # complete ones; a checkpoint that is being written has another name
SAVE_FIRST_S = 15.0  # after Ctrl+C, how long the last checkpoint may take
STILL_S = 3.0  # and how long nobody may have made an update meanwhile
SAVED_LOOK_S = 0.05
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long tasks may take to end by themselves."""

    ps_s: float = 10.0  # after the last worker
    stop_s: float = 5.0  # after they were asked to
    save_s: float = 15.0  # workers after Ctrl+C: the chief saves first


class End(Enum):
    """Why the watching ended."""

    WORKERS_ENDED = "every worker has ended"
    INTERRUPTED = "interrupted"
    PS_LOST = "a ps was lost"
    OUR_FAULT = "the launcher failed"


def supervise(run: Run, patience: Patience, starter: Starter | None = None) -> int:
    """From the first process to the summary; the exit code comes back. `starter`: see Crew."""
    began = time.monotonic()
    crew = Crew(run, starter)
    children = crew.children
    failures = Failures(run, crew, make_view(run.cluster, run.paths, run.settings.started_workers, run.shows_logs))
    end = End.OUR_FAULT
    with hangup.handled(children.interrupt):
        try:
            with interrupts(children):
                crew.start_all()
                with chaos.injected(run.settings, [*run.cluster.ps, *run.started], run.paths, children):
                    end = watch(run, crew, failures)
                end_rest(run, children, failures.view, patience, end)
        finally:
            children.kill()
            children.wait_until_gone(None, patience.stop_s)
            is_whole = crew.close()
            tell_losses(crew, failures.view)
            failures.note_all(failed(children))
            failures.view.close()
            code, error = verdict(failed(children), end)
            workers, servers = read.reports(run.paths.root)
            left = left_off(run, children, workers, servers) if is_whole and not crew.lacks_records else []
            if error is None and all(each.is_lost for each in workers) and not left and not crew.lacks_records:
                code, error = EXIT_TRAINING, NOTHING_TRAINED
            if error is None and (left or not is_whole) and not crew.model and not is_saved(run):
                code, error = EXIT_NOT_SAVED, closing.NOT_SAVED
            told = sum_up(run, crew, error, time.monotonic() - began)
        causes = [*failures.report(), *map(closing.left_off, left)]
        last = closing.block(told, run.paths, causes, resume_of(run, crew), failures.will_repeat)
        print(last, file=stream_of(code), flush=True)
    return code


def watch(run: Run, crew: Crew, failures: Failures) -> End:
    """2. Until the last worker has ended, ours or joined; the others go on when one fails, but not without a ps."""
    view, children = failures.view, crew.children
    joined = Joined(run, children)
    due = time.monotonic() + view.period_s
    while children.is_interrupted or children.running("worker") or crew.awaited or joined.train():
        event = children.next_event(min(due, crew.due_s) - time.monotonic())
        tell_losses(crew, view)
        if isinstance(event, Interrupted):
            view.say("Interrupted: ending all tasks.")
            save_first(run, crew, view)
            return End.INTERRUPTED
        if isinstance(event, Exited) and is_end(event, crew, failures):
            view.say(f"{event.task} was lost: ending all tasks.")
            return End.PS_LOST
        if isinstance(event, Arrived):
            view.say(f"{event.task} joins: there is room for it now.")
            crew.start(event.task)
        crew.start_due()
        if time.monotonic() >= due:
            view.update(children.codes, crew.restarts)
            due = time.monotonic() + view.period_s
    view.update(children.codes, crew.restarts)
    return End.WORKERS_ENDED


def tell_losses(crew: Crew, view: View) -> None:
    """Print what tasks could not write."""
    for line in crew.losses():
        view.say(line)


def save_first(run: Run, crew: Crew, view: View) -> None:
    """As --save-every does it, where everybody's place in its data is known: what is resumed from it is the same run.
    Ctrl+C again, or nobody who makes updates, ends the waiting; then the chief saves what there is."""
    children = crew.children
    if run.settings.save_every == "none" or not children.running("worker") or not children.running("ps"):
        return
    before = set(run.paths.checkpoints.glob(STEP_FOLDERS))
    ticks = Ticks(run.cluster, run.paths)
    if not save_soon(run.cluster, crew.secret, run.paths.root):
        return
    began_s = moved_s = time.monotonic()
    version = -1
    while time.monotonic() - began_s < SAVE_FIRST_S and time.monotonic() - moved_s < STILL_S:
        if made := set(run.paths.checkpoints.glob(STEP_FOLDERS)) - before:
            view.say(f"Saved: {closing.shown(max(made))}")
            return
        if isinstance(children.next_event(SAVED_LOOK_S), Interrupted) or not children.running("worker"):
            return
        ticks.update()
        told = ticks.newest.get(PS_0)
        if told is not None and told.version != version:
            version, moved_s = told.version, time.monotonic()


def is_end(event: Exited, crew: Crew, failures: Failures) -> bool:
    """What follows from an exit; True when nobody can go on after it: a ps has failed for good."""
    decision = crew.ended(event.task, event.code)
    if event.code == EXIT_OK:
        return False
    failures.tell(event.task, event.code, decision)
    return event.task.job == "ps" and isinstance(decision, Over)


class Joined:
    """Whether workers train that somebody else has started: ps:0 tells once a second how many there are."""

    def __init__(self, run: Run, children: Children) -> None:
        self._children = children
        self._ticks = Ticks(run.cluster, run.paths)

    def train(self) -> bool:
        """As far as can be told; a ps that ended, or has been silent for long, has nobody."""
        if PS_0 not in self._children.running("ps"):
            return False
        self._ticks.update()
        told = self._ticks.newest.get(PS_0)
        return told is not None and told.workers > 0 and time.time() - told.t < SILENT_S


def end_rest(run: Run, children: Children, view: View, patience: Patience, end: End) -> None:
    """3. After training the ps end when they hear that nobody comes back; else: ask the workers, the ps, then kill."""
    if end is End.WORKERS_ENDED:
        children.send(children.running("ps"), RELEASE)
        joined = Joined(run, children)
        is_gone = children.wait_until_gone("ps", patience.ps_s)
        while (
            not is_gone and not children.is_interrupted and joined.train()
        ):  # it came when the last one was about to end
            is_gone = children.wait_until_gone("ps", patience.ps_s)
        if not is_gone:
            left = ", ".join(str(task) for task in children.running())
            view.say(f"{left} did not end within {patience.ps_s:g} s of the last worker: ending it.")
    children.send(children.running("worker"), signal.SIGINT)
    children.wait_until_gone("worker", patience.save_s if end is End.INTERRUPTED else patience.stop_s / 2)
    children.send(children.running("ps"), signal.SIGTERM)
    if not children.wait_until_gone(None, patience.stop_s / 2):
        children.kill()


def failed(children: Children) -> dict[Task, int]:
    """The tasks that ended badly without having been asked to end."""
    return {task: code for task, code in children.codes.items() if code != EXIT_OK and task not in children.asked}


def left_off(run: Run, children: Children, workers: Sequence[WorkerReport], servers: Sequence[PsReport]) -> list[str]:
    """Name the workers of ours that have trained, and were gone with exit code 0 before their end."""
    ended = {each.task for each in workers if each.ops or not each.is_lost}
    trained = {index for each in servers for index in each.pushes}
    well = [task for task in run.started if children.codes.get(task) == EXIT_OK and task not in children.asked]
    return [str(task) for task in well if str(task) not in ended and str(run.cluster.worker_index(task)) in trained]


def verdict(failures: dict[Task, int], end: End) -> tuple[int, str | None]:
    """The exit code of the run, and why, in a few words.

    >>> verdict({Task("worker", 1): 1}, End.WORKERS_ENDED)
    (1, 'worker:1 failed with exit code 1')
    >>> verdict({Task("worker", 0): 1, Task("worker", 1): 3}, End.WORKERS_ENDED)[0]
    1
    """
    if end is End.INTERRUPTED:
        return EXIT_INTERRUPTED, end.value
    if not failures:
        return (EXIT_OK, None) if end is End.WORKERS_ENDED else (EXIT_CLUSTER, end.value)
    if set(failures.values()) == {EXIT_NOT_SAVED}:
        return EXIT_NOT_SAVED, closing.NOT_SAVED
    error = "; ".join(f"{task} {closing.how(code)}" for task, code in failures.items())
    if any(task.job == "ps" for task in failures):
        return EXIT_CLUSTER, error
    first = next(iter(failures.values()))  # what follows it may only be its consequence
    first = EXIT_CLUSTER if first == LOST else first
    return (first if first in (EXIT_USAGE, EXIT_CLUSTER) else EXIT_TRAINING), error


def is_saved(run: Run) -> bool:
    """Whether the newest checkpoint here is of the last step; the final one may be left on a host that was lost."""
    if run.settings.save_every == "none":
        return True
    model, servers = closing.newest_checkpoint(run.paths), read.reports(run.paths.root)[1]
    steps = max((server.global_step for server in servers), default=0)
    return model is not None and not closing.without(model, steps)


def resume_of(run: Run, crew: Crew) -> str:
    """Return the command that resumes this run; where it has saved nothing, from the checkpoint that it began with."""
    if crew.has_model_here:
        return resume_command.from_elsewhere(run.resume, crew.model)
    asked = run.settings.resume
    if asked in (AUTO, NONE) or closing.newest_checkpoint(run.paths) is not None:
        return run.resume
    return resume_command.from_elsewhere(run.resume, closing.shown(Path(asked)))


def sum_up(run: Run, crew: Crew, error: str | None, wall_s: float) -> dict[str, object]:
    """4. summary.json, whatever has happened."""
    reports = read.reports(run.paths.root)
    own = {str(task) for task in run.started}
    joined = [worker for worker in reports[0] if worker.task not in own]
    lost = [*(task for task, code in failed(crew.children).items() if code != EXIT_NOT_SAVED), *crew.awaited]
    told = summary.build(
        run.settings,
        run.cluster,
        reports,
        ok=error is None,
        wall_s=wall_s,
        restarts=sum(crew.restarts.values()),
        lost=[*(str(task) for task in lost), *(worker.task for worker in joined if worker.is_lost)],
        error=error,
        restarts_by_task={str(task): count for task, count in sorted(crew.restarts.items())},
    )
    if crew.model:
        told["model"] = crew.model
    if crew.lacks_records:
        told["lacks_records"] = True
    if run.settings.chaos:
        told["chaos"] = msgspec.to_builtins(faults.injected(run.paths.root, parse_chaos(run.settings.chaos)))
    if error is not None and (resume := resume_of(run, crew)):
        told["resume"] = resume  # the terminal may be closed
    try:
        summary.write(run.paths.root, told)
    except OSError as error:
        complain(f"{run.paths.summary} could not be written: {error}")
    return told


@contextmanager
def interrupts(children: Children) -> Iterator[None]:
    """Ctrl+C and kill become an event; only where the main thread runs us. A closed terminal: see hangup.py."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        children.interrupt()

    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGCHLD)}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, which is inherited, no exit code could be had
    for number in STOP_SIGNALS:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
