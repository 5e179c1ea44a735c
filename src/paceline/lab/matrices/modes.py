"""WHICH mode is worth its waiting? Every mode on MNIST to a test accuracy; a straggler; last against averaged.

A matrix of the lab: `paceline lab run modes`. Pure; the bar is the project's own, for two cores.
"""

import msgspec

from paceline.cluster.settings import Settings
from paceline.lab.cells import NONE, Cell, Finished, Table, middle, number, share
from paceline.lab.scenario import Amounts, Kind, Matrix, Row, Scenario
from paceline.lab.scripts.curves import Averages, Curve, spread

MNIST = "paceline.lab.scripts.mnist_script"
EMA = "paceline.lab.scripts.ema_script"
SLOW = "worker:1=5x"
SLOWED = "worker:1 5x (sleep)"
DECAY = 0.995
TARGET = 0.97

TWO = "2 of 2"
AGAIN = "2 of 2 again"
SLOWER = "worker:2 5x (sleeps 100 ms)"
ASKED = Settings(run_id="", save_every="none")


def matrix(is_quick: bool = False) -> Matrix:
    """27 whole runs to an accuracy, 4 with averaged parameters, 7 scenarios with a straggler side by side."""
    return Matrix(
        name="modes",
        tables=(_accuracy(is_quick), _averages(is_quick)),
        title="One worker 5x slower; synthetic: a step sleeps 20 ms instead of computing (2,410 parameters, shm)",
        scenarios=_scenarios(),
        rows=_rows(),
        amounts=Amounts(reps=3, steps=20, warmup_steps=5) if is_quick else Amounts(steps=50, warmup_steps=10),
        usual_step_us=38_000.0,
    )


# --- to an accuracy -----------------------------------------------------------------------------------------------


def _accuracy(is_quick: bool) -> Table:
    target = 0.90 if is_quick else TARGET
    amounts = ("--limit-s", "10", "--tail", "3", "--tail-steps", "50") if is_quick else ()
    program = (MNIST, "--target", f"{target:g}", *amounts)
    cells = tuple(
        Cell(
            title=f"{name}, {count} worker{'s' if count > 1 else ''}{f', {SLOWED}' if slow else ''}",
            labels=(name, str(count), SLOWED if slow else NONE),
            program=program,
            num_workers=count,
            settings=msgspec.structs.replace(settings, slow=slow),
        )
        for count, slow in ((1, ""), (2, ""), (3, ""), (3, SLOW))
        for name, settings in modes_of(count)
    )
    columns = (
        "mode", "workers", "slowed", "step ms", "updates/s", "samples/s", f"{target:g} after s", "loss jitter",
        "accuracy spread", "staleness", "p95", "discarded", "waiting",
    )  # fmt: skip
    note = (
        "MNIST, 784-100-10 (relu), batch 100 a worker, SGD lr 0.3 without momentum, 1 ps, shm, a thread a process, the "
        "same in all lines; slowed: that worker sleeps until its step has taken 5x what it takes unslowed. step: "
        "median, mean over the workers that are not slowed, as is waiting (for others, of the time trained); after s: "
        "from all workers ready to the first parameters of the chief with that test accuracy (looked at every 0.25 s "
        "in ctx.pause(), others train on; told to 50 steps); loss jitter: deviation of the chief's step loss from its "
        "running mean (0.98), accuracy spread: max - min, both over the steps after the accuracy was reached; "
        "discarded: of all pushes."
    )
    return Table(
        title=f"MNIST to {target:g}",
        columns=columns,
        cells=cells,
        line=accuracy_line,
        note=note,
        usual_s=5.0 if is_quick else 11.0,
    )


def modes_of(count: int) -> list[tuple[str, Settings]]:
    """Every mode that makes sense with so many workers."""
    found = [
        ("async", _asked(mode="async")),
        ("bounded, staleness 3", _asked(mode="bounded", staleness=3)),
        ("sync", _asked(mode="sync")),
    ]
    if count > 1:
        found.append((f"sync, {count - 1} of {count}", _asked(mode="sync", replicas_to_aggregate=count - 1)))
    double = 2 * count
    found.append((f"sync, {double} gradients a round", _asked(mode="sync", replicas_to_aggregate=double)))
    found.append(("local, H=10, outer sync", _asked(mode="local", local_steps=10, outer="sync")))
    found.append(("local, H=10, outer async", _asked(mode="local", local_steps=10, outer="async")))
    return found


def _asked(**values: object) -> Settings:
    return msgspec.structs.replace(ASKED, **values)


