"""WHAT does the links matrix ask for, and how does it judge? Loads, connections, the bars, and what is skipped."""

import msgspec
import pytest

from paceline.lab.cells import Cell, Finished, Table
from paceline.lab.matrices import links
from paceline.lab.measuring import whole_runs
from paceline.lab.measuring.processes import Failed
from paceline.lab.scripts.crossed import GLOO, OURS, RAW, RAW_AGAIN, Crossed


def told(us: dict[str, list[float]], used: dict[str, list[float]] | None = None) -> Finished:
    return Finished(told=msgspec.Raw(msgspec.json.encode(Crossed(us=us, used=used or {}))))


def line_of(table: Table, cell: Cell, done: Finished) -> dict[str, str]:
    return dict(zip(table.head, (*cell.labels, *table.line(cell, done)), strict=True))


def test_every_load_with_every_number_of_connections_plain_and_encrypted() -> None:
    speeds, limited = links.matrix().tables
    every = {(size, str(count), how) for size in links.SIZES for count in (1, 2, 3, 4) for how in ("plain", "TLS")}
    assert {cell.labels for cell in speeds.cells} == every
    assert list(links.SIZES) == ["1 MB", "40 MB", "400 MB"]
    for cell in speeds.cells:
        assert ("--tls" in cell.program) == (cell.labels[2] == "TLS")
        assert cell.program[cell.program.index("--connections") + 1] == cell.labels[1]
    assert len(limited.cells) == 1 and "--limit-mbit" in limited.cells[0].program
    assert len(links.matrix(True).titles) < len(links.matrix().titles)


def test_ours_is_held_against_the_better_of_the_two() -> None:
    table = links.matrix(True).tables[0]
    cell = table.cells[0]
    line = line_of(table, cell, told({OURS: [500.0], RAW: [400.0], RAW_AGAIN: [410.0], GLOO: [900.0]}))
    assert (line["of the better"], line["remark"]) == ("0.81", "BELOW THE BAR")
    assert line["GB/s"] == "4.00" and line["Gloo ms"] == "0.900"
    line = line_of(table, cell, told({OURS: [500.0], RAW: [700.0], RAW_AGAIN: [700.0], GLOO: [480.0]}))
    assert (line["of the better"], line["remark"]) == ("0.96", "within the bar")
    line = line_of(table, cell, told({OURS: [500.0], RAW: [450.0], RAW_AGAIN: [440.0]}))
    assert (line["Gloo ms"], line["remark"]) == ("-", "within bar + A/A spread"), "Gloo cannot encrypt"
    line = line_of(table, cell, told({OURS: [500.0], RAW: [400.0], RAW_AGAIN: [300.0]}))
    assert line["remark"] == "too noisy to say"


def test_a_limited_link_must_be_used() -> None:
    table = links.matrix(True).tables[1]
    done = told({OURS: [1e6], RAW: [1e6]}, {OURS: [0.96, 0.97, 0.98], RAW: [0.94]})
    line = line_of(table, table.cells[0], done)
    assert (line["used"], line["raw used"], line["remark"]) == ("96.5 %", "94.0 %", "within the bar")
    done = told({OURS: [1e6], RAW: [1e6]}, {OURS: [0.90], RAW: [0.94]})
    assert line_of(table, table.cells[0], done)["remark"] == "BELOW THE BAR"


def test_where_there_are_no_two_hosts_every_line_is_skipped_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_runs, "lacking", lambda: "they need root")
    for table in links.matrix().tables:
        for cell in table.cells:
            with pytest.raises(
                Failed, match=r"^skipped: two hosts are two network namespaces here, and they need root"
            ):
                whole_runs.check_hosts(cell)
