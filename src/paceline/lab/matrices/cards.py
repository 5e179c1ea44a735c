"""DO two devices reach a score sooner? One device, two devices, two machines: time to score beside throughput.

A matrix of the lab: `paceline lab run cards`. Pure. Document 001 trains CIFAR-10 on one card, on two, on two machines,
and says that two are more than three times faster (C25); that can be meant of the time to a score, for throughput has
a limit of two (C29). Also C21, C22, C26, C27: sync beside async. Without cards the devices are CPUs, and every line
says so.
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
from paceline.lab.scenario import Matrix
from paceline.lab.scripts.curves import Curve, Timed, samples_per_s, spread
from paceline.lab.tables import quartile

SCRIPT = "paceline.lab.scripts.cards_script"
SAMPLES, BEGAN_S, ENDED_S, DEVICE = "timed_samples", "timed_from_s", "timed_until_s", "on_a_card"  # what workers log
BATCH = 32  # of each device
STEPS, SCORE, SEEDS = 600, 0.9, 3
QUICK_STEPS, QUICK_SCORE = 120, 0.15
MOST = 1.2  # of what so many devices can do at most; above it something else than training was measured
ONE = "one device"


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way to have devices."""

    title: str
    num_devices: int = 2
    num_ps: int = 1
    mode: str = "async"
    hosts: tuple[tuple[str, ...], ...] = ()


WAYS = (
    Way(title=ONE, num_devices=1, num_ps=0),
    Way(title="one device, 1 ps + 1 worker", num_devices=1),
    Way(title="two devices, towers of one process", num_ps=0),
    Way(title="two devices, 1 ps + 2 workers, sync", mode="sync"),
    Way(title="two devices, 1 ps + 2 workers, async"),
    Way(title="two machines, 1 ps + 2 workers, sync", mode="sync", hosts=TWO_HOSTS),
    Way(title="two machines, 1 ps + 2 workers, async", hosts=TWO_HOSTS),
)


def matrix(is_quick: bool = False, num_seeds: int | None = None) -> Matrix:
    """Seven ways from each seed; quick: from one, to a score that is hardly one."""
    seeds = seeds_from_1(num_seeds or (1 if is_quick else SEEDS))
    steps, score = (QUICK_STEPS, QUICK_SCORE) if is_quick else (STEPS, SCORE)
    cells = tuple(_cell(way, seed, steps, score) for seed in seeds for way in WAYS)
    note = (
        "TensorFlow's CIFAR-10 network (16 channels) on a made-up set of that format, SGD lr 0.1, batch "
        f"{BATCH} a device, {steps} steps of each, a thread a process. samples/s: of all devices, without their first "
        f"steps, over one window: until the last one has ended. score: {score:g} of 500 test images, first "
        "reached by the chief's parameters, which are copied every 5 steps and looked at after training; loss jitter: "
        "of the second half. Two machines are two network namespaces of one: they share its cores."
    )
    columns = ("devices", "seed", "samples/s", f"{score:g} after s", "updates till then", "best", "loss jitter", "on")
    title = f"Time to {score:g} beside throughput"
    table = Table(
        title=title,
        columns=columns,
        cells=cells,
        line=line,
        note=note,
        verdicts=VERDICTS,
        usual_s=13.0 if is_quick else 55.0,
    )
    return Matrix(name="cards", tables=(table,))


def _cell(way: Way, seed: int, steps: int, score: float) -> Cell:
    towers = ("--towers", str(way.num_devices)) if not way.num_ps else ()
    amounts = ("--steps", str(steps), "--batch", str(BATCH), "--score", f"{score:g}", "--seed", str(seed))
    return Cell(
        title=f"{way.title}, seed {seed}",
        labels=(way.title, str(seed)),
        program=(SCRIPT, *amounts, *towers),
        seed=seed,
        num_ps=way.num_ps,
        num_workers=way.num_devices,
        settings=Settings(run_id="", mode=way.mode, save_every="none"),
        limit_s=900.0,
        hosts=way.hosts,
    )


def line(cell: Cell, done: Finished) -> tuple[str, ...]:
    """The numbers of one run, and a remark when it did not get there."""
    curve = _curve(done)
    return (
        number(throughput(cell, done), 0),
        number(curve.reached.at_s if curve.reached else None, 2),
        str(curve.reached.updates) if curve.reached else NONE,
        number(curve.best, 3),
        number(curve.jitter, 4),
        device(done),
        "" if curve.reached else "the score was not reached",
    )


