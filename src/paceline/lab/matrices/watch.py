"""WHAT makes processors and cables busy? Document 003's two models over data size, model size and division of servers.

A matrix of the lab: `paceline lab run watch`. Pure. Every run has hosts of its own (network namespaces), so that what
went through loopback and through the card between two hosts is this run's alone; both, and the cores of every task, are
kept twice a second in the result file. Without root only one host can be had, and its loopback is everybody's.
Answers C36 to C42.
"""

from collections.abc import Sequence

import msgspec

from paceline.cluster.settings import Settings
from paceline.lab.cells import NONE, TWO_HOSTS, Cell, Finished, Runs, Table, Verdicts, middle, number
from paceline.lab.scenario import Matrix
from paceline.lab.scripts.watched import Watched
from paceline.lab.tables import of_runs, quartile

AUTOENCODER, TRANSFORMER = "autoencoder", "spatial transformer"
PROGRAMS = {AUTOENCODER: "paceline.launchers.demos.autoencoder", TRANSFORMER: "paceline.launchers.demos.transformer"}
DATA, MODEL = ("small", "large"), ("small", "large")  # of document 003: how much data, how large a model
MODEL_FLAGS = {
    (AUTOENCODER, "small"): ("--hidden", "200"),
    (AUTOENCODER, "large"): ("--hidden", "800"),
    (TRANSFORMER, "small"): (),
    (TRANSFORMER, "large"): ("--larger",),
}
IMAGES = {AUTOENCODER: {"small": 20_000, "large": 60_000}, TRANSFORMER: {"small": 2_000, "large": 8_000}}
QUICK_IMAGES = {AUTOENCODER: {"small": 2_000, "large": 6_000}, TRANSFORMER: {"small": 200, "large": 600}}
SHM, TCP = "one host, shm", "one host, tcp"
BESIDE, APART = "ps beside worker 0", "ps apart"
DIVISIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    SHM: (("ps:0", "worker:0", "worker:1"),),
    TCP: (("ps:0", "worker:0", "worker:1"),),
    BESIDE: TWO_HOSTS,
    APART: (("ps:0",), ("worker:0", "worker:1")),
}
SHORT = {SHM: "shm", TCP: "tcp", BESIDE: "beside", APART: "apart"}  # as --set has them
EPOCHS = 3
TASKS = ("ps:0", "worker:0", "worker:1")
BASE = ("small", "small", TCP)
Kind = tuple[str, str, str]  # data, model, division


def matrix(is_quick: bool = False) -> Matrix:
    """Both models, everything with everything; quick: from one base, one thing changed at a time."""
    every = [(d, m, where) for d in DATA for m in MODEL for where in DIVISIONS]
    cells = tuple(
        _cell(algorithm, kind, is_quick)
        for algorithm in PROGRAMS
        for kind in (_around_base(algorithm) if is_quick else every)
    )
    note = (
        "1 ps + 2 workers, async, Adam, batch 100 (autoencoder 128), 3 epochs in which the workers share the images, a "
        "thread a process. data: images to train on; model: hidden units 200 or 800, two or three convolutions. cores: "
        "of each task, while the workers trained (of a short run, with its start); step: median, mean over the "
        "workers; loopback, outer: all bytes through the hosts' own interfaces, and from host to host; a "
        "lane shm has none. Every half second of it is in the result file."
    )
    columns = (
        "algorithm", "data", "model", "division", "trained s", "step ms", "ps:0 cores", "worker:0", "worker:1",
        "loopback MB", "outer MB", "outer MB/s",
    )  # fmt: skip
    title = "Document 003: processors and cables"
    table = Table(
        title=title,
        columns=columns,
        cells=cells,
        line=line,
        note=note,
        verdicts=VERDICTS,
        usual_s=12.0 if is_quick else 28.0,
    )
    return Matrix(name="watch", tables=(table,))


