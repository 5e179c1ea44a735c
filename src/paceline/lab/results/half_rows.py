"""WHAT do rows say whose run was interrupted? Ratios from the segments that are there: nobody wrote their lines.

Called by lab/results/reading. Pure. Must never judge such a row, nor touch one that has a line of its own.
"""

from collections.abc import Sequence

from paceline.lab import tables
from paceline.lab.results.lines import AGAIN, Line, Segment
from paceline.lab.scenario import Pair, Row

AGAINST_ITSELF = " again"  # how the name of a scenario ends that is another one a second time


def half_rows(segments: Sequence[Segment], rows: Sequence[Line]) -> list[Line]:
    """A row for everything that was measured between two segments beside it, and has no line."""
    told = {(row.scenario, row.beside) for row in rows}
    found: dict[tuple[str, str], list[Pair]] = {}
    place = {(each.group, each.repetition, each.at): each for each in segments}
    for (group, repetition, at), mine in place.items():
        before, after = place.get((group, repetition, at - 1)), place.get((group, repetition, at + 1))
        if mine.row is None or before is None or after is None or not (mine.us and before.us and after.us):
            continue
        if before.scenario == after.scenario and (mine.scenario, before.scenario) not in told:
            beside_us = (max(before.us) + max(after.us)) / 2
            pair = Pair(mine.row, max(mine.us), beside_us)
            found.setdefault((mine.scenario, before.scenario), []).append(pair)
    scenarios = [scenario for scenario, _ in found]
    lines = [_line(*names, pairs, scenarios.count(names[0]) > 1) for names, pairs in found.items()]
    return [line for line in lines if line is not None]


def _line(scenario: str, beside: str, pairs: Sequence[Pair], is_repeated: bool) -> Line | None:
    is_noise = scenario.endswith(AGAINST_ITSELF)
    title = f"{AGAIN}: {beside}" if is_noise else f"{scenario}, beside {beside}" if is_repeated else scenario
    summary = tables.summarise(Row(title=title, scenario=scenario, beside=beside), pairs)
    if summary is None:
        return None
    verdict = f"not finished: {len(pairs)} repetition{'' if len(pairs) == 1 else 's'}"
    given = {name: getattr(summary, name) for name in summary.__struct_fields__}
    return Line(**given, verdict=verdict, scenario=scenario, beside=beside, is_noise=is_noise)