def accuracy_line(cell: Cell, done: Finished) -> tuple[str, ...]:
    """The numbers of one run, and a remark when it did not get there."""
    curve = msgspec.json.decode(done.told, type=Curve)
    free = done.others_than(cell.slowed)
    step_ms = middle([worker.step_ms.median for worker in free if worker.step_ms is not None])
    pushes = sum(sum(ps.pushes.values()) for ps in done.ps[:1]) or sum(worker.steps for worker in done.workers)
    waited_s = sum(worker.waited_s for worker in free)
    slept_ms = [w.step_ms.median for w in done.workers if w.index in cell.slowed and w.step_ms is not None]
    remarks = [f"slowed: step {ms:.3f} ms" for ms in slept_ms]
    if curve.reached is None:
        remarks.append(f"not reached: best {number(curve.best, 4)}")
    return (
        number(step_ms, 3),
        number(curve.updates / curve.seconds, 0),
        number(sum(worker.samples_per_s or 0.0 for worker in done.workers), 0),
        number(curve.reached.at_s if curve.reached else None, 2),
        number(curve.jitter, 4),
        number(spread([point.accuracy for point in curve.tail]), 4),
        number(done.staleness.mean, 2),
        number(done.staleness.p95, 0),
        share(sum(worker.discarded for worker in done.workers), pushes),
        share(waited_s, curve.seconds * len(free)),
        "; ".join(remarks),
    )


# --- last against averaged ----------------------------------------------------------------------------------------


def _averages(is_quick: bool) -> Table:
    amounts = ("--points", "3", "--steps", "100") if is_quick else ()
    asked = {mode: _asked(mode=mode, ema=DECAY) for mode in ("sync", "async")}
    cells = tuple(
        Cell(
            title=f"averaged parameters, {shown}, {mode}, 2 workers",
            labels=(shown, mode),
            program=(EMA, "--momentum", momentum, *amounts),
            num_workers=2,
            settings=settings,
        )
        for shown, momentum in (("SGD", "0"), ("SGD with momentum 0.9", "0.9"))
        for mode, settings in asked.items()
    )
    columns = ("optimizer", "mode", "last", "averaged", "gain", "spread last", "spread averaged")
    note = (
        f"Test accuracy of the last parameters and of their average over time (--ema {DECAY:g}, about the last "
        f"{1 / (1 - DECAY):.0f} updates): mean, and max - min, over the second half of 10 evaluations, 300 steps of "
        "each of 2 workers apart; same model and batch as above, lr 0.3, with momentum 0.1. One run each."
    )
    return Table(
        title="Last against averaged parameters",
        columns=columns,
        cells=cells,
        line=average_line,
        note=note,
        usual_s=5.0 if is_quick else 11.0,
    )


def average_line(cell: Cell, done: Finished) -> tuple[str, ...]:
    """Means and spreads over the second half of the evaluations."""
    told = msgspec.json.decode(done.told, type=Averages)
    last, averaged = (values[len(values) // 2 :] for values in (told.last, told.averaged))
    gain = middle([after - before for before, after in zip(last, averaged, strict=True)])
    return (
        number(middle(last), 4),
        number(middle(averaged), 4),
        NONE if gain is None else f"{gain:+.4f}",
        number(spread(last), 4),
        number(spread(averaged), 4),
        "",
    )


# --- a straggler --------------------------------------------------------------------------------------------------


def _with_straggler() -> dict[str, Settings]:
    return {
        f"2 of 3, {SLOWER}": _asked(mode="sync", replicas_to_aggregate=2),
        f"sync, 3 workers, {SLOWER}": _asked(mode="sync"),
        f"async, 3 workers, {SLOWER}": _asked(mode="async"),
        f"bounded, staleness 3, 3 workers, {SLOWER}": _asked(mode="bounded", staleness=3),
        f"local, H=5, outer sync, 3 workers, {SLOWER}": _asked(mode="local", local_steps=5, outer="sync"),
        f"local, H=5, outer async, 3 workers, {SLOWER}": _asked(mode="local", local_steps=5, outer="async"),
    }


def _scenarios() -> tuple[Scenario, ...]:
    pair = _asked(mode="sync", replicas_to_aggregate=2)
    return (
        *(Scenario(name=name, kind=Kind.CLUSTER, num_ps=1, num_workers=2, settings=pair, what="sleep")
          for name in (TWO, AGAIN)),
        *(Scenario(name=name, kind=Kind.CLUSTER, num_ps=1, num_workers=3, settings=each, what="sleep", straggler=2)
          for name, each in _with_straggler().items()),
    )  # fmt: skip


def _rows() -> tuple[Row, ...]:
    rows = [Row(title=f"A/A: {TWO} against {TWO}", scenario=AGAIN, beside=TWO, is_noise=True)]
    for name in _with_straggler():
        rows.append(Row(title=name, scenario=name, beside=TWO, bar=1.10 if name.startswith("2 of 3") else None))
    return tuple(rows)
