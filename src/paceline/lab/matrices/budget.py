"""DO unequal workers share exactly 10,000 global steps? Document 002's run, with worker 1 slowed as its was.

A matrix of the lab: `paceline lab run budget`. Pure; the bars are the project's own.
"""

from collections.abc import Iterator, Sequence

import msgspec

from paceline.cluster.settings import Settings
from paceline.lab.cells import NONE, Cell, Finished, Runs, Table, Verdicts, number, seeds_from_1
from paceline.lab.scenario import Matrix
from paceline.lab.scripts.curves import spread

SCRIPT = "paceline.lab.scripts.budget_script"
STEPS = 10_000
FACTOR = 4.2  # document 002: 8,087 and 1,916 steps
SEEDS = 3
SHARE = (3.5, 5.0)
VALIDATION = (950.0, 1300.0)  # summed cross entropy over the 5,000 images; document 002: 1147.88 and 1122.46
TOO_FEW = "too few steps for the bars"
ELAPSED, LOSS = "elapsed_s", "validation_cross_entropy"  # what budget_script logs


def matrix(is_quick: bool = False, num_seeds: int | None = None) -> Matrix:
    """One and two ps, each from three first weights; quick: from one, and a twentieth of the steps."""
    steps, usual_s = (STEPS // 20, 15.0) if is_quick else (STEPS, 30.0)
    cells = tuple(
        Cell(
            title=f"{steps} steps, {num_ps} ps + 2 workers, seed {seed}",
            labels=(f"{num_ps} ps + 2 workers", str(seed)),
            program=(SCRIPT, "--train_steps", str(steps), "--seed", str(seed)),
            seed=seed,
            num_ps=num_ps,
            num_workers=2,
            settings=Settings(run_id="", save_every="none", slow=f"worker:1={FACTOR}x"),
            limit_s=600.0,
        )
        for num_ps in (1, 2)
        for seed in seeds_from_1(num_seeds or (1 if is_quick else SEEDS))
    )
    note = (
        "Document 002: 784-100-10, ReLU, weights truncated normal, Adam lr 0.01, batch 100, cross entropy summed. "
        f"Async, shm, a thread a process; worker 1 sleeps until its step has taken {FACTOR}x what it would. applied: "
        "updates that ps:0 counts; elapsed: of the chief, from its first step to its last; share: worker 0's steps for "
        "one of worker 1's. Document 002 has 8087 + 1916, 1147.88 and 1122.46."
    )
    columns = (
        "topology", "seed", "applied", "worker 0", "worker 1", "share", "elapsed s", "cross entropy 0", "and 1",
    )  # fmt: skip
    title = f"{steps} global steps, worker 1 slowed {FACTOR} times"
    table = Table(title=title, columns=columns, cells=cells, line=line, note=note, verdicts=VERDICTS, usual_s=usual_s)
    return Matrix(name="budget", tables=(table,))


class Shared(msgspec.Struct, frozen=True):
    """How one run's steps were shared out."""

    total: int
    applied: int
    counts: tuple[int, ...]
    losses: tuple[float | None, ...]

    @property
    def share(self) -> float | None:
        """Worker 0's steps for one of worker 1's."""
        return self.counts[0] / self.counts[1] if len(self.counts) == 2 and self.counts[1] else None

    @property
    def loss(self) -> float | None:
        """What the workers' validations say; they have the same parameters."""
        known = [loss for loss in self.losses if loss is not None]
        return sum(known) / len(known) if known and len(known) == len(self.losses) else None

    def miscounted(self) -> Iterator[str]:
        """Every run must stop at the budget: a step more or less is one too many."""
        if self.applied != self.total:
            yield f"{self.applied} applied, not {self.total}"
        if sum(self.counts) != self.total:
            yield f"counts sum to {sum(self.counts)}"


class Means(msgspec.Struct, frozen=True):
    """What several runs come to. The last of 10,000 steps of Adam at lr 0.01 leaves a single process between 829 and
    1,344, an eighth of the time outside the bar: so runs are judged by their mean, as accuracies are."""

    share: float | None
    loss: float | None

    def over(self) -> Iterator[str]:
        """Which bars are missed."""
        if self.share is None or not SHARE[0] <= self.share <= SHARE[1]:
            yield f"share {number(self.share, 2)} : 1"
        if self.loss is None or not VALIDATION[0] <= self.loss <= VALIDATION[1]:
            yield f"cross entropy {number(self.loss, 2)}"


def means(runs: Sequence[Shared]) -> Means:
    """
    >>> run = Shared(10, 10, (8, 2), (1000.0, 1000.0))
    >>> means([run, Shared(10, 10, (5, 5), (900.0, 900.0))])
    Means(share=2.5, loss=950.0)
    """
    return Means(_mean([run.share for run in runs]), _mean([run.loss for run in runs]))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _spread(values: Sequence[float | None]) -> float | None:
    return spread([value for value in values if value is not None])


def shared(cell: Cell, done: Finished) -> Shared:
    """What the run left, in these terms."""
    return Shared(
        total=int(cell.program[cell.program.index("--train_steps") + 1]),
        applied=done.global_step,
        counts=tuple(worker.steps for worker in done.workers),
        losses=tuple(worker.metrics.get(LOSS) for worker in done.workers),
    )


def line(cell: Cell, done: Finished) -> tuple[str, ...]:
    """The numbers of one run, and whether it stopped where it was to."""
    found = shared(cell, done)
    wrong = list(found.miscounted())
    elapsed_s = done.workers[0].metrics.get(ELAPSED) if done.workers else None
    counts = [str(count) for count in found.counts]
    losses = [number(loss, 2) for loss in found.losses]
    return (
        str(found.applied),
        *(counts + [NONE] * 2)[:2],
        NONE if found.share is None else f"{found.share:.2f} : 1",
        number(elapsed_s, 1),
        *(losses + [NONE] * 2)[:2],
        f"MISCOUNTED: {'; '.join(wrong)}" if wrong else "",
    )


def verdict_lines(ended: Runs) -> list[tuple[str, ...]]:
    """A line a topology. Of fewer steps than the document's, only the counts can be judged."""
    return [
        _verdict(title, [shared(*each) for each in ended if each[0].labels[0] == title])
        for title in dict.fromkeys(cell.labels[0] for cell, _ in ended)
    ]


def _verdict(title: str, runs: Sequence[Shared]) -> tuple[str, ...]:
    found = means(runs)
    exact = sum(not list(run.miscounted()) for run in runs)
    over = [f"{len(runs) - exact} miscounted"] if exact < len(runs) else []
    is_judged = all(run.total >= STEPS for run in runs)
    if is_judged:
        over += found.over()
    within = "within the bars" if is_judged else TOO_FEW
    return (
        title,
        str(len(runs)),
        f"{exact} of {len(runs)}",
        NONE if found.share is None else f"{found.share:.2f} : 1",
        number(_spread([run.share for run in runs]), 2),
        number(found.loss, 2),
        number(_spread([run.loss for run in runs]), 2),
        f"OVER THE BAR: {'; '.join(over)}" if over else within,
    )


VERDICTS = Verdicts(
    title=f"Bars: every run exact; means: share {SHARE[0]} to {SHARE[1]} : 1, "
    f"cross entropy {VALIDATION[0]:.0f} to {VALIDATION[1]:.0f}",
    columns=("topology", "runs", "exact", "share", "spread of share", "cross entropy", "spread of it"),
    lines=verdict_lines,
)