def _around_base(algorithm: str) -> list[Kind]:
    """Divisions of servers of one algorithm alone: for both of them there is no time.

    >>> len(_around_base(AUTOENCODER)), len(_around_base(TRANSFORMER))
    (6, 3)
    """
    data, model, where = BASE
    divisions = [(data, model, other) for other in (SHM, BESIDE, APART)] if algorithm == AUTOENCODER else []
    return [BASE, ("large", model, where), (data, "large", where), *divisions]


def _cell(algorithm: str, kind: Kind, is_quick: bool) -> Cell:
    data, model, division = kind
    images = (QUICK_IMAGES if is_quick else IMAGES)[algorithm][data]
    lane = "tcp" if division == TCP else "auto"
    return Cell(
        title=f"{algorithm}, data {data}, model {model}, {division}",
        labels=(algorithm, f"{data} ({images})", model, division),
        program=(PROGRAMS[algorithm], "--epochs", str(EPOCHS), "--images", str(images), *MODEL_FLAGS[algorithm, model]),
        num_workers=2,
        settings=Settings(run_id="", lane=lane, save_every="none"),
        limit_s=600.0,
        axes={"algorithm": algorithm, "data": data, "model": model, "division": SHORT[division]},
        hosts=DIVISIONS[division],
    )


def line(cell: Cell, done: Finished) -> tuple[str, ...]:
    """The numbers of one run."""
    told = watched(done)
    return (
        number(trained_s(done), 1),
        number(step_ms(done), 2),
        *(number(told.cores(task, trained_s(done)), 2) for task in TASKS),
        number(told.loopback_bytes / 1e6, 1),
        number(told.outer_bytes / 1e6, 1),
        number(told.outer_bytes / 1e6 / trained_s(done) if trained_s(done) else None, 2),
        "" if told.is_alone else "its host was this machine: loopback is everybody's",
    )


def trained_s(done: Finished) -> float:
    """How long the workers trained; what came before is the start of processes, which would hide it."""
    epochs = [[worker.first_epoch_s, *[worker.epoch_s] * (EPOCHS - 1)] for worker in done.workers]
    return max((sum(each for each in worker if each is not None) for worker in epochs), default=0.0)


def watched(done: Finished) -> Watched:
    return msgspec.json.decode(done.told, type=Watched)


def step_ms(done: Finished) -> float | None:
    """What a step took, of a worker in the middle."""
    return middle([worker.step_ms.median for worker in done.workers if worker.step_ms is not None])


# --- what document 003 says of it -------------------------------------------------------------------------------------


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One run in the terms of the claims."""

    cores: float  # of all tasks
    chief: float  # cores of worker 0 over those of worker 1
    seconds: float  # of training
    step_ms: float
    mb: float  # through all interfaces
    samples_per_s: float


def seen(done: Finished) -> Seen:
    told = watched(done)
    last_s = trained_s(done)
    other = told.cores("worker:1", last_s)
    return Seen(
        cores=sum(told.cores(task, last_s) for task in TASKS),
        chief=told.cores("worker:0", last_s) / other if other else 0.0,
        seconds=last_s or told.wall_s,
        step_ms=step_ms(done) or 0.0,
        mb=(told.loopback_bytes + told.outer_bytes) / 1e6,
        samples_per_s=sum(worker.samples_per_s or 0.0 for worker in done.workers),
    )


TIMED = ("seconds", "step_ms", "samples_per_s")  # what others on the machine disturb


def together(runs: Sequence[Seen]) -> Seen:
    """Over repetitions: of times and rates the lower quartile, of the rest the mean."""
    names = Seen.__struct_fields__
    told = {name: (quartile if name in TIMED else middle)([getattr(each, name) for each in runs]) for name in names}
    return msgspec.convert(told, Seen)


NOT_SHOWN = "not shown"


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence of document 003: which of two runs is compared with the base, in what."""

    name: str
    says: str
    of: tuple[Kind, Kind]  # the second over the first
    field: str
    expects: str  # same, more, less
    lacks: str = ""  # what the document means is not in these runs: the ratio is told, and no verdict

    def holds(self, ratio: float) -> bool:
        """Fifteen in a hundred is the same: machines breathe."""
        return {"same": 0.85 <= ratio <= 1.15, "more": ratio > 1.15, "less": ratio < 0.85}[self.expects]


