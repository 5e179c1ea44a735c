"""WHICH lines of a built-in matrix have these values? What `--set mode=sync` leaves of it.

Called by lab/run; files of users are lab/matrices/user_file's. Pure: no process, no file, no clock.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from paceline.cluster.settings import Settings
from paceline.cluster.spelling import hint
from paceline.errors import UsageError
from paceline.lab.cells import Cell
from paceline.lab.matrices.user_file import NOT_AXES
from paceline.lab.scenario import Kind, Matrix, Scenario

Sets = Mapping[str, Sequence[str]]
_NOT_HERE = (*NOT_AXES, "save_every")  # how often a built-in cell saves is no question of its matrix
CLUSTERS = (Kind.CLUSTER, Kind.IN_GRAPH)


def parse_sets(given: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """What `--set NAME=VALUE,VALUE` says.

    >>> parse_sets(["mode=sync,async", "slow=worker:1=4x"])
    {'mode': ('sync', 'async'), 'slow': ('worker:1=4x',)}
    """
    sets: dict[str, tuple[str, ...]] = {}
    for text in given:
        name, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not name:
            raise UsageError(f"--set is {text!r}; write it as --set mode=sync,async.")
        if name in sets:
            raise UsageError(f"--set names {name} twice; give all its values at once: --set {name}=A,B.")
        found = tuple(value.strip() for value in values.split(","))
        if len(set(found)) < len(found):
            raise UsageError(f"--set {name} has a value twice.")
        sets[name] = found
    return sets


def facts(num_ps: int, num_workers: int, settings: Settings) -> dict[str, str]:
    """The value of every axis, as it is typed.

    >>> made = facts(1, 2, Settings(run_id="", mode="sync"))
    >>> made["ps"], made["workers"], made["mode"], made["slow"]
    ('1', '2', 'sync', '')
    """
    given = msgspec.structs.asdict(settings)
    told = {name: "" if value is None else str(value) for name, value in given.items() if name not in _NOT_HERE}
    return {"ps": str(num_ps), "workers": str(num_workers), **told}


def restricted(matrix: Matrix, sets: Sets) -> Matrix:
    """The lines that have these values. Lines without a cluster stay: the others are held against them."""
    if not sets:
        return matrix
    axes = axes_of(matrix)
    for name, wanted in sets.items():
        if name not in axes:
            valid = hint(name, axes) if axes else "it has none: take --only"
            raise UsageError(f"--set: {matrix.name} has no axis {name!r} whose values differ; {valid}.")
        for value in wanted:
            if value not in axes[name]:
                raise UsageError(f"--set: no line of {matrix.name} has {name}={value}; {hint(value, axes[name])}.")
    tables = []
    for table in matrix.tables:
        few = tuple(cell for cell in table.cells if not cell.num_ps or _has(_of_cell(cell), sets))
        if any(cell.num_ps for cell in few) or not any(cell.num_ps for cell in table.cells):
            tables.append(msgspec.structs.replace(table, cells=few))
    changed = msgspec.structs.replace(matrix, tables=tuple(tables))
    changed = _with_rows(changed, sets)
    if not clusters(changed):
        raise UsageError(f"--set: no line of {matrix.name} has all of these values at once.")
    return changed


def _with_rows(matrix: Matrix, sets: Sets) -> Matrix:
    """Its rows that have these values, and those without a cluster; none, if only these would be left."""
    points = {each.name: _of_scenario(each) for each in matrix.scenarios}
    rows = [row for row in matrix.rows if not points[row.scenario] or _has(points[row.scenario], sets)]
    if any(points[row.scenario] for row in matrix.rows) and not any(points[row.scenario] for row in rows):
        rows = []
    needed = {name for row in rows for name in (row.scenario, row.beside)}
    scenarios = tuple(each for each in matrix.scenarios if each.name in needed)
    return msgspec.structs.replace(matrix, rows=tuple(rows), scenarios=scenarios)


def axes_of(matrix: Matrix) -> dict[str, list[str]]:
    """What differs between the clusters of a matrix, each with its values."""
    values: dict[str, list[str]] = {}
    for point in clusters(matrix):
        for name, value in point.items():
            if value not in values.setdefault(name, []):
                values[name].append(value)
    return {name: found for name, found in values.items() if len(found) > 1}


def clusters(matrix: Matrix) -> list[dict[str, str]]:
    """The values of every line that has a cluster."""
    points = [_of_cell(cell) for table in matrix.tables for cell in table.cells if cell.num_ps]
    lines = {row.scenario for row in matrix.rows if not row.is_noise}  # not what is only beside one
    return points + [point for each in matrix.scenarios if each.name in lines and (point := _of_scenario(each))]


def _of_cell(cell: Cell) -> dict[str, str]:
    return {**facts(cell.num_ps, cell.num_workers, cell.settings), **cell.axes}


def _of_scenario(scenario: Scenario) -> dict[str, str]:
    """Nothing for what is no cluster of ours; what is carried to a ps has one."""
    if scenario.kind not in CLUSTERS and not (scenario.kind is Kind.CARRIER and scenario.num_ps):
        return {}
    return facts(scenario.num_ps, scenario.num_workers, scenario.settings)


def _has(point: Mapping[str, str], sets: Sets) -> bool:
    return all(point.get(name) in wanted for name, wanted in sets.items())


def seeds_of(cells: Iterable[Cell]) -> list[int]:
    """Those that a matrix repeats its cells over, in its order."""
    return list(dict.fromkeys(cell.seed for cell in cells if cell.seed is not None))
