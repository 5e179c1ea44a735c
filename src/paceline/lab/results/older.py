"""WHAT did the rows of an older file compare? Their lines have only titles; the segments beside them have the names.

Called by lab/results/reading. Pure. Must never touch a row that says it itself.
"""

import msgspec

from paceline.lab import scenario
from paceline.lab.results.lines import AGAIN, Line, Segment


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
