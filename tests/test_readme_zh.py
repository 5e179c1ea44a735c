"""IS the Chinese README the English one? Sections, links, commands, flags and numbers are; the words are its own."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS, CHINESE = ((ROOT / name).read_text() for name in ("README.md", "README.zh.md"))
ONLY_CHINESE = {
    "README.md",
    "docs/plain.md",
    "docs/tensorflow.md",
    "examples/tensorflow",
}  # where its readers come from
ONLY_OURS = {"README.zh.md", *ONLY_CHINESE}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z_-]+")


def blocks(text: str) -> list[list[str]]:
    """The code blocks, without comments, blanks and the map, whose words are translated."""
    found = re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [[re.sub(r"\s*#.*", "", line).rstrip() for line in block.splitlines()] for block in found]
    return [[line for line in block if line] for block in lines if block[0] != "src/paceline/"]


def tables(text: str) -> list[list[list[str]]]:
    """The tables: rows of cells."""
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def links(text: str) -> set[str]:
    return set(re.findall(r"\]\(([^)#]+)[^)]*\)", text))


def test_it_has_every_section_and_block() -> None:
    assert len(re.findall("^## ", CHINESE, re.M)) == len(re.findall("^## ", OURS, re.M))
    assert blocks(CHINESE) == blocks(OURS)


def test_its_tables_have_the_same_commands_and_numbers() -> None:
    assert len(tables(CHINESE)) == len(tables(OURS))
    for chinese, ours in zip(tables(CHINESE), tables(OURS), strict=True):
        assert [len(row) for row in chinese] == [len(row) for row in ours]
        for theirs, mine in zip(chinese, ours, strict=True):
            if mine[0].startswith("`"):
                assert theirs[0] == mine[0]
            numbers = [re.findall(r"\d+\.\d+", " ".join(row)) for row in (theirs, mine)]
            assert numbers[0] == numbers[1], mine


def test_it_leads_to_the_same_pages() -> None:
    assert links(OURS) - links(CHINESE) <= ONLY_OURS
    assert links(CHINESE) - links(OURS) <= ONLY_CHINESE


@pytest.mark.parametrize("target", sorted(links(CHINESE)))
def test_its_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


def test_it_names_the_same_flags_and_speaks_chinese() -> None:
    assert set(FLAG.findall(OURS)) - set(FLAG.findall(CHINESE)) <= {"--plain"}
    assert set(FLAG.findall(CHINESE)) - set(FLAG.findall(OURS)) <= {"--plain"}
    assert len(re.findall(r"[\u4e00-\u9fff]", CHINESE)) > 1500