def _curve(done: Finished) -> Curve:
    return msgspec.json.decode(done.told, type=Curve)


def throughput(cell: Cell, done: Finished) -> float | None:
    """Samples a second of all devices; None: somebody has not told."""
    told = [_timed(worker) for worker in done.workers] if cell.num_ps else [_curve(done).timed]
    known = [each for each in told if each is not None]
    return samples_per_s(known) if len(known) == len(told) else None


def _timed(worker: Worker) -> Timed | None:
    samples, began_s, ended_s = (worker.metrics.get(name) for name in (SAMPLES, BEGAN_S, ENDED_S))
    return None if samples is None or began_s is None or ended_s is None else Timed(samples, began_s, ended_s)


def device(done: Finished) -> str:
    """Where it was computed, as far as workers tell."""
    if not done.workers:
        return _curve(done).device or NONE
    cards = sum(bool(worker.metrics.get(DEVICE)) for worker in done.workers)
    return f"{cards} of {len(done.workers)} on a card" if cards else "CPU"


# --- over one device --------------------------------------------------------------------------------------------------


def verdict_lines(ended: Runs) -> list[tuple[str, ...]]:
    """A line a way: its means over the seeds, as ratios to one device."""
    single = _means([each for each in ended if each[0].labels[0] == ONE])
    lines: list[tuple[str, ...]] = []
    for way in WAYS:
        runs = [each for each in ended if each[0].labels[0] == way.title]
        if runs:
            mine = _means(runs)
            faster = mine[0] / single[0] if mine[0] and single[0] else None
            sooner = single[1] / mine[1] if mine[1] and single[1] else None
            reached = f"{sum(_curve(done).reached is not None for _, done in runs)} of {len(runs)}"
            remark = _remark(way, faster, sooner)
            over = "one run" if len(runs) == 1 else f"{len(runs)} runs{_of_repetitions(runs)}"
            apart = [_apart(each, one) for each, one in zip(_figures(runs), single, strict=True)]
            shown = (way.title, reached, number(faster, 2), apart[0], number(sooner, 2), apart[1])
            lines.append((*shown, f"{remark}; {over}" if remark else ""))
    return lines


def _figures(runs: Runs) -> tuple[list[float], list[float]]:
    """Samples a second, and seconds to the score of those that reached it: of each seed, the lower quartile of its
    repetitions."""
    seeds: dict[int | None, list[tuple[Cell, Finished]]] = {}
    for cell, done in runs:
        seeds.setdefault(cell.seed, []).append((cell, done))
    rates = [quartile(throughput(*each) for each in mine) for mine in seeds.values()]
    reached = [[_curve(done).reached for _, done in mine] for mine in seeds.values()]
    seconds = [quartile(point.at_s if point else None for point in mine) for mine in reached]
    return [rate for rate in rates if rate is not None], [each for each in seconds if each is not None]


def _of_repetitions(runs: Runs) -> str:
    count = len({cell.repetition for cell, _ in runs})
    return f", lower quartiles over {count} repetitions" if count > 1 else ""


def _means(runs: Runs) -> tuple[float | None, float | None]:
    rates, seconds = _figures(runs)
    return middle(rates), middle(seconds)


def _apart(figures: Sequence[float], one: float | None) -> str:
    """How far the seeds of a way are apart, over the mean of one device."""
    found = spread(figures)
    return number(found / one if found is not None and one else None, 2)


def _remark(way: Way, faster: float | None, sooner: float | None) -> str:
    """What document 001 says of two devices."""
    if way.num_devices < 2 or faster is None:
        return ""
    if faster > MOST * way.num_devices:
        return f"too noisy to say: {way.num_devices} devices cannot do {faster:.2f} times the samples"
    if sooner is None:
        return "C25: no score to compare"
    return "C25 holds: more than three times sooner" if sooner > 3 else "C25 does not hold: not three times sooner"


VERDICTS = Verdicts(
    title="Over one device: throughput (at most as many as there are devices), and how many times sooner the score; "
    "spread: of the samples/s, and of the seconds to the score, between the seeds, over the mean of one device",
    columns=("devices", "reached", "throughput", "spread", "sooner", "spread of s"),
    lines=verdict_lines,
)
