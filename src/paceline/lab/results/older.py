"""WHAT does a line not say itself, though the file has it? What a row compared; samples a second; repetitions.

Called by lab/results/reading. Pure. Must never change what a line says itself and the file bears out.
"""

from collections.abc import Sequence

import msgspec

from paceline.lab import scenario
from paceline.lab.cells import Worker
from paceline.lab.results.lines import AGAIN, Line, Measured, Origin, Segment

OF_100 = "accuracy_script"  # what trained with batches of 100 before it told so


def named(rows: list[Line], segments: list[Segment]) -> list[Line]:
    """The rows with what they compared, and whether they are the noise."""
    if all(row.scenario for row in rows):
        return rows
    rows = [msgspec.structs.replace(row, is_noise=row.title.startswith(AGAIN)) for row in rows]
    by_repetition: dict[tuple[int, int], list[Segment]] = {}
    for segment in segments:
        by_repetition.setdefault((segment.group, segment.repetition), []).append(segment)
    names: dict[int, tuple[str, str]] = {}
    for run in by_repetition.values():
        ordered = sorted(run, key=lambda each: each.at)
        if ordered[-1].row is not None:
            continue  # it did not come to its end
        plan = [scenario.Segment(each.scenario, each.row) for each in ordered]
        for pair in scenario.pairs(plan, [max(each.us) if each.us else None for each in ordered]):
            at = next(number for number, each in enumerate(ordered) if each.row == pair.row)
            names[pair.row] = (ordered[at].scenario, ordered[at - 1].scenario)
    if len(names) != len(rows):
        return rows  # several runs in one file: who is who cannot be told
    of_row = [names[index] for index in sorted(names)]
    return [
        msgspec.structs.replace(row, scenario=mine, beside=beside)
        for row, (mine, beside) in zip(rows, of_row, strict=True)
    ]


def counted(origin: Origin, cells: Sequence[Measured]) -> Origin:
    """Of a file of whole runs alone: with how often they ran; an older one says how often rows would have."""
    others = {name: value for name, value in origin.settings.items() if name != "reps"}
    reps = {"reps": len({cell.repetition for cell in cells})} if cells else {}
    return msgspec.structs.replace(origin, settings={**reps, **others})


class _Batch(msgspec.Struct, frozen=True):
    batch: int | None = None


def rated(cell: Measured) -> Measured:
    """With samples a second where a worker could not count them, because its loader is the script's own: of a script
    that tells its batch, by the mean step."""
    if all(worker.samples_per_s is not None for worker in cell.workers):
        return cell
    try:
        batch = msgspec.json.decode(cell.told, type=_Batch).batch
    except msgspec.MsgspecError:
        batch = None  # a shape of the script's own
    if batch is None and any(word.endswith(OF_100) for word in cell.command):
        batch = 100
    return msgspec.structs.replace(cell, workers=[_rated(worker, batch) for worker in cell.workers])


def _rated(worker: Worker, batch: int | None) -> Worker:
    if worker.samples_per_s is not None or not batch or not worker.steps or worker.split_ms is None:
        return worker
    step_s = worker.split_ms.step * 1e-3
    return msgspec.structs.replace(worker, samples_per_s=batch / step_s) if step_s > 0 else worker
