"""WHAT does each topology of document 000 cost and learn? Its nine rows, its figures beside ours, and what it left out.

A matrix of the lab: `paceline lab run seeds`. Pure; recipe and script are those of lab/matrices/accuracy. Answers C1
to C18 and, in a table of its own, C43. `--quick` takes ten times the learning rate and a tenth of the batches from one
seed: the same curve at a tenth of the cost, so that accuracies may be compared, and epoch times only as ratios.
"""

from collections.abc import Sequence

import msgspec

from paceline.cluster.settings import Settings
from paceline.lab.cells import (
    NONE,
    TWO_HOSTS,
    Cell,
    Finished,
    Runs,
    Table,
    Verdicts,
    Worker,
    middle,
    number,
    seeds_from_1,
)
from paceline.lab.matrices import accuracy, document_times
from paceline.lab.matrices.accuracy import EPOCHS, OFF_DOCUMENT, SEEDS, SINGLE, Topology, cell_of, remark
from paceline.lab.matrices.document_times import Times
from paceline.lab.scenario import Matrix
from paceline.lab.scripts.curves import spread
from paceline.lab.scripts.learned import Learned

IN_GRAPH_SCRIPT = "paceline.lab.scripts.in_graph_script"
LR, BATCHES = 0.001, 550
SHORT_LR, SHORT_BATCHES = 0.01, 55
LATE_S, LATE_EPOCHS = 3.0, 4  # C43: how much later the second worker comes, and how long both then train


class DocumentRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of document 000, or one that it gave up, with the seconds that it tells."""

    number: str
    topology: Topology
    times: Times = Times()
    hosts: tuple[tuple[str, ...], ...] = ()
    lr_times: int = 1
    needs_gpus: int = 0
    is_in_graph: bool = False

    @property
    def title(self) -> str:
        return self.topology.title


def _two_hosts(title: str, workers: int, mode: str = "async", document: float | None = None) -> Topology:
    return Topology(title=f"two hosts: {title}", num_workers=workers, mode=mode, document=document)


GPU_1 = Topology(title="1 ps + 2 workers, async, worker 1 on gpu 1", num_workers=2)
TWICE_LR = Topology(title="1 ps + 2 workers, sync, lr x 2", num_workers=2, mode="sync")
IN_GRAPH = Topology(title="in-graph, 1 client + 2 towers, sync", num_workers=3)
ROWS = (
    DocumentRow(number="0", topology=SINGLE, times=document_times.SINGLE),
    DocumentRow(number="1", topology=accuracy.ONE, times=document_times.ONE),
    DocumentRow(number="2", topology=accuracy.ASYNC, times=document_times.ASYNC),
    DocumentRow(number="3", topology=GPU_1, times=document_times.ASYNC_TWO_GPUS, needs_gpus=2),
    DocumentRow(number="4", topology=accuracy.SYNC, times=document_times.SYNC),
    DocumentRow(number="5", topology=accuracy.ASYNC_TWO_PS, times=document_times.ASYNC_TWO_PS),
    DocumentRow(number="6", topology=accuracy.SYNC_TWO_PS, times=document_times.SYNC_TWO_PS),
    DocumentRow(
        number="7",
        topology=_two_hosts("1 ps + 2 workers, async", 2, document=0.80),
        times=document_times.ASYNC_TWO_HOSTS,
        hosts=TWO_HOSTS,
    ),
    DocumentRow(
        number="8",
        topology=_two_hosts("1 ps + 3 workers, async", 3, document=0.83),
        times=document_times.ASYNC_THREE,
        hosts=(("ps:0", "worker:0", "worker:1"), ("worker:2",)),
    ),
    DocumentRow(number="4, lr x 2", topology=TWICE_LR, lr_times=2),
    DocumentRow(number="9, given up", topology=_two_hosts("1 ps + 2 workers, sync", 2, "sync"), hosts=TWO_HOSTS),
    DocumentRow(number="in-graph, given up", topology=IN_GRAPH, is_in_graph=True),
)
BY_TITLE = {row.title: row for row in ROWS}
LONGER = {200: 0.80, 300: 0.83}  # epochs of a process alone; what the document's two and three async workers reach


def matrix(is_quick: bool = False, num_seeds: int | None = None) -> Matrix:
    """Twelve topologies from each seed, and who waits at the start; quick: the short recipe, from one seed."""
    seeds = seeds_from_1(num_seeds or (1 if is_quick else len(SEEDS)))
    return Matrix(name="seeds", tables=(_rows(is_quick, seeds), _starts(is_quick)))


def _rows(is_quick: bool, seeds: Sequence[int]) -> Table:
    batches = SHORT_BATCHES if is_quick else BATCHES
    cells = tuple(_cell(row, seed, is_quick) for seed in seeds for row in ROWS)
    note = (
        "MNIST as document 000 has it: 784-100-10, sigmoid, weights from N(0, 1), SGD, batch 100, "
        f"{batches} batches an epoch{' (the document has 550)' if is_quick else ''}, {EPOCHS} epochs of every worker "
        "over the whole set; a thread a process. first epoch, epoch: seconds of each worker; the document's are of "
        "TensorFlow 1.2 on a GTX 1080 and have an evaluation in them. accuracy: on the 10,000 test images, after the "
        "last update of all; a process alone goes on to 300 epochs. Two hosts: two network namespaces."
    )
    columns = (
        "#", "topology", "seed", "updates", "accuracy", "first epoch s", "epoch s", "document's first", "document's",
    )  # fmt: skip
    title = f"Document 000's rows{', short (lr 0.01, 55 batches an epoch)' if is_quick else ''}"
    return Table(
        title=title,
        columns=columns,
        cells=cells,
        line=line,
        note=note,
        verdicts=VERDICTS,
        usual_s=16.0 if is_quick else 60.0,
    )


def _cell(row: DocumentRow, seed: int, is_quick: bool) -> Cell:
    lr, batches = (SHORT_LR, SHORT_BATCHES) if is_quick else (LR, BATCHES)
    recipe = ("--lr", f"{lr * row.lr_times:g}", "--batches", str(batches), "--epochs", str(EPOCHS))
    cell = cell_of(row.topology, seed, recipe)
    program, settings = cell.program, cell.settings
    if row.is_in_graph:
        program = (IN_GRAPH_SCRIPT, *program[1:])
    if row.needs_gpus:
        program = (*program, "--own-device")
        settings = msgspec.structs.replace(settings, worker_device="/gpu:0,/gpu:1")
    return msgspec.structs.replace(
        cell,
        labels=(row.number, *cell.labels),
        program=program,
        settings=settings,
        needs_gpus=row.needs_gpus,
        hosts=row.hosts,
        limit_s=1800.0,
    )


def line(cell: Cell, done: Finished) -> tuple[str, ...]:
    """The numbers of one run, beside the document's."""
    row, learned = BY_TITLE[cell.labels[1]], _learned(done)
    point = learned.last if cell.num_ps else learned.points[0]
    later = [f"{each.accuracy:.4f} after {each.updates}" for each in learned.points[1:]]
    return (
        str(point.updates),
        f"{point.accuracy:.4f}",
        seconds(_first_s(done)),
        seconds(_epoch_s(done)),
        seconds(row.times.first_s),
        seconds(row.times.epoch_s),
        ", ".join(later),
    )


