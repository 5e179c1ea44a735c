"""Trap 4: a pull from shared memory while an update runs is torn: half of it is old. A sequence number shows it.

Here the update is placed exactly between the two looks of a reader; tests/contract/test_torn_reads.py has real ones.
"""

from typing import Any

from paceline.worker.requests.link import Link


class NoChannel:
    """A link that only reads shared memory sends nothing; if it had to ask, this test should know."""

    shares_memory = True
    lane = "inproc"

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the link used its channel: {name}")


def link_to(parameters: memoryview, sequence: Any) -> Link:
    link = Link(NoChannel(), 0, memoryview(bytearray(parameters.nbytes)), 0, 1)  # type: ignore[arg-type]
    link._parameters, link._sequence = parameters, sequence
    return link


class UpdateUnderTheReader:
    """A sequence number whose first look is followed by half an update, and whose second look by the other half."""

    def __init__(self, memory: bytearray) -> None:
        self._memory = memory
        self.looks = 0

    def __getitem__(self, index: int) -> int:
        self.looks += 1
        if self.looks == 1:
            self._memory[:4] = b"2222"  # the update begins as soon as we have looked
            return 2
        if self.looks == 2:
            self._memory[4:] = b"2222"
            return 4
        return 4


def test_a_copy_without_a_second_look_is_torn() -> None:
    memory = bytearray(b"11111111")
    sequence = UpdateUnderTheReader(memory)
    assert sequence[0] == 2
    assert bytes(memory) == b"22221111", "what the wrong way would have taken"
    memory = bytearray(b"11111111")
    link = link_to(memoryview(memory), UpdateUnderTheReader(memory))
    link.read(push_id=1)
    assert bytes(link.into) == b"22222222"
    assert link.version == 2, "the base version is the one that was read, not the one that was announced"


def test_an_odd_number_is_an_update_that_runs() -> None:
    class Odd:
        looks = 0

        def __getitem__(self, index: int) -> int:
            self.looks += 1
            return 3 if self.looks == 1 else 4

    memory = bytearray(b"22222222")
    link = link_to(memoryview(memory), Odd())
    link.read(push_id=1)
    assert bytes(link.into) == b"22222222"
    assert link.version == 2
