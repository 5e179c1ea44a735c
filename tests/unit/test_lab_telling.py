"""Results are told so that nobody is misled: in narrow terminals, of interrupted runs, of runs that differ in a seed."""

import sys
from io import StringIO

import pytest
from rich.console import Console

from paceline.cli import lab_results
from paceline.lab import progress
from paceline.lab.tables import drawn, is_drawable
from paceline.lab.telling import Section

COLUMNS = ("configuration", "runs", "epoch 1 s", "epoch s", "step ms", "samples/s", "whole run s", "remark")
FIGURES = ("2", "0.098 (0.095-0.101)", "0.063 (0.048-0.078)", "0.674", "24956 (23026-26885)", "5.5 (5.2-5.8)")
LONG = "1 ps + 2 workers, async, shm, hidden 16"
TABLE = [(LONG, *FIGURES, ""), ("1 ps + 1 worker", *FIGURES, "failed: 2 of 3 runs: worker:0 failed with exit code 1")]


# --- narrow terminals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [TABLE, TABLE[:1], [("x" * 31, *FIGURES, "y " * 40), ("x", *FIGURES, "z" * 24)]])
def test_a_frame_that_is_drawn_cuts_no_word(table: list[tuple[str, ...]]) -> None:
    width = next(each for each in range(300) if is_drawable(COLUMNS, table, each))
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(drawn(COLUMNS, table))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert width < 170 and all(word in text for line in (COLUMNS, *table) for cell in line for word in cell.split())
    assert all(cell in text for line in table for cell in line[1:-1]), "numbers are not wrapped at all"


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name, value in {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CI", raising=False)


@pytest.mark.usefixtures("narrow")
def test_a_narrow_terminal_gets_every_configuration_by_lab_show(capsys: pytest.CaptureFixture[str]) -> None:
    lab_results._print(Section(title="mine", columns=COLUMNS, lines=TABLE))
    assert f"\n{LONG}  " in capsys.readouterr().out


@pytest.mark.usefixtures("narrow")
def test_a_narrow_terminal_gets_every_configuration_by_lab_run(capsys: pytest.CaptureFixture[str]) -> None:
    shown = progress.Progress()
    shown.table("mine", COLUMNS, TABLE)
    shown.close()
    assert LONG in capsys.readouterr().out