def seconds(values: Sequence[float]) -> str:
    """As the document writes them.

    >>> seconds((5.24, 5.35)), seconds(()), seconds((0.071,)), seconds((37.0,))
    ('5.24 / 5.35', '-', '0.071', '37')
    """
    return " / ".join(f"{value:.3g}" for value in values) or NONE


def _learned(done: Finished) -> Learned:
    return msgspec.json.decode(done.told, type=Learned)


def _first_s(done: Finished) -> list[float]:
    told = _learned(done).first_epoch_s
    return [w.first_epoch_s for w in done.workers if w.first_epoch_s is not None] or ([told] if told else [])


def _epoch_s(done: Finished) -> list[float]:
    told = _learned(done).epoch_s
    return [w.epoch_s for w in done.workers if w.epoch_s is not None] or ([told] if told else [])


# --- all seeds together -----------------------------------------------------------------------------------------------


class Means(msgspec.Struct, frozen=True, kw_only=True):
    """What one topology came to, over its seeds."""

    num_seeds: int
    accuracy: float
    spread: float | None  # of the accuracy; None: one seed has none
    first_s: float | None
    epoch_s: float | None


def means(ended: Runs, title: str) -> Means | None:
    """None: no run of it came to its end."""
    found = [(cell, done) for cell, done in ended if cell.labels[1] == title]
    if not found:
        return None
    learned = [(_learned(done).last if cell.num_ps else _learned(done).points[0]).accuracy for cell, done in found]
    return Means(
        num_seeds=len(found),
        accuracy=sum(learned) / len(learned),
        spread=spread(learned),
        first_s=middle([each for _, done in found for each in _first_s(done)]),
        epoch_s=middle([each for _, done in found for each in _epoch_s(done)]),
    )


def verdict_lines(ended: Runs) -> list[tuple[str, ...]]:
    """A line a topology, then the longer runs of a process alone."""
    single = means(ended, SINGLE.title)
    lines = []
    for row in ROWS:
        found = means(ended, row.title)
        if found is not None:
            lines.append(_verdict(row, found, single))
    return lines + _longer(ended)


def _verdict(row: DocumentRow, found: Means, single: Means | None) -> tuple[str, ...]:
    document = middle(row.times.epoch_s)
    alone_s = single.epoch_s if single else None
    return (
        row.number,
        row.title,
        str(found.num_seeds),
        *_beside(found.accuracy, found.spread, row.topology.document),
        number(found.first_s, 3),
        number(found.epoch_s, 3),
        number(found.epoch_s / alone_s if found.epoch_s and alone_s else None, 2),
        number(document / document_times.SINGLE.epoch_s[0] if document else None, 2),
        _remark([(found.accuracy, row.topology.document)], found.num_seeds),
    )


