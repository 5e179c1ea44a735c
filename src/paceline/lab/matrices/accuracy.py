"""DOES a cluster learn what one process learns? Document 000's topologies from five first weights, to its accuracies.

A matrix of the lab: `paceline lab run accuracy`. Pure; the bars are the project's own. `--short` takes ten times the
learning rate and a tenth of the batches: the same curve at a tenth of the cost.

Each seed has a process alone that goes on three times as long (what asynchronous workers together do), and one that
averages two gradients an update (what two synchronous workers do, bit for bit).
"""

from collections.abc import Iterator, Sequence

import msgspec

from paceline.cluster.settings import Settings
from paceline.lab.cells import NONE, Cell, Finished, Runs, Table, Verdicts, middle, number, seeds_from_1
from paceline.lab.scenario import Matrix
from paceline.lab.scripts.curves import spread
from paceline.lab.scripts.learned import Learned

SCRIPT = "paceline.lab.scripts.accuracy_script"
SEEDS = (1, 2, 3, 4, 5)
EPOCHS = 100
OFF_DOCUMENT = 0.02  # the mean over the seeds, from what document 000 reports
OFF_SINGLE = 0.01  # each seed, from one process after as many updates
ASKED = Settings(run_id="", save_every="none")


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """Who trains, and what document 000 says of it."""

    title: str
    num_ps: int = 1
    num_workers: int = 1
    mode: str = "async"
    document: float | None = None
    alone: tuple[str, ...] = ()  # flags of a process without a cluster


SINGLE = Topology(title="single process", num_ps=0, document=0.72, alone=("--times", "3"))
AVERAGED = Topology(title="single process, 2 gradients averaged", num_ps=0, alone=("--average", "2"))
ONE = Topology(title="1 ps + 1 worker", document=0.72)
ASYNC = Topology(title="1 ps + 2 workers, async", num_workers=2, document=0.80)
SYNC = Topology(title="1 ps + 2 workers, sync", num_workers=2, mode="sync", document=0.72)
ASYNC_TWO_PS = Topology(title="2 ps + 2 workers, async", num_ps=2, num_workers=2, document=0.80)
SYNC_TWO_PS = Topology(title="2 ps + 2 workers, sync", num_ps=2, num_workers=2, mode="sync", document=0.72)
ASYNC_THREE = Topology(title="1 ps + 3 workers, async", num_workers=3, document=0.83)
TOPOLOGIES = (SINGLE, AVERAGED, ONE, ASYNC, SYNC, ASYNC_TWO_PS, SYNC_TWO_PS, ASYNC_THREE)
BY_TITLE = {each.title: each for each in TOPOLOGIES}
ORDER = "single = sync 2 < async 2 < async 3"


def matrix(is_quick: bool = False, num_seeds: int | None = None, *, is_short: bool = False) -> Matrix:
    """Eight topologies from each of five seeds; quick: from one, and not for long enough to say anything."""
    seeds = seeds_from_1(num_seeds or (1 if is_quick else len(SEEDS)))
    return Matrix(name="accuracy", tables=(_table(is_quick, is_short, seeds),))


def _table(is_quick: bool, is_short: bool, seeds: Sequence[int]) -> Table:
    epochs = 2 if is_quick else EPOCHS
    lr, batches = ("0.01", "55") if is_short or is_quick else ("0.001", "550")
    usual_s = 7.0 if is_quick else 12.0 if is_short else 45.0
    recipe = ("--lr", lr, "--batches", batches, "--epochs", str(epochs))
    cells = tuple(cell_of(each, seed, recipe) for seed in seeds for each in TOPOLOGIES)
    note = (
        f"MNIST as document 000 has it: 784-100-10, sigmoid, weights from N(0, 1), SGD lr {lr}, batch 100, {batches} "
        f"batches an epoch, {epochs} epochs of every worker over the whole set in an order of its own; a thread a "
        "process, shm. accuracy: on the 10,000 test images, after the last update of all workers; at its own end: "
        "what each worker had when it had done its epochs; bits: of a hash of all parameters."
    )
    columns = ("topology", "seed", "updates", "accuracy", "at its own end", "epoch s", "bits")
    title = f"Document 000's accuracies{', short (lr 0.01, 55 batches an epoch)' if is_short else ''}"
    return Table(title=title, columns=columns, cells=cells, line=line, note=note, verdicts=VERDICTS, usual_s=usual_s)


def cell_of(each: Topology, seed: int, recipe: tuple[str, ...]) -> Cell:
    """A topology from one seed; lab/matrices/seeds has it, too."""
    return Cell(
        title=f"{each.title}, seed {seed}",
        labels=(each.title, str(seed)),
        program=(SCRIPT, "--seed", str(seed), *recipe, *each.alone),
        seed=seed,
        num_ps=each.num_ps,
        num_workers=each.num_workers,
        settings=msgspec.structs.replace(ASKED, mode=each.mode),
        limit_s=900.0,
    )


def line(cell: Cell, done: Finished) -> tuple[str, ...]:
    """The numbers of one run; of a process alone, where the cluster's workers end."""
    learned = msgspec.json.decode(done.told, type=Learned)
    point = learned.last if cell.num_ps else learned.points[0]
    own = [number(worker.metrics.get("accuracy"), 4) for worker in done.workers]
    epoch_s = [worker.epoch_s for worker in done.workers if worker.epoch_s is not None]
    later = [f"{each.accuracy:.4f} after {each.updates}" for each in learned.points[1:]]
    return (
        str(point.updates),
        f"{point.accuracy:.4f}",
        " ".join(own) or NONE,
        number(middle(epoch_s), 2),
        point.digest[:8],
        ", ".join(later),
    )


