"""WHICH cells has a user's own matrix? Every combination of its axes; for ratios, interleaved over repetitions.

Called by lab/run with what lab/matrices/user_file has read. Starts nothing; chance comes in as a seed.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

import msgspec

from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec
from paceline.cluster.validate import check
from paceline.errors import UsageError
from paceline.lab.cells import NONE, Cell, Finished, Runs, Table, Verdicts, number, share
from paceline.lab.matrices.user_file import COUNTS, UserFile, Value, default_of, flag_of
from paceline.lab.results.figures import Figures, figures, logged, over
from paceline.lab.scenario import Amounts, Matrix
from paceline.lab.tables import quantile

AGAIN = "A/A: "
QUICK_REPS = 3
MOST = 10_000  # combinations
FIRST = ("configuration",)
FIGURES = ("epoch 1 s", "epoch s", "step ms", "samples/s", "staleness", "discarded", "whole run s", "logged")
RATIO = ("ratio", "spread")
ASKED = Settings(run_id="", save_every="none")
NOTE = (
    "{times}; epoch 1: the first epoch, with the warm-up in it; epoch: mean of the epochs after it; step: median; "
    "times are those of the slowest worker that is not slow on purpose; samples/s: of all workers; staleness: mean; "
    "logged: what the chief's script logged last; a thread a process."
)
SEEDED = "Mean over the seeds, with the least and the most in brackets"
COMPARED = (
    "Lower quartiles over interleaved repetitions; ratio: of {figure}, in each repetition against {beside!r}; spread: "
    "between the quartiles of the ratios; A/A: that one a second time, so what it is off 1 is noise"
)
Point = dict[str, Value]  # one value of every axis, the script's own marked by a leading "--"


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """A matrix, and the combinations that make no sense, with the reason."""

    matrix: Matrix
    left_out: tuple[tuple[str, str], ...] = ()


def made(asked: UserFile, is_quick: bool = False, reps: int | None = None, num_seeds: int | None = None) -> Made:
    """The matrix of a file. A value that fits no other is a mistake; a combination that makes no sense is left out."""
    cells, left_out = _cells(asked, is_quick)
    beside = _beside(asked, cells) if asked.beside is not None else None
    count = reps if reps is not None else (QUICK_REPS if is_quick else asked.reps)
    seeds = asked.seeds[:num_seeds]
    runs = list(_interleaved(cells, beside, seeds, count, asked) if beside else _seeded(cells, seeds, asked))
    times = COMPARED.format(figure=asked.compare, beside=beside.title) if beside else SEEDED
    order = [*([f"{AGAIN}{beside.title}", beside.title] if beside else []), *(cell.title for cell in cells)]
    verdicts = Verdicts(
        title=asked.name,
        columns=(*FIRST, "runs", *FIGURES, *(RATIO if beside else ())),
        lines=lambda ended: lines(ended, order, beside.title if beside else "", asked.compare),
        has_failed=True,
    )
    table = Table(
        title=asked.name,
        columns=(*FIRST, *FIGURES),
        cells=tuple(runs),
        line=line,
        note=NOTE.format(times=times),
        verdicts=verdicts,
        is_listed=False,
    )
    amounts = Amounts(reps=count if beside else 1)
    return Made(matrix=Matrix(name=asked.name, tables=(table,), amounts=amounts), left_out=tuple(left_out))


# --- combinations -------------------------------------------------------------------------------------------------


def _cells(asked: UserFile, is_quick: bool) -> tuple[list[Cell], list[tuple[str, str]]]:
    axes = {**{name: (default_of(name),) for name in COUNTS if name not in asked.axes}, **asked.axes}
    axes |= {flag_of(name): values for name, values in asked.own.items()}
    count = prod(len(values) for values in axes.values())
    if count > MOST:
        has = f"{asked.name} has {count} combinations"
        raise UsageError(f"{asked.place('axes')}{has}; {MOST} are the most: leave out values.")
    cells: list[Cell] = []
    left_out: list[tuple[str, str]] = []
    reasons: dict[tuple[str, str], str] = {}  # of values that fit nothing so far; "": it does
    for values in product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        cell = _cell(asked, point, is_quick)
        why = _nonsense(cell)
        for name, value in point.items():
            reasons[name, str(value)] = reasons.get((name, str(value)), why) and why
        if why:
            left_out.append((cell.title, why))
        else:
            cells.append(cell)
    if not cells:
        place = asked.place(*_blamed(asked, {name: values[0] for name, values in axes.items()}), "axes")
        raise UsageError(f"{place}no combination of {asked.name}'s axes makes sense: {left_out[0][1]}")
    for (name, text), why in reasons.items():
        if why:
            raise UsageError(f"{asked.place(name)}no combination with {name} = {text!r} makes sense: {why}")
    return cells, left_out


def _blamed(asked: UserFile, point: Point) -> list[str]:
    """The axes without which a combination would make sense."""
    ours = [name for name in point if not name.startswith("--")]
    return [name for name in ours if not _nonsense(_cell(asked, {**point, name: default_of(name)}, False))]


def _cell(asked: UserFile, point: Point, is_quick: bool) -> Cell:
    own = {name: value for name, value in point.items() if name.startswith("--")}
    given = {name: value for name, value in point.items() if name not in own and name not in COUNTS and value != ""}
    words = [word for name, value in own.items() for word in _words(name, value)]
    title = titled(point)
    return Cell(
        title=title,
        labels=(title,),
        program=(asked.script, *asked.args, *words, *(asked.quick_args if is_quick else ())),
        is_script=True,
        num_ps=int(point["ps"]),
        num_workers=int(point["workers"]),
        settings=msgspec.structs.replace(ASKED, **given),
        limit_s=asked.limit_s,
        own={name.removeprefix("--"): str(value) for name, value in own.items()},
    )


def _words(name: str, value: Value) -> tuple[str, ...]:
    """A flag of the script's own: true is the flag alone, false and "" are none.

    >>> _words("--size", 10), _words("--deep", True), _words("--deep", False)
    (('--size', '10'), ('--deep',), ())
    """
    if value is True:
        return (name,)
    return () if value is False or value == "" else (name, str(value))


def titled(point: Point) -> str:
    """
    >>> titled({"ps": 1, "workers": 2, "mode": "sync", "slow": "", "staleness": 3, "--size": 10})
    '1 ps + 2 workers, sync, staleness 3, size 10'
    """
    parts = [f"{point['ps']} ps + {point['workers']} worker{'' if point['workers'] == 1 else 's'}"]
    for name, value in point.items():
        if name in COUNTS or value is False or value == "":
            continue
        shown = name.removeprefix("--").replace("_", " ")
        is_word = name in ("mode", "lane", "placement")
        parts.append(str(value) if is_word else shown if value is True else f"{shown} {value}")
    return ", ".join(parts)


def _nonsense(cell: Cell) -> str:
    """Why `paceline run` would refuse it; "" when it would not."""
    hosts = {
        "ps": [f"h:{1 + number}" for number in range(cell.num_ps)],
        "worker": [f"h:{10001 + number}" for number in range(cell.num_workers)],
    }
    if cell.settings.lane == "inproc":
        return "Lane inproc is for tests within one process; use auto, shm or tcp."
    try:
        check(cell.settings, ClusterSpec(hosts))
    except UsageError as error:
        return str(error)
    return ""


def _beside(asked: UserFile, cells: Sequence[Cell]) -> Cell:
    """The cell that `beside` names; of an axis that it does not name, the first value."""
    named = asked.beside or {}
    point: Point = {name: default_of(name) for name in COUNTS}
    point |= {name: named.get(name, values[0]) for name, values in asked.axes.items()}
    point |= {flag_of(name): named.get(name, values[0]) for name, values in asked.own.items()}
    title = titled(point)
    found = [cell for cell in cells if cell.title == title]
    if not found:
        no_sense = f"{asked.name} compares with {title!r} (beside), which makes no sense"
        raise UsageError(f"{asked.place('beside')}{no_sense}; name another cell.")
    return found[0]


# --- runs ---------------------------------------------------------------------------------------------------------


def _seeded(cells: Sequence[Cell], seeds: Sequence[int], asked: UserFile) -> Iterator[Cell]:
    """Every cell once a seed, all cells of a seed together."""
    if not seeds:
        yield from cells
    for seed in seeds:
        for cell in cells:
            yield _with_seed(cell, seed, asked, f"{cell.title}, seed {seed}")


def _interleaved(
    cells: Sequence[Cell], beside: Cell, seeds: Sequence[int], reps: int, asked: UserFile
) -> Iterator[Cell]:
    """In each repetition every cell once, and the one beside twice, in an order of its own; seeds take turns."""
    title = f"{AGAIN}{beside.title}"
    again = msgspec.structs.replace(beside, title=title, labels=(title,), is_beside=True)
    compared = [msgspec.structs.replace(cell, is_beside=cell is beside) for cell in cells]
    for repetition in range(reps):
        order = [again, *compared]
        random.Random(f"{asked.name}-{repetition}").shuffle(order)
        for cell in order:
            title = f"{cell.title}, repetition {repetition + 1}"
            seed = seeds[repetition % len(seeds)] if seeds else None
            told = cell if seed is None else _with_seed(cell, seed, asked, f"{title}, seed {seed}")
            title = told.title if seed is not None else title
            yield msgspec.structs.replace(told, title=title, repetition=repetition)


def _with_seed(cell: Cell, seed: int, asked: UserFile, title: str) -> Cell:
    words = (asked.seed_flag, str(seed)) if asked.seed_flag else ()
    return msgspec.structs.replace(cell, title=title, seed=seed, program=(*cell.program, *words))


# --- lines --------------------------------------------------------------------------------------------------------


def line(cell: Cell, done: Finished) -> tuple[str, ...]:
    """The figures of one run."""
    found = figures(done, cell.slowed)
    return (
        number(found.first_epoch_s, 3),
        number(found.epoch_s, 3),
        number(found.step_ms, 3),
        number(found.samples_per_s, 0),
        number(found.staleness_mean, 2),
        NONE if found.discarded is None else share(found.discarded, 1.0),
        number(found.wall_s, 1),
        " ".join(f"{name} {value:.4g}" for name, value in logged(done).items()) or NONE,
        "",
    )


def lines(ended: Runs, order: Sequence[str], beside: str, compare: str) -> list[tuple[str, ...]]:
    """A line a configuration, over its seeds or repetitions; what failed is counted and said."""
    groups: dict[str, list[tuple[Cell, Finished]]] = {title: [] for title in order}
    for cell, done in ended:
        groups[cell.labels[0]].append((cell, done))
    against = {cell.repetition: _figure(cell, done, compare) for cell, done in groups.get(beside, [])}
    found = [_line(title, runs, bool(beside), against, compare) for title, runs in groups.items() if runs]
    return [with_noise(each, found) if beside else each for each in found]


def with_noise(line: tuple[str, ...], every: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """A ratio that is no farther from 1 than the A/A row's, or than that one scatters, is remarked upon.

    >>> rows = [("A/A: x", "0.95", "0.10", ""), ("x", "1.0", "0", ""), ("y", "1.08", "0.02", ""), ("z", "1.3", "0", "")]
    >>> [with_noise(row, rows)[-1] for row in rows]
    ['', '', 'no more than the noise (0.10, by A/A)', '']
    """
    title, ratio, remark = line[0], line[-3], line[-1]
    again = [each for each in every if each[0].startswith(AGAIN) and NONE not in each[-3:-1]]
    if not again or title.startswith(AGAIN) or again[0][0] == f"{AGAIN}{title}" or remark or ratio == NONE:
        return line
    noise = max(abs(float(again[0][-3]) - 1), float(again[0][-2]))
    if abs(float(ratio) - 1) > noise:
        return line
    return (*line[:-1], f"no more than the noise ({noise:.2f}, by A/A)")


def _figure(cell: Cell, done: Finished, compare: str) -> float | None:
    value: float | None = getattr(figures(done, cell.slowed), compare)
    return value


def _line(
    title: str, runs: Runs, has_ratio: bool, against: Mapping[int | None, float | None], compare: str
) -> tuple[str, ...]:
    whole = [(cell, done) for cell, done in runs if not done.failed]
    told = [figures(done, cell.slowed) for cell, done in whole]
    logs = [logged(done) for _, done in whole]
    names = list(dict.fromkeys(name for each in logs for name in each))
    shown = [f"{name} {over([each.get(name) for each in logs], 4)}" for name in names]
    ratios, remark = _ratios(whole, against, compare) if has_ratio else ((), "")
    causes = [done.failed for _, done in runs if done.failed]
    if causes:
        remark = f"failed: {len(causes)} of {len(runs)} runs: {causes[0]}"
    return (title, str(len(whole)), *_columns(told, has_ratio), " ".join(shown) or NONE, *ratios, remark)


def _columns(told: Sequence[Figures], is_quartile: bool) -> tuple[str, ...]:
    def one(name: str, digits: int) -> str:
        values = [getattr(each, name) for each in told]
        known = [value for value in values if value is not None]
        return number(quantile(known, 0.25) if known else None, digits) if is_quartile else over(values, digits)

    discarded = [each.discarded for each in told if each.discarded is not None]
    return (
        one("first_epoch_s", 3),
        one("epoch_s", 3),
        one("step_ms", 3),
        one("samples_per_s", 0),
        one("staleness_mean", 2),
        share(sum(discarded), len(discarded)),
        one("wall_s", 1),
    )


def _ratios(runs: Runs, against: Mapping[int | None, float | None], compare: str) -> tuple[tuple[str, str], str]:
    """The lower quartile of the ratios and their spread; with them why there are none."""
    found = []
    for cell, done in runs:
        mine, theirs = _figure(cell, done, compare), against.get(cell.repetition)
        if mine is not None and theirs:
            found.append(mine / theirs)
    if not found:
        return (NONE, NONE), f"no {compare} to compare" if runs else ""
    low = quantile(found, 0.25)
    return (f"{low:.3f}", f"{quantile(found, 0.75) - low:.3f}"), ""
