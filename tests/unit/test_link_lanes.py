"""A ps that has moved may be on this worker's host now, or no longer: a push that was under way goes as it must."""

from paceline.worker.requests.link import Link


def link(slot: memoryview | None, left: memoryview | None = None) -> Link:
    made = Link(None, 0, memoryview(bytearray(8)), 1, 1)  # type: ignore[arg-type]
    made.slot, made._left = slot, left
    return made


def test_what_travelled_lies_in_the_slot_where_memory_is_shared_now() -> None:
    slot = memoryview(bytearray(8))
    assert link(slot).as_it_takes([memoryview(b"abc"), memoryview(b"de")]) == ()
    assert bytes(slot) == b"abcde\0\0\0"


def test_what_lay_in_the_slot_travels_where_memory_is_not_shared_any_more() -> None:
    left = memoryview(bytearray(b"abcd"))
    assert link(None, left).as_it_takes(()) == (left,)


def test_what_travelled_travels_again() -> None:
    kept = [memoryview(b"abc")]
    assert link(None).as_it_takes(kept) is kept


def test_what_lies_in_the_slot_stays_there() -> None:
    slot = memoryview(bytearray(b"12345678"))
    assert link(slot).as_it_takes(()) == () and bytes(slot) == b"12345678"
