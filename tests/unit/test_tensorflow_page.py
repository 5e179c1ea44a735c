"""DOES every name of ours in docs/tensorflow.md exist? Its tables are parsed, and each name is looked up."""

import ast
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from paceline.cli.main import app
from paceline.cluster.devices import Device
from paceline.cluster.settings import LOG_STYLES, PACELINE
from paceline.cluster.spec import ClusterSpec
from paceline.lab.matrices.document_rows import ROWS, Kind
from paceline.telemetry import lines
from paceline.worker.context import Context

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tensorflow.md"
NOTHING = "–"
PRINTED = "Printed lines"


def of_the_runtime(style: str) -> list[str]:
    """What telemetry/lines makes, with the documents' numbers."""
    return [
        lines.job_line("ps"),
        lines.task_line(0),
        *lines.cluster_lines(ClusterSpec({"worker": ["host:2222", "host:2223"]}), style),
        lines.started_line("host:2222", style),
        lines.waiting_line("/job:worker/replica:0/task:1", 20, style=style),
        lines.step_line(1524487685.116428, 0, 8054, 9960, style),
        lines.ends_line(1524487686.584364),
        lines.elapsed_line(366.604071, style),
        lines.session_line("c7c88ec51572b4dd", "", style),
        lines.placed_line("MatMul_1", "MatMul", Device.parse("/job:localhost/replica:0/task:0/cpu:0"), style),
    ]


ELSEWHERE = {  # the line: who prints it, and how it begins there
    "Device mapping:": ("src/paceline/frameworks/torch/devices.py", "Device mapping:"),
    "After 10000 training step(s), validation cross entropy = 1147.88": ("examples/distributed.py", "After "),
}


def tables() -> dict[str, list[dict[str, str]]]:
    """Every table under a heading: a dictionary a row."""
    found: dict[str, list[dict[str, str]]] = {}
    sections = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    for title, text in sections:
        cells = [
            [cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"
        ]
        head, _, *rows = cells
        for row in rows:
            assert len(row) == len(head), f"{title}: {row} is no row of {head}"
        found[title] = [dict(zip(head, row, strict=True)) for row in rows]
    return found


TABLES = tables()
NAMES = sorted(
    {
        name
        for title, rows in TABLES.items()
        for row in rows
        for name in re.findall(r"`([^`]+)`", row["ours"])
        if title != PRINTED
    }
)


def commands(group: Any, path: str = "paceline") -> dict[str, set[str]]:
    """Every verb with its flags, in dashes."""
    found = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= commands(command, f"{path} {name}")
        flags = [flag for each in command.params for flag in (*each.opts, *each.secondary_opts)]
        found[f"{path} {name}"] = {flag.replace("_", "-") for flag in flags}
    return found


COMMANDS = commands(get_command(app))


def is_known(name: str) -> bool:
    if name.startswith("--"):
        return any(name.replace("_", "-") in flags for flags in COMMANDS.values())
    if name.startswith("paceline "):
        return name in COMMANDS
    if name.startswith("ctx."):
        return hasattr(Context, name.removeprefix("ctx."))
    if name.startswith("examples/"):
        return (ROOT / name).is_file()
    return name == "paceline.tf1" or (name.startswith("paceline.") and is_attribute(name))


def is_attribute(name: str) -> bool:
    """`paceline.tf1.train.Server.create_local_server`: a module, then attributes of it, fields of a class too."""
    head, *rest = name.split(".")[1:]
    value = import_module("paceline.tf1") if head == "tf1" else getattr(import_module("paceline"), head, None)
    for part in rest:
        if not hasattr(value, part) and part not in getattr(value, "__annotations__", {}):
            return False
        value = getattr(value, part, None)
    return value is not None or bool(rest)


def test_the_page_has_its_tables() -> None:
    assert [len(rows) > 8 for rows in TABLES.values()] == [True] * 8
    for rows in TABLES.values():
        assert all(row["ours"] == NOTHING or "`" in row["ours"] for row in rows)
        assert all(row["what differs"] != NOTHING for row in rows if row["ours"] == NOTHING), (
            "say why nothing is needed"
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_ours_exists(name: str) -> None:
    assert is_known(name), f"{PAGE.name} names {name}"


@pytest.mark.parametrize("name", ["--no-such-flag", "paceline sing", "ctx.sing", "paceline.sing", "examples/sing.py"])
def test_a_name_that_does_not_exist_is_found_out(name: str) -> None:
    assert not is_known(name)


@pytest.mark.parametrize("style", LOG_STYLES)
@pytest.mark.parametrize("row", TABLES[PRINTED], ids=lambda row: row["where"])
def test_a_printed_line_is_printed(row: dict[str, str], style: str) -> None:
    column = row["ours" if style == PACELINE else "`--log-style tf`"]
    if column == NOTHING:
        return
    (line,) = re.findall(r"`([^`]+)`", column)
    if line in of_the_runtime(style):
        return
    source, beginning = ELSEWHERE[line]
    assert any(beginning in text for text in constants(ROOT / source)), f"{source} does not print {beginning!r}"


def constants(path: Path) -> list[str]:
    """The strings of a program, its docstrings left out."""
    tree = ast.parse(path.read_text())
    told = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told
    ]


def test_every_row_says_where_it_stands() -> None:
    for row in (row for rows in TABLES.values() for row in rows if "where" in row):
        assert re.fullmatch(r"00[0-4]:\d+(, 00[0-4]:\d+)*", row["where"]), row["where"]


def test_every_printed_line_of_the_lab_is_on_the_page() -> None:
    """But those of a library that is gone."""
    named = {at for row in TABLES[PRINTED] for at in row["where"].split(", ")}
    for row in ROWS:
        if row.kind is Kind.PRINTED and "h5py" not in row.said:
            document, _, place = row.at.partition(":")
            first, _, last = place.partition("-")
            inside = range(int(first), int(last or first) + 1)
            near = {f"{document}:{line}" for line in inside}
            is_node = document == "001" and 112 <= int(first) <= 120
            assert near & named or is_node, f"{row.at} {row.said}"