# --- what all of them say together ----------------------------------------------------------------------------------


def _epochs(cell: Cell) -> int:
    return int(cell.program[cell.program.index("--epochs") + 1])


class Told:
    """What every topology learned from every seed."""

    def __init__(self, ended: Runs) -> None:
        self.is_whole = all(_epochs(cell) >= EPOCHS for cell, _ in ended)  # else the document says nothing of it
        self._learned = {
            (cell.labels[0], int(cell.labels[1])): msgspec.json.decode(done.told, type=Learned) for cell, done in ended
        }

    def of(self, topology: Topology, seed: int) -> Learned | None:
        return self._learned.get((topology.title, seed))

    def seeds(self, *topologies: Topology) -> list[int]:
        """The seeds of which all of these came to their end."""
        seeds = sorted({seed for _, seed in self._learned})
        return [seed for seed in seeds if all((each.title, seed) in self._learned for each in topologies)]

    def accuracy(self, topology: Topology, seed: int) -> float:
        """At the end; of a process alone, after as many updates as one worker makes."""
        learned = self._learned[topology.title, seed]
        return (learned.last if topology.num_ps else learned.points[0]).accuracy

    def off_single(self, topology: Topology, seed: int) -> float | None:
        """How far asynchronous workers are from one process after as many updates; None: it failed, or they are not."""
        if not topology.num_ps or topology.mode == "sync":
            return None
        mine, single = self.of(topology, seed), self.of(SINGLE, seed)
        beside = single.after(mine.last.updates) if mine and single else None
        return abs(mine.last.accuracy - beside.accuracy) if mine and beside else None

    def is_same(self, topology: Topology, seed: int) -> bool | None:
        """Whether the bits are those of the process that does the same alone; None: there is none, or it failed."""
        if not topology.num_ps or (topology.mode == "async" and topology.num_workers > 1):
            return None
        mine, other = self.of(topology, seed), self.of(SINGLE if topology is ONE else AVERAGED, seed)
        beside = other.after(mine.last.updates) if mine and other else None
        return mine.last.digest == beside.digest if mine and beside else None


def verdict_lines(ended: Runs) -> list[tuple[str, ...]]:
    """A line a topology, and one for their order."""
    told = Told(ended)
    lines = [_verdict(told, each) for each in TOPOLOGIES if each is not AVERAGED and told.seeds(each)]
    return lines + list(_order(told))


def _verdict(told: Told, each: Topology) -> tuple[str, ...]:
    seeds = told.seeds(each)
    accuracies = [told.accuracy(each, seed) for seed in seeds]
    mean = sum(accuracies) / len(accuracies)
    off_document = mean - each.document if each.document is not None and told.is_whole else None
    offs = [off for seed in seeds if (off := told.off_single(each, seed)) is not None]
    bits = [is_same for seed in seeds if (is_same := told.is_same(each, seed)) is not None]
    return (
        each.title,
        str(len(seeds)),
        f"{mean:.4f}",
        number(spread(accuracies), 4),
        number(each.document, 2),
        NONE if off_document is None else f"{off_document:+.4f}",
        number(max(offs, default=None), 4),
        f"{sum(bits)} of {len(bits)}" if bits else NONE,
        remark(list(_over(off_document, offs, bits)), len(seeds)),
    )


def _over(off_document: float | None, offs: Sequence[float], bits: Sequence[bool]) -> Iterator[str]:
    """Which bars are missed."""
    if off_document is not None and abs(off_document) > OFF_DOCUMENT:
        yield f"the mean is {abs(off_document):.4f} off the document"
    if offs and max(offs) > OFF_SINGLE:
        yield f"a seed is {max(offs):.4f} off one process after as many updates"
    if not all(bits):
        yield f"other bits in {len(bits) - sum(bits)} of {len(bits)} seeds"


def remark(over: Sequence[str], num_seeds: int) -> str:
    """
    >>> remark([], 5), remark(["share 9.0 : 1"], 5), remark([], 1)
    ('within the bars', 'OVER THE BAR: share 9.0 : 1', 'within the bars (1 of 5 seeds)')
    """
    few = f" ({num_seeds} of {len(SEEDS)} seeds)" if num_seeds < len(SEEDS) else ""
    return f"OVER THE BAR: {'; '.join(over)}{few}" if over else f"within the bars{few}"


def in_order(told: Told, seed: int) -> bool:
    """Document 000's finding: who updates more often knows more, and synchronous workers update no more often."""
    single, sync, two, three = (told.accuracy(each, seed) for each in (SINGLE, SYNC, ASYNC, ASYNC_THREE))
    return abs(single - sync) <= OFF_SINGLE and max(single, sync) < two < three


def _order(told: Told) -> Iterator[tuple[str, ...]]:
    seeds = told.seeds(SINGLE, SYNC, ASYNC, ASYNC_THREE)
    if not seeds:
        return
    wrong = [seed for seed in seeds if not in_order(told, seed)]
    over = [f"not so from seed {', '.join(map(str, wrong))}"] if wrong else []
    yield (ORDER, str(len(seeds)), *[NONE] * 6, remark(over, len(seeds)))


VERDICTS = Verdicts(
    title=f"Bars: means within {OFF_DOCUMENT} of the document, seeds within {OFF_SINGLE} of one process, or its bits",
    columns=("topology", "seeds", "mean", "spread", "document", "off", "off one process", "same bits"),
    lines=verdict_lines,
)