def _beside(found: float, between: float | None, document: float | None) -> tuple[str, ...]:
    off = NONE if document is None else f"{found - document:+.4f}"
    return f"{found:.4f}", number(between, 4), number(document, 2), off


def _remark(found: Sequence[tuple[float, float | None]], num_seeds: int) -> str:
    known = [value - document for value, document in found if document is not None]
    off = [f"the mean is {abs(each):.4f} off the document" for each in known if abs(each) > OFF_DOCUMENT]
    return remark(off, num_seeds) if known else "the document has no figure"


def _longer(ended: Runs) -> list[tuple[str, ...]]:
    """One process for as many epochs as two and three asynchronous workers have together (C5)."""
    runs = [_learned(done).points for cell, done in ended if cell.labels[1] == SINGLE.title]
    lines = []
    for epochs, document in LONGER.items():
        at = epochs // EPOCHS - 1
        accuracies = [points[at].accuracy for points in runs if len(points) > at]
        found = middle(accuracies)
        if found is not None:
            beside = _beside(found, spread(accuracies), document)
            told = (*beside, *[NONE] * 4, _remark([(found, document)], len(runs)))
            lines.append((f"0, x {epochs}", f"{SINGLE.title}, {epochs} epochs", str(len(runs)), *told))
    return lines


VERDICTS = Verdicts(
    title=f"Means over the seeds; spread: between the most and the least; bar: within {OFF_DOCUMENT} of the document",
    columns=(
        "#", "topology", "seeds", "accuracy", "spread", "document", "off", "first epoch s", "epoch s", "over single",
        "document's",
    ),
    lines=verdict_lines,
)  # fmt: skip


# --- C43: who waits at the start --------------------------------------------------------------------------------------


def _starts(is_quick: bool) -> Table:
    epochs = 2 if is_quick else LATE_EPOCHS
    late_s = 1.0 if is_quick else LATE_S
    cells = tuple(
        Cell(
            title=f"first steps, {mode}, worker 1 {f'{late:g} s late' if late else 'at once'}",
            labels=(mode, f"{late:g}"),
            program=(
                accuracy.SCRIPT, "--lr", f"{LR:g}", "--batches", str(BATCHES if not is_quick else 2 * SHORT_BATCHES),
                "--epochs", str(epochs), "--late-s", f"{late:g}",
            ),
            num_workers=2,
            settings=Settings(run_id="", mode=mode, save_every="none"),
        )
        for mode in (("sync",) if is_quick else ("sync", "async"))
        for late in (0.0, late_s)
    )  # fmt: skip
    note = (
        "Document 004 (C43): in sync mode worker 0 is the slowest over its first 100 steps, because it waits for "
        "worker 1 to come. first 100: mean step of each worker; with the wait: the same with the seconds before "
        "the first step, which is how the document counts; later: median step."
    )
    columns = ("mode", "late s", "waited s", "first 100 ms", "with the wait ms", "later ms")
    title = "The first 100 steps of each worker"
    return Table(
        title=title,
        columns=columns,
        cells=cells,
        line=start_line,
        note=note,
        verdicts=STARTS,
        usual_s=8.0 if is_quick else 16.0,
    )


def with_wait_ms(worker: Worker) -> float | None:
    """The mean of the first 100 steps, when a clock runs from the moment the worker wants to train."""
    if worker.first_100_steps_ms is None:
        return None
    return worker.first_100_steps_ms + 1e3 * worker.waited_at_start_s / min(100, max(1, worker.steps))


def start_line(cell: Cell, done: Finished) -> tuple[str, ...]:
    """Both workers, side by side."""
    workers = done.workers
    return (
        " / ".join(number(each.waited_at_start_s, 2) for each in workers),
        " / ".join(number(each.first_100_steps_ms, 3) for each in workers),
        " / ".join(number(with_wait_ms(each), 3) for each in workers),
        " / ".join(number(each.step_ms.median if each.step_ms else None, 3) for each in workers),
        "",
    )


def start_verdicts(ended: Runs) -> list[tuple[str, ...]]:
    """Whether worker 0's first steps are slower than worker 1's, counted with and without its waiting."""
    return [_start_verdict(cell, done.workers) for cell, done in ended if len(done.workers) == 2]


def _start_verdict(cell: Cell, workers: Sequence[Worker]) -> tuple[str, ...]:
    ratios = []
    for count in (with_wait_ms, lambda each: each.first_100_steps_ms):
        mine, other = count(workers[0]), count(workers[1])
        ratios.append(mine / other if mine is not None and other else None)
    told = ["it cannot be told" if r is None else "yes" if r > 1.1 else "no" for r in ratios]
    says = f"worker 0 the slowest: {told[0]} with its wait for the others, {told[1]} without"
    return (f"{cell.labels[0]}, {cell.labels[1]} s late", number(ratios[0], 2), number(ratios[1], 2), says)


STARTS = Verdicts(
    title="C43: the first 100 steps of worker 0 over those of worker 1",
    columns=("run", "with the wait", "without"),
    lines=start_verdicts,
)
