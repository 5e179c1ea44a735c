"""WHAT lies in shared memory beside the numbers? The two headers that both sides of a shm lane read and write.

Used by server/shard and server/service, and by worker/link. Plain memory: no lock, no system call.

A segment of parameters starts with a *sequence number*: odd while an update runs, then 2 x version. Values
that come from outside make no version; they are counted in the number's upper bits, so that it still changes.
A slot starts with a *bell*: the ps writes its answer there, and sends a frame only to a worker that already sleeps.
Most answers are there before a worker asks for them, so most cost neither side a system call.
"""

HEADER_BYTES = 64
ASSIGNMENT = 1 << 48  # added to the sequence number when values come from outside

ANSWERED, VERSION, OUTCOME, SLEEPS = range(4)  # the cells of a bell


class Bell:
    """The first cells of a slot; worker/link reads them without a call.

    >>> bell = Bell(memoryview(bytearray(64)))
    >>> bell.ring(push_id=7, version=3, outcome=0, flags=4)
    False
    >>> bell.cells[ANSWERED], bell.cells[VERSION], bell.cells[OUTCOME] & 0xFF, bell.cells[OUTCOME] >> 8
    (7, 3, 0, 4)
    """

    __slots__ = ("cells",)

    def __init__(self, header: memoryview) -> None:
        self.cells = header[:HEADER_BYTES].cast("Q")

    def ring(self, push_id: int, version: int, outcome: int, flags: int) -> bool:
        """The ps: write the answer, its push id last. True: the worker sleeps, so a frame must wake it.

        A worker writes its push id to SLEEPS before it blocks, and reads ANSWERED once more after that. A processor may
        let both sides miss each other; a blocked worker reads again whenever its read times out, so that costs a
        moment, never a hang."""
        cells = self.cells
        cells[VERSION] = version
        cells[OUTCOME] = outcome | flags << 8
        cells[ANSWERED] = push_id
        return cells[SLEEPS] == push_id
