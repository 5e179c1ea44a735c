"""HOW FAR does a ps carry? Steps that compute nothing: small to large loads, 1 to 32 workers, 1 to 4 ps, each lane.

A matrix of the lab: `paceline lab run scale`. Pure. What is left of a step without computing is what the cluster costs;
where pushes a second no longer grow with the workers, the ps (or this machine's cores) are full. Answers C6 (each
further worker lengthens the epoch), C12 and C14 (a second ps costs; one while it copes), C30 (several update faster).
"""

import msgspec

from paceline.cluster.settings import Settings
from paceline.lab.cells import NONE, Cell, Finished, Runs, Table, Verdicts, number
from paceline.lab.scenario import Matrix
from paceline.lab.scripts.pushes import Pushes, growth

SCRIPT = "paceline.lab.scripts.scale_script"
SIZES = {"1 kB": 1_000, "1 MB": 1_000_000, "100 MB": 100_000_000}
WORKERS = (1, 2, 4, 8, 16, 32)
NUM_PS = (1, 2, 4)
LANES = ("shm", "tcp", "grpc")
QUICK_SIZES = ("1 kB", "1 MB")
QUICK_WORKERS = (1, 4, 16)
QUICK_PS = {"shm": (1, 2), "tcp": (1,), "grpc": (1,)}
TASK_BYTES = 60_000_000  # of a process, beside its load; torch itself is shared
COPIES = 3  # of the load, of each worker: its parameters, its gradient, its slot at the ps
PAYS = 1.10  # so many times more pushes a second, or a further worker brings nothing


def matrix(is_quick: bool = False) -> Matrix:
    """Every load with every number of workers and ps on each lane; quick: two loads, and fewer of the rest."""
    sizes, workers = (QUICK_SIZES, QUICK_WORKERS) if is_quick else (tuple(SIZES), WORKERS)
    seconds = 0.5 if is_quick else 2.0
    cells = tuple(
        _cell(size, count, num_ps, lane, seconds)
        for size in sizes
        for lane in LANES
        for num_ps in (QUICK_PS[lane] if is_quick else NUM_PS)
        for count in workers
    )
    note = (
        "Null workers push a gradient of zeros and take the parameters back, one push after the other, async, SGD, for "
        f"{seconds:g} s, all at the same time; they are forked from one process, as `paceline run` does. push: what a "
        "worker waits, the median; pushes/s: of all workers; cost: what one of them costs the cluster; MB/s: there and "
        "back; started: from the first fork until all have joined and pushed."
    )
    columns = ("load", "lane", "ps", "workers", "push us", "pushes/s", "cost us", "MB/s", "started s")
    title = "Steps that compute nothing"
    table = Table(
        title=title,
        columns=columns,
        cells=cells,
        line=line,
        note=note,
        verdicts=VERDICTS,
        usual_s=4.0 if is_quick else 11.0,
    )
    return Matrix(name="scale", tables=(table,))


def needs_bytes(size_bytes: int, num_workers: int, num_ps: int) -> int:
    """What a run takes of the memory, about."""
    return size_bytes * (COPIES * num_workers + 2) + TASK_BYTES * (num_workers + 4 * num_ps)


def _cell(size: str, num_workers: int, num_ps: int, lane: str, seconds: float) -> Cell:
    counts = ("--bytes", str(SIZES[size]), "--workers", str(num_workers), "--ps", str(num_ps))
    return Cell(
        title=f"{size}, {lane}, {num_ps} ps, {workers_of(num_workers)}",
        labels=(size, lane, str(num_ps), str(num_workers)),
        program=(SCRIPT, *counts, "--lane", lane, "--seconds", f"{seconds:g}"),
        num_ps=num_ps,
        num_workers=num_workers,
        starts_tasks=True,  # it has them forked
        settings=Settings(run_id="", lane=lane),
        limit_s=330.0,
        axes={"load": size},
        needs_bytes=needs_bytes(SIZES[size], num_workers, num_ps),
    )


def line(cell: Cell, done: Finished) -> tuple[str, ...]:
    """The numbers of one run."""
    told = _told(done)
    return (
        number(told.wait_us, 0),
        number(told.per_s, 0),
        number(told.cost_us, 1),
        number(2 * SIZES[cell.labels[0]] * told.per_s / 1e6, 0),
        number(told.started_s, 2),
        "",
    )


def _told(done: Finished) -> Pushes:
    return msgspec.json.decode(done.told, type=Pushes)


# --- how it grows -----------------------------------------------------------------------------------------------------


def verdict_lines(ended: Runs) -> list[tuple[str, ...]]:
    """A line for each load, lane and number of ps: over the numbers of workers."""
    kinds = dict.fromkeys(cell.labels[:3] for cell, _ in ended)
    return [_verdict(kind, {int(c.labels[3]): _told(d) for c, d in ended if c.labels[:3] == kind}) for kind in kinds]


def _verdict(kind: tuple[str, ...], told: dict[int, Pushes]) -> tuple[str, ...]:
    each_us = growth([(workers, each.wait_us) for workers, each in told.items()])
    few, many = min(told), max(told)
    ratio = told[many].wait_us / told[few].wait_us if many > few else None
    best = max(told, key=lambda workers: told[workers].per_s)
    return (
        *kind,
        f"{told[few].wait_us:.0f} ({workers_of(few)})",
        number(each_us, 0),
        NONE if ratio is None else f"{ratio:.2f} ({few} to {many})",
        f"{told[best].per_s:.0f} ({workers_of(best)})",
        _remark({workers: each.per_s for workers, each in told.items()}),
    )


def workers_of(count: int) -> str:
    """
    >>> workers_of(1), workers_of(2)
    ('1 worker', '2 workers')
    """
    return f"{count} worker{'' if count == 1 else 's'}"


def _remark(per_s: dict[int, float]) -> str:
    full = full_from(per_s)
    if len(per_s) < 2:
        told = "one number of workers says nothing of growth"
    elif full is None:
        told = f"still grows with {workers_of(max(per_s))}"
    else:
        told = f"more than {workers_of(full)} bring less than {100 * (PAYS - 1):.0f} % more pushes/s"
    return f"{told}; one run each"


def full_from(per_s: dict[int, float]) -> int | None:
    """The number of workers from which more of them bring nothing; None: each step up still brought something.

    >>> full_from({1: 100.0, 2: 180.0, 4: 185.0, 8: 150.0}), full_from({1: 100.0, 4: 300.0})
    (2, None)
    """
    counts = sorted(per_s)
    for at, workers in enumerate(counts[:-1]):
        if max(per_s[more] for more in counts[at + 1 :]) < PAYS * per_s[workers]:
            return workers
    return None


VERDICTS = Verdicts(
    title="How a push grows: with the fewest workers, by each one more, with the most over the fewest; most pushes/s",
    columns=("load", "lane", "ps", "fewest us", "us a worker", "most over fewest", "most pushes/s"),
    lines=verdict_lines,
)
