"""HOW does a program run that does not use paceline? `paceline run --plain`: started, watched, slowed, ended.

Called by launchers/local. Every task runs the program itself, a ps too, with TF1's four flags and TF_CONFIG. Must never
leave a process behind, nor a run folder without summary.json, nor guess what happens inside: it sees processes.

A run: 1 start the tasks, 2 watch until the workers have ended or one has failed, 3 end the rest, for a ps whose
server.join() never returns ends in no other way, 4 write and show the summary.
"""

import resource
import shlex
import signal
import time
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from paceline import hangup
from paceline.cluster.discovery import KEYS_VARIABLE, SECRET_VARIABLE, TASK_VARIABLE
from paceline.cluster.plain import flags_of, tf_config_of
from paceline.cluster.slow import parse as parse_slow
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import EXIT_CLUSTER, EXIT_INTERRUPTED, EXIT_OK, EXIT_TRAINING, EXIT_USAGE
from paceline.launchers import closing, gpus
from paceline.launchers.children import Children, Event, Exited, Interrupted
from paceline.launchers.crew import Run
from paceline.launchers.entry import Program
from paceline.launchers.live import View, make_view
from paceline.launchers.slowing import Slowing
from paceline.launchers.supervisor import End, Patience, failed, interrupts
from paceline.telemetry import summary
from paceline.telemetry.output import stream_of
from paceline.telemetry.records import PsReport, WorkerReport
from paceline.telemetry.sampler import Sampler, Utilisation
from paceline.telemetry.sink import append

LOOK_S = 1.0
OURS = (TASK_VARIABLE, SECRET_VARIABLE, KEYS_VARIABLE)  # of a cluster that we may be in ourselves


def program_of(program: Program, cluster: ClusterSpec, task: Task) -> Program:
    """What one task runs: the program, its own arguments, and then the four flags."""
    return msgspec.structs.replace(program, args=(*program.args, *flags_of(cluster, task)), is_plain=True)


def commands(program: Program, cluster: ClusterSpec) -> list[str]:
    """What is started, a line a task, as one would type it.

    >>> commands(Program(script="t.py"), ClusterSpec({"ps": ["a:1"], "worker": ["a:2"]}))[1]
    'python t.py --job_name=worker --task_index=0 --ps_hosts=a:1 --worker_hosts=a:2'
    """
    told = [program_of(program, cluster, task) for task in [*cluster.ps, *cluster.workers]]
    return [shlex.join(["python", *(["-m"] if each.is_module else []), each.script, *each.args]) for each in told]


def supervise(run: Run, patience: Patience) -> int:
    """From the first process to the summary; the exit code comes back."""
    watched = Watched(run)
    children, view = watched.children, watched.view
    end = End.OUR_FAULT
    with hangup.handled(children.interrupt):
        try:
            with interrupts(children):
                watched.start_all()
                end = watch(watched)
                watched.slowing.close()  # who stands still hears nothing
                end_rest(watched, patience)
        finally:
            watched.slowing.close()
            children.kill()
            watched.wait_until_gone(patience.stop_s)
            view.close()
            code, error = verdict(failed(children), end)
            told = watched.sum_up(error)
        print(block(told, run, causes(run, failed(children))), file=stream_of(code), flush=True)
    return code


