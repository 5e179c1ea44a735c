"""docs/results.md has a verdict for each of the documents' 47 claims, and shows what it rests on.

What stands in backticks in the last column must exist: a matrix of the lab, a file of results, or a test.
"""

import re
from pathlib import Path

from paceline.lab import MATRICES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "results.md").read_text()
VERDICTS = ("confirmed", "refuted", "partly", "not testable here", "not shown")
MATRIX = re.compile(r"lab run ([a-z-]+)")


def rows() -> dict[int, list[str]]:
    """The columns of each claim's line, by its number."""
    lines = [line for line in PAGE.splitlines() if re.match(r"\| C\d+ ", line)]
    split = [[column.strip() for column in line.strip("|").split("|")] for line in lines]
    return {int(columns[0].split()[0][1:]): columns for columns in split}


def test_all_47_are_there() -> None:
    assert list(rows()) == list(range(1, 48))


def test_every_claim_has_a_verdict_and_what_shows_it() -> None:
    for number in range(1, 48):
        has_a_verdict_and_what_shows_it(number)


def has_a_verdict_and_what_shows_it(number: int) -> None:
    _, _, verdict, shown = rows()[number]
    assert verdict.startswith(VERDICTS), verdict
    named = re.findall(r"`([^`]+)`", shown)
    assert named or verdict.startswith("not testable"), shown
    for each in named:
        matrix = MATRIX.match(each)
        assert matrix is None or matrix[1] in {*MATRICES, "soak"}, each
        assert (
            matrix
            or not each.startswith(("tests/", "results/"))
            or any((folder / each).exists() for folder in (ROOT, ROOT / "docs"))
        ), each


def test_every_file_of_results_is_named_somewhere() -> None:
    told = "\n".join(page.read_text() for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
    for path in (ROOT / "docs" / "results").iterdir():
        assert path.name in told, f"no page says what {path.name} is"


def test_a_file_of_results_is_named_with_the_commit_that_measured_it() -> None:
    """Of files from before provenance was kept, nobody knows it."""
    told = dict(re.findall(r"^\| `([^`]+)` \| [^|]+ \| ([^|]+) \|", PAGE, re.MULTILINE))
    assert set(told) == {path.name for path in (ROOT / "docs" / "results").iterdir()}
    for name, commit in told.items():
        text = (ROOT / "docs" / "results" / name).read_text()
        found = sorted(set(re.findall(r'"commit": ?"([0-9a-f]{7})', text)))
        is_changed = re.search(r'"is_changed": ?true', text) is not None
        assert commit == (", ".join(found) + " and changes" * is_changed or "–"), name
