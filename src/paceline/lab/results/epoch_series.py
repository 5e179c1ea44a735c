"""HOW LONG is an epoch beside document 000's? In seconds where epochs are as long as its, and over the single process.

Called by lab/results/series. Pure. Must never put seconds of a short epoch beside those of the document's: only ratios
compare there.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from paceline.lab.cells import middle
from paceline.lab.matrices import accuracy, document_times, seeds
from paceline.lab.results.drawables import Bars, Group, name_of
from paceline.lab.results.lines import Measured, families

SHORT_EPOCH = str(seeds.SHORT_BATCHES)  # batches of an epoch, as a command says it
SINGLE = accuracy.SINGLE.title
DOCUMENT = "document 000"


class _Epoch(msgspec.Struct, frozen=True):
    epoch_s: float | None = None


def document_epochs() -> dict[str, float]:
    """Seconds of an epoch in document 000, by topology: the mean of its workers'.

    >>> document_epochs()["1 ps + 1 worker"], round(document_epochs()["two hosts: 1 ps + 2 workers, async"], 2)
    (3.8, 5.2)
    """
    times = {row.title: row.times for row in seeds.ROWS}
    times[accuracy.ASYNC_THREE.title] = document_times.ASYNC_THREE  # matrix accuracy has all three on one host
    known = {title: middle(each.epoch_s) for title, each in times.items()}
    return {title: epoch_s for title, epoch_s in known.items() if epoch_s is not None}


def _epoch_s(cell: Measured) -> float | None:
    known = middle(worker.epoch_s for worker in cell.workers)
    if known is not None:
        return known
    try:
        return msgspec.json.decode(cell.told, type=_Epoch).epoch_s
    except msgspec.MsgspecError:
        return None


def epochs(table: str, cells: Sequence[Measured]) -> Iterable[Bars]:
    """Only with a document's figure beside: alone, an epoch of a script of the lab is no measure of anything."""
    document = document_epochs()
    known = {name: middle(_epoch_s(cell) for cell in runs) for name, runs in families(cells).items()}
    times = {name: epoch_s for name, epoch_s in known.items() if epoch_s is not None}
    if not any(name in document for name in times):
        return
    if all(cell.flag("--batches") != SHORT_EPOCH for cell in cells):
        yield _bars(table, "epoch", "Time of an epoch", "seconds", times, document)
    alone_s = times.pop(SINGLE, None)
    if alone_s and any(name in document for name in times):
        over = {name: epoch_s / alone_s for name, epoch_s in times.items()}
        theirs = {name: epoch_s / document[SINGLE] for name, epoch_s in document.items()}
        unit = "times as long as an epoch of one process"
        bars = _bars(table, "epoch-over-single", "An epoch over that of one process", unit, over, theirs)
        yield msgspec.structs.replace(bars, mark=1.0)


def _bars(
    table: str, what: str, title: str, unit: str, times: Mapping[str, float], document: Mapping[str, float]
) -> Bars:
    names = tuple(times)
    groups = (
        Group("measured", tuple(times[name] for name in names)),
        Group(DOCUMENT, tuple(document.get(name) for name in names)),
    )
    return Bars(name=name_of(table, what), title=f"{title}: {table}", unit=unit, categories=names, groups=groups)
