"""WHICH runs do the documents describe? Each program with its tasks, its sizes, and the commands that start it here.

Used by lab/matrices/documents (the cells) and lab/scripts/documents_script (which starts them). Pure: addresses and
folders come in.
"""

from collections.abc import Mapping, Sequence
from enum import Enum

import msgspec

from paceline.lab.matrices.looks import SINGLE


class Side(Enum):
    """Whose programs: examples/ or examples/tensorflow/."""

    OURS = "paceline"
    THEIRS = "TensorFlow"


class How(Enum):
    """How the document starts it."""

    ALONE = "alone"  # one process
    CLUSTER = "cluster"  # ps and workers; TensorFlow's through `paceline run --plain`, which ends its ps
    BY_HAND = "by hand"  # ps and workers from settings.py, both sides, each with the document's two flags
    GREETINGS = "greetings"  # two tasks of job `local` that go on serving when they have printed
    LAUNCHED = "launched"  # through `paceline run`, on both sides


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One of them."""

    name: str
    program: str
    how: How = How.CLUSTER
    num_ps: int = 1
    num_workers: int = 1
    args: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()  # instead, with --quick
    ours: tuple[str, ...] = ()  # more, for paceline's program; a task of a cluster also gets STYLE
    slow: str = ""
    has_hosts: bool = False  # the addresses are in flags, too, as in document 002
    until: str = ""  # all tasks go on serving when the workers have said so
    only_ours: str = ""  # why TensorFlow has no such program today
    limit_s: float = 900.0

    def sizes(self, is_quick: bool) -> tuple[str, ...]:
        return self.quick if is_quick else self.args


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a run."""

    log: str  # its task, or its program
    words: tuple[str, ...]  # after `python`; the first is the program
    is_launcher: bool = False  # `paceline …` instead of `python …`
    serves: bool = False  # it never ends by itself: it is ended when the others have
    until: str = ""  # it has done its part when it has said so
    awaited: str = ""  # the next one is started when this one has said so, or has had time to

    def __str__(self) -> str:
        return " ".join(["paceline" if self.is_launcher else "python", *self.words])


SHORT = ("--lr=0.01", "--batches=55", "--epochs=100")  # document 000's curve at a tenth of the cost
TINY = ("--batches=10", "--epochs=2")
NO_MODELS = "TensorFlow's models of 2016 are no longer there"
GREETING = r"Hello, distributed tensorflow"
WAITING = r"[Ss]till waiting for response from worker"
STYLE = ("--log-style=tf",)  # lines in the documents' own words
HOSTS = ("--ps_hosts={ps}", "--worker_hosts={workers}")  # filled in when ports are known

RUNS: Mapping[str, Run] = {
    run.name: run
    for run in (
        Run(name="single process", program="tfsingle.py", how=How.ALONE, num_ps=0, args=SHORT, quick=TINY),
        Run(name="1 ps + 1 worker", program="tfdist_between.py", args=SHORT, quick=TINY),
        Run(name="1 ps + 2 workers, async", program="tfdist_between.py", num_workers=2, args=SHORT, quick=TINY),
        Run(name="1 ps + 2 workers, sync", program="tfdist_between_sync.py", num_workers=2, args=SHORT, quick=TINY),
        Run(
            name="2 ps + 2 workers, async", program="tfdist_between.py", num_ps=2, num_workers=2, args=SHORT, quick=TINY
        ),
        Run(
            name="2 ps + 2 workers, sync",
            program="tfdist_between_sync.py",
            num_ps=2,
            num_workers=2,
            args=SHORT,
            quick=TINY,
        ),
        Run(name="1 ps + 3 workers, async", program="tfdist_between.py", num_workers=3, args=SHORT, quick=TINY),
        Run(
            name="10,000 shared steps",
            program="distributed.py",
            num_workers=2,
            args=("--train_steps=10000",),
            quick=("--train_steps=200",),
            ours=("--log_every=1",),
            slow="worker:1=4.2x",
            has_hosts=True,
        ),
        Run(
            name="two flags and settings.py",
            program="distributed.py",
            how=How.BY_HAND,
            num_workers=2,
            args=("--train_steps=300",),
            quick=("--train_steps=100",),
            ours=("--log_every=1",),
        ),
        Run(
            name="Supervisor",
            program="supervisor.py",
            how=How.BY_HAND,
            num_workers=2,
            until=r"\[49\. +64\.\]\]",
            only_ours="in tfdist_between.py",
            limit_s=120.0,
        ),
        Run(
            name="in-graph",
            program="in_graph.py",
            how=How.LAUNCHED,
            num_workers=3,
            args=("--lr=0.01", "--batches=55", "--epochs=20"),
            quick=TINY,
        ),
        Run(
            name="autoencoder",
            program="autoencoder.py",
            how=How.LAUNCHED,
            num_workers=2,
            args=("--epochs=3",),
            quick=("--epochs=1", "--images=512"),
            only_ours=NO_MODELS,
        ),
        Run(
            name="spatial transformer",
            program="spatial_transformer.py",
            how=How.LAUNCHED,
            num_workers=2,
            args=("--epochs=3",),
            quick=("--epochs=1", "--images=300", "--batch-size=50"),
            only_ours=NO_MODELS,
        ),
        Run(name="placement", program="placement.py", how=How.ALONE, num_ps=0, limit_s=120.0),
        Run(name="hello local", program="hello_local.py", how=How.ALONE, num_ps=0, ours=STYLE, limit_s=120.0),
        Run(
            name="hello first and second", program="hello_first.py", how=How.GREETINGS, num_ps=0, limit_s=180.0
        ),
        Run(name="hello pinned", program="hello_first.py", how=How.GREETINGS, num_ps=0, limit_s=180.0),
    )
}  # fmt: skip
PINNED = "hello pinned"
HELLO = 'hello = tf.constant("Hello, distributed tensorflow.")'