class Watched:
    """The processes of one run, and what was seen of them."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.children = Children()
        self.view: View = make_view(run.cluster, run.paths, shows_logs=run.shows_logs)
        self.slowing = Slowing(parse_slow(run.settings.slow), run.cluster, self.children)
        self._sampler = Sampler()
        self._began_s = time.monotonic()
        self._ended_s: dict[Task, float] = {}
        self._due_s = self._began_s + LOOK_S
        self._shown_s = self._began_s
        self._told_slowed = 0

    @property
    def tasks(self) -> list[Task]:
        return [*self.run.cluster.ps, *self.run.cluster.workers]

    def start_all(self) -> None:
        """1. The ps first; they wait for each other themselves."""
        common = {name: value for name, value in self.run.environ.items() if name not in OURS}
        for task in self.tasks:
            own = {**gpus.environ_of(task, self.run.settings), "TF_CONFIG": tf_config_of(self.run.cluster, task)}
            program = program_of(self.run.program, self.run.cluster, task)
            if self.children.start(task, program, {**common, **own}, self.run.paths.logs(task)) is not None:
                self._sampler.begin(task, time.monotonic())
        self.slowing.start()

    def next_event(self, timeout_s: float) -> Event | None:
        """What happened next. One that has ended is given back to the system in here, and that tells what it used."""
        before_s = _ended_cpu_s()
        event = self.children.next_event(timeout_s)
        if isinstance(event, Exited):
            now_s = time.monotonic()
            self._ended_s[event.task] = now_s - self._began_s
            self._sampler.end(event.task, _ended_cpu_s() - before_s, now_s)
        return event

    def look(self) -> float:
        """Look at all processes and show them, where that is due; how long until the next look comes back."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            pids = {task: pid for task in self.children.running() if (pid := self.children.pid(task)) is not None}
            for task, (cores, rss_bytes) in self._sampler.look(pids, now_s).items():
                seen = {"cores": round(cores, 3), "rss_bytes": rss_bytes, "phase": "runs", "is_seen": True}
                append(self.run.paths.telemetry(task), "tick", task=str(task), **seen)
            for task in self.slowing.slowed[self._told_slowed :]:
                self._told_slowed += 1
                self.view.say(f"{task} listens at its address: from now on it is slowed, as --slow says")
            self._due_s = now_s + LOOK_S
        if now_s - self._shown_s >= self.view.period_s:
            self.view.update(self.children.codes)
            self._shown_s = now_s
        return min(self._due_s, self._shown_s + self.view.period_s) - now_s

    def wait_until_gone(self, seconds: float, job: str | None = None) -> bool:
        """Wait until no task of that kind runs; False when time ran out or the user insists."""
        deadline_s = time.monotonic() + seconds
        while self.children.running(job):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or isinstance(self.next_event(left_s), Interrupted):
                return not self.children.running(job)
        return True

    def sum_up(self, error: str | None) -> dict[str, object]:
        """4. summary.json, whatever has happened. Of steps and updates it has nothing to tell."""
        run = self.run
        lost = [str(task) for task in failed(self.children)]
        workers = [
            WorkerReport(index=run.cluster.worker_index(task), task=str(task), ended_at_s=self._ended_s.get(task))
            for task in run.cluster.workers
        ]
        wall_s = time.monotonic() - self._began_s
        reports = (workers, [PsReport(index=task.index) for task in run.cluster.ps])
        told = summary.build(
            run.settings, run.cluster, reports, ok=error is None, wall_s=wall_s, restarts=0, lost=lost, error=error
        )
        told["tasks"] = [msgspec.to_builtins(self._sampler.use(task)) for task in self.tasks]
        told |= {"mode": "plain", "mode_spec": "plain", "utilisation": self._utilisation(), "codes": self._codes()}
        told["not_slowed"] = [str(task) for task in parse_slow(run.settings.slow) if task not in self.slowing.slowed]
        with suppress(OSError):
            summary.write(run.paths.root, told)
        return told

    def _utilisation(self) -> dict[str, object]:
        return {str(task): msgspec.to_builtins(self._sampler.utilisation(task)) for task in self.tasks}

    def _codes(self) -> dict[str, int | None]:
        """How those ended that were not asked to."""
        asked, codes = self.children.asked, self.children.codes
        return {str(task): None if task in asked else codes.get(task) for task in self.tasks}


