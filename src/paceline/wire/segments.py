"""WHAT lies in shared memory beside the numbers? The two headers that both sides of a shm lane read and write.

Used by server/shard and server/service, and by worker/link. Plain memory: no lock, no system call.

A segment of parameters starts with a *sequence number*: odd while an update runs, then 2 x version. Values
that come from outside make no version; they are counted in the number's upper bits, so that it still changes.
A slot starts with a *bell*: the ps writes its answer there, and sends a frame only to a worker that already sleeps.
Most answers are there before a worker asks for them, so most cost neither side a system call.
"""

HEADER_BYTES = 64
ASSIGNMENT = 1 << 48  # added to the sequence number when values come from outside

_ANSWERED, _VERSION, _OUTCOME, _SLEEPS = range(4)


class Bell:
    """The first cells of a slot.

    >>> bell = Bell(memoryview(bytearray(64)))
    >>> bell.ring(push_id=7, version=3, outcome=0, flags=4)
    False
    >>> bell.is_answered(7), bell.answer()
    (True, (3, 0, 4))
    """

    __slots__ = ("_cells",)

    def __init__(self, header: memoryview) -> None:
        self._cells = header[:HEADER_BYTES].cast("Q")

    def ring(self, push_id: int, version: int, outcome: int, flags: int) -> bool:
        """The ps: write the answer, its push id last. True: the worker sleeps, so a frame must wake it."""
        cells = self._cells
        cells[_VERSION] = version
        cells[_OUTCOME] = outcome | flags << 8
        cells[_ANSWERED] = push_id
        return cells[_SLEEPS] == push_id

    def is_answered(self, push_id: int) -> bool:
        return self._cells[_ANSWERED] == push_id

    def will_sleep(self, push_id: int) -> bool:
        """The worker, before it blocks: from now on a frame will come. False: the answer came at this moment, and
        perhaps a frame with it, which is to be skipped. (A processor may let both sides miss each other; a blocked
        worker looks here again whenever its read times out, so that costs a moment, never a hang.)"""
        self._cells[_SLEEPS] = push_id
        return self._cells[_ANSWERED] != push_id

    def answer(self) -> tuple[int, int, int]:
        """Return the version, the outcome and the flags of the answer."""
        both = self._cells[_OUTCOME]
        return self._cells[_VERSION], both & 0xFF, both >> 8