MORE_DATA, BIGGER = ("large", "small", TCP), ("small", "large", TCP)
NEAR, FAR, ONE = ("small", "small", BESIDE), ("small", "small", APART), ("small", "small", SHM)
CLAIMS = (
    Claim(name="C36", says="the chief is loaded more (cores over worker 1's)", of=(BASE, BASE), field="chief",
          expects="more", lacks="its work is checkpoints, which are off here"),
    Claim(name="C37", says="more data: cores unchanged", of=(BASE, MORE_DATA), field="cores", expects="same"),
    Claim(name="C38", says="more data: longer", of=(BASE, MORE_DATA), field="seconds", expects="more"),
    Claim(name="C38", says="more data: other network use", of=(BASE, MORE_DATA), field="mb", expects="more"),
    Claim(name="C40", says="a bigger model: more cores", of=(BASE, BIGGER), field="cores", expects="more"),
    Claim(name="C40", says="a bigger model: more network", of=(BASE, BIGGER), field="mb", expects="more"),
    Claim(name="C41", says="divided servers: slower steps", of=(ONE, FAR), field="step_ms", expects="more"),
    Claim(name="C42", says="ps beside worker: more samples/s than apart", of=(FAR, NEAR), field="samples_per_s",
          expects="more"),
)  # fmt: skip


def verdict_lines(ended: Runs) -> list[tuple[str, ...]]:
    """A line a claim, with both algorithms beside each other; there is no A/A cell, so each says of how many runs."""
    runs: dict[tuple[str, Kind], list[Seen]] = {}
    for cell, done in ended:
        runs.setdefault((cell.labels[0], _kind(cell)), []).append(seen(done))
    told = {kind: together(each) for kind, each in runs.items()}
    lines = [line for claim in CLAIMS if (line := _verdict(claim, told)) is not None]
    algorithms = [told.get((name, BASE)) for name in PROGRAMS]
    if all(algorithms):
        first, second = (each.step_ms for each in algorithms if each is not None)
        ratio = second / first if first else 0.0
        lines.append(("C39", "the algorithm matters most (step, second over first)", f"{ratio:.2f}", NONE, _most(told)))
    return [(*line[:-1], f"{line[-1]}; {of_runs(len(each) for each in runs.values())}") for line in lines]


def _kind(cell: Cell) -> Kind:
    return cell.labels[1].split()[0], cell.labels[2], cell.labels[3]


def _verdict(claim: Claim, told: dict[tuple[str, Kind], Seen]) -> tuple[str, ...] | None:
    ratios = [_ratio(claim, [told.get((name, kind)) for kind in claim.of]) for name in PROGRAMS]
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return None
    holds = [claim.holds(ratio) for ratio in known]
    remark = "it holds" if all(holds) else "it holds of one of them" if any(holds) else "it does not hold"
    remark = f"{NOT_SHOWN}: {claim.lacks}" if claim.lacks else remark
    return (claim.name, claim.says, *(number(ratio, 2) for ratio in ratios), remark)


def _ratio(claim: Claim, both: list[Seen | None]) -> float | None:
    before, after = (getattr(each, claim.field) if each is not None else None for each in both)
    if claim.field == "chief":
        return float(after) if after else None
    return after / before if before and after else None


def _most(told: dict[tuple[str, Kind], Seen]) -> str:
    """How much everything else changes a step, so that it may be held against the algorithm."""
    ratios = []
    for (name, _), each in told.items():
        base = told.get((name, BASE))
        if base is not None and base.step_ms and each.step_ms:
            ratios.append(max(each.step_ms / base.step_ms, base.step_ms / each.step_ms))
    return f"everything else changes a step by up to {max(ratios, default=1.0):.2f}"


VERDICTS = Verdicts(
    title="Document 003's claims, as ratios; 0.85 to 1.15 is the same",
    columns=("claim", "it says", AUTOENCODER, TRANSFORMER),
    lines=verdict_lines,
)