def watch(watched: Watched) -> End:
    """2. Until the last worker has ended. One that fails ends the run: who trains with it may wait for it for ever."""
    children, view = watched.children, watched.view
    while children.is_interrupted or children.running("worker"):
        event = watched.next_event(watched.look())
        if isinstance(event, Interrupted):
            view.say("Interrupted: ending all tasks.")
            return End.INTERRUPTED
        if isinstance(event, Exited) and event.code != EXIT_OK:
            log = watched.run.paths.logs(event.task)
            view.say(closing.failure(event.task, event.code, log, []))
            if children.running():
                view.say("Ending all tasks: a program that does not use paceline may wait for that one for ever.")
            return End.PS_LOST if event.task.job == "ps" else End.WORKERS_ENDED
    return End.WORKERS_ENDED


def end_rest(watched: Watched, patience: Patience) -> None:
    """3. Workers as Ctrl+C does it, then everybody, then by force."""
    children = watched.children
    children.send(children.running("worker"), signal.SIGINT)
    watched.wait_until_gone(patience.stop_s / 2, "worker")
    children.send(children.running(), signal.SIGTERM)
    if not watched.wait_until_gone(patience.stop_s / 2):
        children.kill()


def verdict(failures: Mapping[Task, int], end: End) -> tuple[int, str | None]:
    """The exit code of the run, and why. What a program means by its own codes is not known, but by argparse's 2.

    >>> verdict({Task("worker", 1): 4}, End.WORKERS_ENDED)
    (1, 'worker:1 failed with exit code 4')
    """
    if end is End.INTERRUPTED:
        return EXIT_INTERRUPTED, end.value
    if not failures:
        return (EXIT_OK, None) if end is End.WORKERS_ENDED else (EXIT_CLUSTER, end.value)
    error = "; ".join(f"{task} {closing.how(code)}" for task, code in failures.items())
    if any(task.job == "ps" for task in failures):
        return EXIT_CLUSTER, error
    return (EXIT_USAGE if next(iter(failures.values())) == EXIT_USAGE else EXIT_TRAINING), error


def causes(run: Run, failures: Mapping[Task, int]) -> list[str]:
    """Every failure, the one that came first as the root cause, with what its log says."""
    told: list[str] = []
    for task, code in failures.items():
        log = run.paths.logs(task)
        told.append(f"{'Then' if told else 'Root cause'}: {closing.failure(task, code, log, closing.reason(log))}")
    return told


def block(told: Mapping[str, object], run: Run, causes: list[str]) -> str:
    """The last lines: how it ended, what every task used, where everything lies."""
    outcome = "Plain run done" if told["ok"] else f"Plain run failed: {told['error']}"
    if told["error"] == End.INTERRUPTED.value:
        outcome = "Plain run interrupted"
    lines = [*causes, f"{outcome}; {told['wall_s']:.1f} s"]
    used = msgspec.convert(told["utilisation"], dict[str, Utilisation])
    lines += [task_line(task, each) for task, each in used.items()]
    if run.settings.slow:
        lines.append(f"Slowed on purpose (--slow): {run.settings.slow}")
    for task in msgspec.convert(told["not_slowed"], list[str]):
        lines.append(f"{task} never listened at its address, so it was not slowed")
    folder = closing.shown(run.paths.root)
    return "\n".join([*lines, f"Run folder: {folder} (summary.json, and what the tasks printed in logs/)"])


def task_line(task: str, used: Utilisation) -> str:
    """What one task used.

    >>> task_line("ps:0", Utilisation(cpu_s=2.0, cores_mean=0.5, cores_max=1.0, rss_bytes_max=1 << 20))
    '  ps:0  2.0 s of the processor, 0.50 cores (at most 1.00), 1 MiB'
    """
    cores = f"{used.cores_mean:.2f} cores (at most {used.cores_max:.2f})"
    memory = (
        f", {used.rss_bytes_max >> 20} MiB" if used.rss_bytes_max else ""
    )  # else it was gone before it was looked at
    return f"  {task}  {used.cpu_s:.1f} s of the processor, {cores}{memory}"


def _ended_cpu_s() -> float:
    """Of all children that have ended and were waited for."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime
