"""CAN docs/plain.md be read without knowing anything? Its picture is whole, its words are explained as they come up."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "plain.md").read_text()
SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_has_its_caption_and_nothing_is_cut_off() -> None:
    (caption, name) = re.findall(r"!\[([^\]]+)\]\((\S+)\)", TEXT)[0]
    root = ElementTree.parse(DOCS / name).getroot()
    width = float(root.get("width", 0))
    said = list(root.iter(f"{SVG}text"))
    assert root.findtext(f"{SVG}title") == caption and caption in [text.text for text in said]
    groups = {text: group for group in root.iter(f"{SVG}g") for text in group}
    for text in said:
        given = {**(groups[text].attrib if text in groups else {}), **text.attrib}
        length = 0.62 * float(given["font-size"]) * len(text.text or "")
        left = float(given["x"]) - {"middle": length / 2, "end": length}.get(given.get("text-anchor", ""), 0)
        assert left > 0 and left + length < width, f"{text.text!r} is cut off"


@pytest.mark.parametrize(
    "word", ["parameters", "batch", "gradient", "parameter server", "worker", "pull", "push", "staleness"]
)
def test_a_word_is_explained_before_it_is_used(word: str) -> None:
    """The first time that it comes up after the headings, it stands in italics, beside what it means."""
    body = re.sub(r"^(#|!\[).*$", "", TEXT, flags=re.MULTILINE)
    assert re.search(rf"\*{word}\*", body), f"{word} is nowhere explained"
    assert body.index(f"*{word}*") <= re.search(rf"(?<![\w/-]){word}", body).start(), f"{word} is used before"  # type: ignore[union-attr]


def test_there_is_no_formula_and_every_mode_is_there() -> None:
    assert not re.search(r"\$|\\frac|∂|∑", TEXT)
    for flag in ("--mode async", "--mode sync", "--mode bounded", "--mode local", "--replicas-to-aggregate"):
        assert flag in TEXT
