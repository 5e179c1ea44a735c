"""WHERE do more workers, or more ps, stop to pay when nothing is computed? Growth of pushes a second, and words for it.

Called by lab/results/telling (the words) and lab/results/scaling_series (the lines), on runs of lab/matrices/scale.
Pure. Must never speak of a number of ps that was not measured.
"""

from collections.abc import Mapping, Sequence

import msgspec

from paceline.lab.matrices.scale import PAYS, full_from, workers_of
from paceline.lab.results.lines import Measured
from paceline.lab.scripts.pushes import Pushes


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one lane with so many ps: pushes a second of all workers, by their number."""

    load: str
    lane: str
    num_ps: int
    per_s: dict[int, float]  # the fewest workers first


def growths(cells: Sequence[Measured]) -> list[Growth]:
    """Of all cells that are runs of null workers, in their order."""
    found: dict[tuple[str, str, int], dict[int, float]] = {}
    for cell in cells:
        told = _told(cell)
        if told is not None:
            load, lane, num_ps, num_workers = cell.labels
            found.setdefault((load, lane, int(num_ps)), {})[int(num_workers)] = told.per_s
    return [
        Growth(load=load, lane=lane, num_ps=num_ps, per_s=dict(sorted(per_s.items())))
        for (load, lane, num_ps), per_s in found.items()
    ]


def _told(cell: Measured) -> Pushes | None:
    try:
        told = msgspec.json.decode(cell.told, type=Pushes)
    except msgspec.MsgspecError:
        return None  # another script's
    return told if told.workers and len(cell.labels) == 4 else None


def words(cells: Sequence[Measured], cores: int | None) -> list[tuple[str, str]]:
    """For each load and lane: where more workers stop to pay, and whether more ps do."""
    found = growths(cells)
    told = []
    for load, lane in dict.fromkeys((each.load, each.lane) for each in found):
        by_ps = {each.num_ps: each.per_s for each in found if (each.load, each.lane) == (load, lane)}
        few = min(by_ps)
        more = [more_ps(few, by_ps[few], count, by_ps[count]) for count in sorted(by_ps) if count > few]
        told.append((f"{load}, {lane}", "; ".join([more_workers(few, by_ps[few]), *filter(None, more)]) + "."))
    if told:
        shared = f"all tasks share the {cores} cores of one machine" if cores else "all tasks share one machine"
        told.append(
            ("All of them", f"One run each, and {shared}: where those are full, another machine may still pay.")
        )
    return told


def more_workers(num_ps: int, per_s: Mapping[int, float]) -> str:
    """
    >>> more_workers(1, {1: 100.0, 2: 180.0, 4: 185.0})
    'With 1 ps more than 2 workers do not pay: at most 185 pushes/s, and 180 with 2 workers'
    >>> more_workers(2, {1: 100.0, 4: 300.0})
    'With 2 ps more workers still pay with 4 workers: 300 pushes/s, and 100 with 1 worker'
    >>> more_workers(1, {1: 100.0})
    'With 1 ps and 1 worker 100 pushes/s: of more workers nobody knows'
    """
    fewest, most = min(per_s), max(per_s)
    if len(per_s) < 2:
        return f"With {num_ps} ps and {workers_of(fewest)} {per_s[fewest]:.0f} pushes/s: of more workers nobody knows"
    full = full_from(dict(per_s))
    if full is None:
        return (
            f"With {num_ps} ps more workers still pay with {workers_of(most)}: {per_s[most]:.0f} pushes/s, and "
            f"{per_s[fewest]:.0f} with {workers_of(fewest)}"
        )
    beyond = max(value for count, value in per_s.items() if count > full)
    return (
        f"With {num_ps} ps more than {workers_of(full)} {'do' if full > 1 else 'does'} not pay: at most "
        f"{beyond:.0f} pushes/s, and {per_s[full]:.0f} with {workers_of(full)}"
    )


def more_ps(few: int, few_per_s: Mapping[int, float], many: int, many_per_s: Mapping[int, float]) -> str:
    """What more ps bring at their best, over the same numbers of workers; "" where none was measured with both.

    >>> more_ps(1, {1: 100.0, 2: 200.0}, 2, {1: 90.0, 2: 250.0})
    'a second ps pays: 1.25 times as many pushes/s at the best'
    >>> more_ps(1, {1: 100.0}, 4, {1: 90.0})
    '4 ps do not pay: 0.90 times as many pushes/s at the best'
    """
    both = few_per_s.keys() & many_per_s.keys()
    if not both:
        return ""
    times = max(many_per_s[count] for count in both) / max(few_per_s[count] for count in both)
    is_second = (few, many) == (1, 2)
    verb = ("pays" if is_second else "pay") if times >= PAYS else f"{'does' if is_second else 'do'} not pay"
    who = "a second ps" if is_second else f"{many} ps"
    return f"{who} {verb}: {times:.2f} times as many pushes/s at the best"
