"""The copies of one shard's numbers that are saved.

Making a copy is the only time that training waits for a checkpoint; fetching and writing it happens elsewhere,
meanwhile. Which update is copied, and who saves it, is decided in control/saving.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.errors import Refused
from paceline.params.arena import Arena
from paceline.server.numbers.shard import Shard
from paceline.wire import messages as m

NOTHING = memoryview(b"")


@dataclass(slots=True)
class ShardCopy:
    """One shard as it was; its memory is not used again while there are readers."""

    number: int = 0
    readers: int = 0
    version: int = 0
    pause_ms: float = 0.0
    parameters: memoryview = NOTHING
    averages: bytearray | None = None
    entries: list[m.SlotEntry] = field(default_factory=list)
    slots: memoryview = NOTHING
    carried: bytes = b""
    optimizer: m.OptimizerSpec | None = None


class Copies:
    """The newest copy of one shard, and an older one while it is read. The caller must hold the core's lock."""

    def __init__(self) -> None:
        self._copy: ShardCopy | None = None

    def take(self, shard: Shard, number: int, version: int, carried: bytes, has_averages: bool) -> None:
        """Copy everything, into the memory of the copy before where it fits: new pages cost more than the copying."""
        began = time.perf_counter()
        if self._copy is None or self._copy.readers:
            self._copy = ShardCopy()  # the other one is being sent
        copy = self._copy
        copy.number, copy.version, copy.carried = number, version, carried
        copy.parameters = _filled(copy.parameters, [shard.memory])
        copy.averages = shard.averages() if has_averages else None
        copy.entries, views = shard.slots()
        copy.slots = _filled(copy.slots, views)
        copy.optimizer = m.OptimizerSpec(shard.optimizer_name, shard.options)
        copy.pause_ms = 1e3 * (time.perf_counter() - began)

    def carry(self, carried: bytes) -> None:
        """Replace the carried tensors of the copy by those after its update, which came later."""
        if self._copy is not None:
            self._copy.carried = carried

    @property
    def newest(self) -> ShardCopy:
        """The copy that was made last."""
        assert self._copy is not None
        return self._copy

    def read(self, number: int) -> ShardCopy:
        """Return this copy, if it is still the newest one."""
        if self._copy is None or self._copy.number != number:
            raise Refused(f"there is no copy {number} to fetch (any more): ask for one first")
        return self._copy


def part_of(copy: ShardCopy, message: m.Fetch, buffers: Mapping[int, bytes]) -> tuple[m.Fetched, memoryview | bytes]:
    """Return what is fetched of a copy."""
    if message.what == "parameters":
        return m.Fetched(copy.version), copy.parameters
    if message.what == "slots":
        return m.Fetched(copy.version, copy.entries), copy.slots
    if message.what == "carried":
        is_all = message.worker is None
        return m.Fetched(copy.version), copy.carried if is_all else buffers.get(message.worker or 0, b"")
    if message.what == "ema" and copy.averages is not None:
        return m.Fetched(copy.version), memoryview(copy.averages)
    raise Refused(f"a copy holds parameters, slots, carried and ema, not {message.what}")


def _filled(into: memoryview, views: Sequence[memoryview]) -> memoryview:
    size, position = sum(view.nbytes for view in views), 0
    if size and into.nbytes != size:
        into = Arena.private(size).memory
    for view in views if size else ():  # a shard may be empty
        into[position : position + view.nbytes] = view
        position += view.nbytes
    return into
