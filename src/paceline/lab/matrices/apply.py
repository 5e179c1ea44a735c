"""WHAT does an update cost? The ps' own time for it, and the step of a large model beside single processes.

A matrix of the lab: `paceline lab run apply`. Pure; the bar is the project's own, for two cores.
"""

from paceline.cluster.settings import Settings
from paceline.lab.cells import Cell, Finished, Table, middle, number
from paceline.lab.scenario import Amounts, Kind, Matrix, Row, Scenario
from paceline.lab.scripts.sizes import SIZES, count_parameters

APPLY = "paceline.lab.scripts.apply_script"
SINGLES = "2 single processes at once, 11 M"
AGAIN = "2 single processes at once, 11 M, again"
SYNC = "1 ps + 2 workers, sync, shm, 11 M"
SYNC_SHM = Settings(run_id="", mode="sync", lane="shm", save_every="none")
OPTIMIZERS = {"momentum": "SGD with momentum", "adam": "Adam"}
COPIES = 20  # of all parameters that a run may need at once: slots, sums, states, and both workers' own


def matrix(is_quick: bool = False) -> Matrix:
    """Four whole runs that only push and update, and one row: sync beside two single processes."""
    return Matrix(
        name="apply",
        tables=(_updates(is_quick),),
        title="The step of 784-3072-2800-10 (11.0 M parameters), batch 100, SGD lr 0.01, a thread a process",
        scenarios=(
            Scenario(name=SINGLES, kind=Kind.SINGLE, num_workers=2, what="11M"),
            Scenario(name=AGAIN, kind=Kind.SINGLE, num_workers=2, what="11M"),
            Scenario(name=SYNC, kind=Kind.CLUSTER, num_ps=1, num_workers=2, settings=SYNC_SHM, what="11M"),
        ),
        rows=(
            Row(title="A/A: 2 single processes against 2", scenario=AGAIN, beside=SINGLES, is_noise=True),
            Row(title=f"{SYNC}, over 2 single processes at once", scenario=SYNC, beside=SINGLES, bar=1.35),
        ),
        amounts=Amounts(reps=3, steps=5, warmup_steps=3) if is_quick else Amounts(steps=20, warmup_steps=10),
        usual_step_us=100_000.0,
    )


def _updates(is_quick: bool) -> Table:
    cells = tuple(
        Cell(
            title=f"update, {size}, {shown}",
            labels=(size, shown),
            program=(APPLY, "--size", size, "--optimizer", optimizer, "--steps", str(5 if is_quick else steps)),
            num_workers=2,
            settings=SYNC_SHM,
            limit_s=240.0,
            needs_bytes=COPIES * 4 * count_parameters(SIZES[size]),
        )
        for size, steps in (("11M", 200), ("100M", 40))
        for optimizer, shown in OPTIMIZERS.items()
    )
    note = (
        "1 ps + 2 workers, sync, shm; apply: the ps' time to add two gradients, divide and update, mean of all updates "
        "with the first, which makes the optimizer's memory; step: the whole of it, median. "
        "Synthetic: gradients are made once, nothing is computed in between. 11M: 784-3072-2800-10, 100M: "
        "784-8192-11400-10."
    )
    columns = ("parameters", "optimizer", "updates", "apply ms", "ns a parameter", "step ms")
    return Table(
        title="What an update costs the ps",
        columns=columns,
        cells=cells,
        line=update_line,
        note=note,
        usual_s=6.0 if is_quick else 15.0,
    )


def update_line(cell: Cell, done: Finished) -> tuple[str, ...]:
    """The time of an update, and of the step around it."""
    ps = done.ps[0]
    step_ms = middle([worker.step_ms.median for worker in done.workers if worker.step_ms is not None])
    count = count_parameters(SIZES[cell.labels[0]])
    each_ns = None if ps.apply_ms is None else 1e6 * ps.apply_ms / count
    return (str(ps.updates), number(ps.apply_ms, 2), number(each_ns, 2), number(step_ms, 2), "")
