"""Kill a ps in the middle of a value that it writes down: its successor finds the one that held before."""

import pytest
from lives import Killed, Pieces

from paceline.errors import PacelineError
from paceline.server.journal import PLACE_BYTES, Journal


class Fatal:
    """A place: the process dies when half of a value is in it."""

    def __init__(self, place: memoryview) -> None:
        self._place = place

    def __setitem__(self, where: slice, data: bytes) -> None:
        start, half = where.start or 0, len(data) // 2
        self._place[start : start + half] = data[:half]
        raise Killed


def dies_in(how: str, journal: Journal, data: bytes) -> None:
    journal._places = [Fatal(each) for each in journal._places]  # type: ignore[misc]
    journal._shorts = [Fatal(each) for each in journal._shorts]  # type: ignore[misc]
    with pytest.raises(Killed):
        getattr(journal, how)(data)


@pytest.mark.parametrize("how", ["write", "announce", "announce_short"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_held_before_a_half_written_value_still_holds(how: str, count: int) -> None:
    memory = Pieces()
    journal = Journal(memory)
    for number in range(count):
        journal.write(b"value %d" % number)
    dies_in(how, journal, b"another, longer value")
    again = Journal(memory)
    assert again.read() == (b"value %d" % (count - 1), None) and not again.pending


@pytest.mark.parametrize("shorts", [1, 2, 3])
@pytest.mark.parametrize("how", ["write", "announce", "announce_short"])
def test_short_values_hold_with_the_whole_one_before_them(how: str, shorts: int) -> None:
    memory = Pieces()
    journal = Journal(memory)
    journal.write(b"whole")
    for number in range(shorts):
        journal.announce_short(b"short %d" % number)
        journal.fulfil()
    dies_in(how, journal, b"another, longer value")
    again = Journal(memory)
    found = again.read()
    assert found is not None and found[0] == b"whole" and not again.pending
    assert (found[1] or b"").startswith(b"short %d" % (shorts - 1))


@pytest.mark.parametrize("how", ["announce", "announce_short"])
def test_what_is_announced_is_found_until_it_holds(how: str) -> None:
    memory = Pieces()
    journal = Journal(memory)
    journal.write(b"before")
    turn = getattr(journal, how)(b"after")
    journal.did_job(2)
    again = Journal(memory)
    assert (again.pending, again.jobs_done) == (turn, 2)
    again.fulfil()
    assert not Journal(memory).pending
    journal = Journal(memory)
    getattr(journal, how)(b"then")
    assert Journal(memory).jobs_done == 0, "of another one nothing is done yet"


def test_what_does_not_fit_ends_the_ps() -> None:
    """It is decided by then: an error that only refuses a request would let the ps go on without it."""
    with pytest.raises(Exception, match="is the limit") as raised:
        Journal(Pieces()).write(bytes(PLACE_BYTES))
    assert not isinstance(raised.value, PacelineError)
