"""DO the documents' programs run, here and on TensorFlow, and say what the documents say? Every row of them.

A matrix of the lab: `paceline lab run documents`. Pure: runs are cells, which lab/scripts/documents_script carries
out; rows are judged when all of them have ended. TensorFlow's side says `not installed` where it is not.
"""

from collections.abc import Mapping

import msgspec

from paceline.cluster.settings import Settings
from paceline.lab.cells import Cell, Finished, Runs, Table, Verdicts, number
from paceline.lab.matrices.document_rows import ROWS, Row
from paceline.lab.matrices.document_runs import RUNS, Run, Side, commands
from paceline.lab.matrices.looks import NO, OPEN, OTHER, YES, Judged, Look, Seen, Told
from paceline.lab.scenario import Matrix

SCRIPT = "paceline.lab.scripts.documents_script"
SINGLE = "single process"
SPARE_S = 30.0  # the script ends a run itself, and says so
ALL = "all rows"
WIDEST = 64  # letters of what was found


def matrix(is_quick: bool = False) -> Matrix:
    """Every run on both sides, one after the other; quick: at tiny sizes, so that accuracies and times say nothing."""
    cells = tuple(_cell(run, side, is_quick) for run in RUNS.values() for side in Side if has(run, side))
    note = (
        "Ours: the documents' own command lines, on free ports. TensorFlow: examples/tensorflow, its ps and workers "
        "through `paceline run --plain`. A thread a process. Document 000 at lr 0.01 and 55 batches an epoch, which is "
        "its curve at a tenth of the cost."
    )
    columns = ("run", "side", "tasks", "seconds")
    title = "The documents' programs, from start to end"
    table = Table(
        title=title,
        columns=columns,
        cells=cells,
        line=line,
        note=note,
        verdicts=VERDICTS,
        usual_s=10.0 if is_quick else 40.0,
    )
    return Matrix(name="documents", tables=(table,))


def has(run: Run, side: Side) -> bool:
    """Whether there is such a program on that side."""
    return side is Side.OURS or not run.only_ours


def _cell(run: Run, side: Side, is_quick: bool) -> Cell:
    quick = ("--quick",) if is_quick else ()
    return Cell(
        title=f"{run.name}, {side.value}",
        labels=(run.name, side.value),
        program=(SCRIPT, "--run", run.name, "--side", side.value, *quick),
        num_ps=0,  # to the lab it is one process, which starts the tasks
        num_workers=1,
        settings=Settings(run_id=""),
        limit_s=run.limit_s + SPARE_S,
    )


def line(cell: Cell, done: Finished) -> tuple[str, ...]:
    """How one run went."""
    told = told_of(done)
    run, side = RUNS[cell.labels[0]], Side(cell.labels[1])
    tasks = len(commands(run, side, is_quick(cell)))
    tasks = tasks if run.num_ps == 0 else run.num_ps + run.num_workers
    remark = f"missing: {told.missing}" if told.missing else f"failed: {told.failed}" if told.failed else ""
    return (str(tasks), number(told.seconds, 1), remark or told.command)


def told_of(done: Finished) -> Told:
    return msgspec.json.decode(done.told, type=Told)


def is_quick(cell: Cell) -> bool:
    return "--quick" in cell.program


# --- the rows ---------------------------------------------------------------------------------------------------------


def verdict_lines(ended: Runs) -> list[tuple[str, ...]]:
    """A line a row whose run was asked for; those that no run can show, when all were."""
    told = {(cell.labels[0], Side(cell.labels[1])): told_of(done) for cell, done in ended}
    quick = any(is_quick(cell) for cell, _ in ended)
    asked = {run for run, _ in told}
    rows = [row for row in ROWS if row.run in asked or (not row.run and asked == set(RUNS))]
    lines, marks = [], []
    for row in rows:
        judged = [judge(row, side, told, quick) for side in Side]
        marks.append([each.mark for each in judged])
        shown = [str(each) if each.mark == OTHER else _cut(str(each)) for each in judged]  # no word that differs is cut
        lines.append((row.at, row.kind.value, _cut(row.said), *shown, _remark(row, told)))
    if len(rows) > 1:
        counted = [
            " ".join(f"{side.count(mark)} {mark}" for mark in (YES, OTHER, NO, OPEN))
            for side in zip(*marks, strict=True)
        ]
        lines.append((ALL, "", str(len(rows)), *counted, ""))
    return lines


def judge(row: Row, side: Side, told: Mapping[tuple[str, Side], Told], quick: bool) -> Judged:
    """What one side's run says of a row."""
    look = look_of(row, side)
    if not row.run or look is None:
        return Judged(OPEN, "not here")
    run = RUNS[run_of(row, side)]
    if not has(run, side):
        return Judged(OPEN, run.only_ours)
    found = told.get((run_of(row, side), side))
    if found is None:
        return Judged(OPEN, "not asked for")
    if found.missing:
        return Judged(OPEN, found.missing)
    if found.failed:
        return Judged(NO, found.failed)
    judged = look.judge(Seen(told=found, single=told.get((SINGLE, side)), is_quick=quick))
    if judged.mark == OTHER and side is Side.OURS:
        return Judged(OTHER, f"ours: {judged.result} ({row.ours})") if row.ours else Judged(NO, judged.result)
    return Judged(OPEN, judged.result) if row.is_partial and judged.mark == YES else judged


def run_of(row: Row, side: Side) -> str:
    return row.run_theirs or row.run if side is Side.THEIRS else row.run


def look_of(row: Row, side: Side) -> Look | None:
    return row.theirs or row.look if side is Side.THEIRS else row.look


def _cut(text: str) -> str:
    """
    >>> len(_cut("Started server with target: paceline://localhost:36731, and so on and on")) == WIDEST
    True
    """
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…"


def _remark(row: Row, told: Mapping[tuple[str, Side], Told]) -> str:
    """The command, and what differs here."""
    found = told.get((row.run, Side.OURS))
    return "; ".join(part for part in ("" if found is None else found.command, row.why) if part)


VERDICTS = Verdicts(
    title=f"Every program, command line, printed line and figure ({YES} as there, {OTHER} in other words, {NO} not so, "
    f"{OPEN} cannot be said)",
    columns=("document", "what", "there", "ours", "TensorFlow"),
    lines=verdict_lines,
)
