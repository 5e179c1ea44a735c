"""WHAT helps against one slow cable? One of three workers behind 10 Mbit/s: waiting for it, not waiting, sending less.

A matrix of the lab: `paceline lab run slow-link`. Pure. The ps and two workers are on one host, the third worker is on
another one; everybody trains for the same time, and what counts is how many samples became updates in it.
"""

import msgspec

from paceline.cluster.settings import Settings
from paceline.lab.cells import NONE, Cell, Finished, Runs, Table, Verdicts, number
from paceline.lab.matrices.cards import BEGAN_S, ENDED_S, SAMPLES
from paceline.lab.scenario import Matrix, repeated
from paceline.lab.scripts.curves import Timed, samples_per_s
from paceline.lab.tables import quantile

SCRIPT = "paceline.lab.scripts.slow_link_script"
HOSTS = (("ps:0", "worker:0", "worker:1"), ("worker:2",))
FAR = "worker:2"
RATE, FREE = "10mbit", "free"
BATCH = 100
SECONDS, QUICK_SECONDS = 20, 5
REPETITIONS = 3


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train over that cable."""

    title: str
    settings: Settings
    rate: str = RATE


def _settings(mode: str, **more: object) -> Settings:
    return msgspec.convert({"run_id": "", "mode": mode, "save_every": "none", **more}, Settings)


WAYS = (
    Way(title="sync", settings=_settings("sync"), rate=""),
    Way(title="sync", settings=_settings("sync")),
    Way(title="sync, bfloat16 on the wire", settings=_settings("sync", wire="bfloat16")),
    Way(title="sync, 2 of 3", settings=_settings("sync", replicas_to_aggregate=2)),
    Way(title="local, 50 steps", settings=_settings("local", local_steps=50)),
    Way(title="async", settings=_settings("async")),
)


def matrix(is_quick: bool = False) -> Matrix:
    """Six ways; quick: each once, for a few seconds."""
    count, seconds = (1, QUICK_SECONDS) if is_quick else (REPETITIONS, SECONDS)
    cells = repeated([_cell(way, seconds) for way in WAYS], count, "slow-link")
    note = (
        f"784-100-10 (318 kB), batch {BATCH} a worker, a thread a process, {seconds} s of training; {FAR} alone is "
        "behind the cable, which is limited in both directions (tbf). samples/s: those that became updates, of all "
        f"workers, over one window; of {FAR}: its part of it. MB: gradients and parameters between {FAR} and the ps. "
        "Hosts are network namespaces of one machine: they share its cores."
    )
    columns = ("cable", "mode", "samples/s", f"of {FAR}", "discarded", "updates", "lane", "MB")
    table = Table(
        title="One of three workers behind a slow cable",
        columns=columns, cells=cells, line=line, note=note, verdicts=VERDICTS,
        usual_s=13.0 if is_quick else 27.0,
    )  # fmt: skip
    return Matrix(name="slow-link", tables=(table,))


def _cell(way: Way, seconds: int) -> Cell:
    cable = way.rate or FREE
    return Cell(
        title=f"{way.title}, {cable}",
        labels=(cable, way.title),
        program=(SCRIPT, "--seconds", str(seconds), "--batch", str(BATCH)),
        num_workers=3,
        settings=way.settings,
        is_beside=not way.rate,
        hosts=HOSTS,
        rate=way.rate,
    )


def line(cell: Cell, done: Finished) -> tuple[str, ...]:
    """The numbers of one run; a remark when it did not cross the cable."""
    pair = next((each for each in done.pairs if each.worker == FAR), None)
    megabytes = (pair.pushed_bytes + pair.pulled_bytes) / 1e6 if pair is not None else None
    lane = pair.lane if pair is not None else NONE
    return (
        number(throughput(done), 0),
        number(throughput(done, only=2), 0),
        str(sum(worker.discarded for worker in done.workers)),
        str(done.global_step),
        lane,
        number(megabytes, 1),
        "" if lane == "tcp" else f"{FAR} did not cross the cable",
    )


def throughput(done: Finished, only: int | None = None) -> float | None:
    """Samples a second that became updates, of all workers or of one, over the window of all; None: not told."""
    told = [_timed(worker.metrics, worker.discarded) for worker in done.workers]
    if not told or any(each is None for each in told):
        return None
    known = [each for each in told if each is not None]
    counted = [
        each if only in (None, worker.index) else Timed(0.0, each.began_s, each.ended_s)
        for worker, each in zip(done.workers, known, strict=True)
    ]
    return samples_per_s(counted)


def _timed(metrics: dict[str, float | None], discarded: int) -> Timed | None:
    samples, began_s, ended_s = (metrics.get(name) for name in (SAMPLES, BEGAN_S, ENDED_S))
    if samples is None or began_s is None or ended_s is None:
        return None
    return Timed(max(0.0, samples - discarded * BATCH), began_s, ended_s)


def verdict_lines(ended: Runs) -> list[tuple[str, ...]]:
    """A line a way: its lower quartile, and over sync on the free and on the slow cable."""
    found = {}
    for way in WAYS:
        rates = [throughput(done) for cell, done in ended if cell.labels == (way.rate or FREE, way.title)]
        known = [rate for rate in rates if rate is not None]
        if known:
            found[way.rate or FREE, way.title] = quantile(known, 0.25), len(known)
    free, slow = found.get((FREE, "sync")), found.get((RATE, "sync"))
    return [
        (cable, title, number(rate, 0), *(number(rate / base[0] if base else None, 2) for base in (free, slow)),
         "one run" if count == 1 else f"lower quartile of {count} runs")
        for (cable, title), (rate, count) in found.items()
    ]  # fmt: skip


VERDICTS = Verdicts(
    title="Over sync on the free cable, and over sync on the slow one",
    columns=("cable", "mode", "samples/s", "over free", "over slow"),
    lines=verdict_lines,
)
