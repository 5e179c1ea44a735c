"""Hold tests/mutations.py to the program: each line that it changes is there once, and its tests exist."""

import pytest

from mutations import MUTATIONS, ROOT, Mutation, places_of


@pytest.mark.parametrize("each", MUTATIONS, ids=lambda each: each.name)
def test_the_line_is_there_once(each: Mutation) -> None:
    assert len(places_of(each.line)) == 1, f"{each.line!r} has gone: say in tests/mutations.py what is decided so now"
    assert each.line != each.wrong
    files = [word for word in each.tests if word.endswith(".py")]
    assert files and all((ROOT / file).is_file() for file in files)