def commands(run: Run, side: Side, is_quick: bool) -> list[Command]:
    """The processes of a run, in the order in which they are started.

    >>> [str(each) for each in commands(RUNS["1 ps + 1 worker"], Side.OURS, is_quick=True)][0]
    'python tfdist_between.py --job_name=ps --task_index=0 --batches=10 --epochs=2 --log-style=tf'
    >>> print(*commands(RUNS["1 ps + 1 worker"], Side.THEIRS, is_quick=True))
    paceline run --plain --ps 1 --workers 1 tfdist_between.py --batches=10 --epochs=2
    """
    sizes = (*run.sizes(is_quick), *(run.ours if side is Side.OURS else ()))
    style = STYLE if side is Side.OURS else ()
    if run.how is How.ALONE:
        log = SINGLE if run.program == "tfsingle.py" else run.program.removesuffix(".py")
        return [Command(log=log, words=(run.program, *sizes))]
    if run.how is How.GREETINGS:
        first = ("hello_first.py", *(("pinned",) if run.name == PINNED and side is Side.THEIRS else ()))
        programs = {"hello_first": first, "hello_second": ("hello_second.py",)}
        return [
            Command(
                log=log, words=(*words, *style), serves=True, until=GREETING, awaited=WAITING if words == first else ""
            )
            for log, words in programs.items()
        ]
    if run.how is How.LAUNCHED or (run.how is How.CLUSTER and side is Side.THEIRS):
        return [_launched(run, side, sizes)]
    slow = (f"--slow={run.slow}",) if run.slow else ()
    hosts = HOSTS if run.has_hosts else ()
    tasks = [("ps", index) for index in range(run.num_ps)] + [("worker", index) for index in range(run.num_workers)]
    return [
        Command(
            log=f"{job}-{index}",
            words=(run.program, f"--job_name={job}", f"--task_index={index}", *hosts, *sizes, *slow, *style),
            serves=bool(run.until) or (job == "ps" and side is Side.THEIRS),
            until=run.until if job == "worker" else "",
        )
        for job, index in tasks
    ]


def _launched(run: Run, side: Side, sizes: Sequence[str]) -> Command:
    plain = ("--plain",) if side is Side.THEIRS else ()
    slow = ("--slow", run.slow) if run.slow else ()
    counts = ("--ps", str(run.num_ps), "--workers", str(run.num_workers))
    return Command(log="launcher", words=("run", *plain, *counts, *slow, run.program, *sizes), is_launcher=True)


def shown(started: Sequence[Command], run: Run) -> str:
    """What was typed, in a line.

    >>> shown(commands(RUNS["1 ps + 2 workers, sync"], Side.OURS, is_quick=True), RUNS["1 ps + 2 workers, sync"])
    'python tfdist_between_sync.py --job_name=… --task_index=… --batches=10 --epochs=2 --log-style=tf (1 ps, 2 workers)'
    """
    if run.how in (How.CLUSTER, How.BY_HAND) and len(started) > 1:
        program, _, _, *sizes = started[0].words
        words = " ".join(["python", program, "--job_name=… --task_index=…", *sizes]).format(ps="…", workers="…")
        return f"{words} ({run.num_ps} ps, {run.num_workers} worker{'s' if run.num_workers > 1 else ''})"
    return " & ".join(str(each) for each in started)


def settings_py(ps: Sequence[str], workers: Sequence[str]) -> str:
    """The documents' settings.py, with addresses that are free here."""
    return f"ps_svrs = {list(ps)!r}\nworker_svrs = {list(workers)!r}\n"


def pinned(text: str) -> str:
    """Our hello_first.py with document 004's change: the greeting belongs to the other task.

    >>> print(pinned(HELLO))
    with tf.device("/job:local/task:1"):
        hello = tf.constant("Hello, distributed tensorflow.")
    """
    return text.replace(HELLO, f'with tf.device("/job:local/task:1"):\n    {HELLO}')
