"""WHAT if a ps dies in the middle of an update? Its block is put back as it was, and done again.

Used by server/shard, on memory that outlives the process. Before a block is touched, everything of it that the update
changes is copied into an *undo area* (one a core) and the block's *mark* says so; after it, the mark says that it is
done. A mark holds the job it belongs to, so that marks of old jobs mean nothing.

    mark u64 a block: job << 8 | 0xFF (done)   or   job << 8 | area + 1 (as it was: in that area)
"""

from collections.abc import Callable, Sequence

import torch

from paceline.params.arena import mover
from paceline.params.layout import align
from paceline.server.memory import Memory
from paceline.views import flat

DONE = 0xFF
HEAD_BYTES = 64  # of an area: how many kinds of optimizer state there were

Regions = Callable[[int], Sequence[torch.Tensor]]
Move = tuple[int, int, int, torch.Tensor]  # addresses, to and from, and bytes; and whose they are, so that it stays


class Undo:
    """`regions(block)`: what an update of that block changes, as bytes; it may grow, by further regions at its end,
    which were empty before (`forget` empties them again)."""

    def __init__(self, memory: Memory, num_blocks: int, regions: Regions, forget: Callable[[int, int], None]) -> None:
        self._memory = memory
        marks = memory.arena("marks", max(8, 8 * num_blocks))
        marks.close()
        self._marks = marks.memory.cast("Q")
        self._regions = regions
        self._forget = forget
        self._areas: list[torch.Tensor] = []
        self._counts: list[int] = []  # regions that each area holds, as its head says
        self._is_small = num_blocks == 1
        self._move = mover()
        self._moves: dict[tuple[int, int, int], list[Move]] = {}
        self._growth = 0
        self._others: Regions | None = None
        self._job = 0
        self._saved_ahead: list[Move] | None = None  # what area 0 holds a copy of, as it is now

    def begin(self, job: int, regions: Regions | None = None) -> None:
        """The marks of this job are to come; numbers of jobs only grow. `regions`: what it changes, if not the
        shard's own."""
        self._job = job << 8
        if regions is not self._others:
            self._others = regions
            self.grown()

    def room(self, areas: int) -> None:
        """So many cores may be at work at once."""
        self._areas += [torch.empty(0, dtype=torch.uint8)] * (areas - len(self._areas))
        self._counts += [0] * (areas - len(self._counts))

    def save_ahead(self) -> None:
        """Copy what the next update will change, if that is a single block. Done after the answers to an update have
        left, so that no worker waits for it."""
        if self._is_small and self._others is None:
            moves = self._moves.get((0, 0, self._growth)) or self._lay(0, 0, self._growth)
            self._copy(moves)
            self._saved_ahead = moves

    def changed(self) -> None:
        """Forget what was copied ahead: something else than an update has changed parameters or optimizer state."""
        self._saved_ahead = None

    def _copy(self, moves: list[Move]) -> None:
        for kept, region, size, _ in moves:
            self._move(kept, region, size)

    def save(self, area: int, block: int) -> None:
        """Copy the block as it is, then say so. Parameters that fit a core's cache are then written over themselves:
        workers have read them, and all of that memory is taken from their caches at once for less than the update would
        pay, line by line."""
        moves = self._moves.get((area, block, self._growth)) or self._lay(area, block, self._growth)
        if moves is not self._saved_ahead:
            self._copy(moves)
        self._saved_ahead = None
        if self._counts[area] != len(moves):
            self._areas[area][:8].view(torch.int64)[0] = self._counts[area] = len(moves)
        self._marks[block] = self._job | (area + 1)
        if self._is_small and self._others is None:
            kept, parameters, size, _ = moves[0]
            self._move(parameters, kept, size)

    def done(self, block: int) -> None:
        self._marks[block] = self._job | DONE

    def grown(self) -> None:
        """There are more regions than before."""
        self._growth += 1
        self._moves.clear()

    def _lay(self, area: int, block: int, growth: int) -> list[Move]:
        regions = (self._others or self._regions)(block)
        size = HEAD_BYTES + sum(align(region.numel()) for region in regions)
        if self._areas[area].numel() < size:
            self._areas[area] = self._area(area, size)
            self._counts[area] = 0
            self._moves.clear()  # some of them were of the smaller area
        kept = self._areas[area].data_ptr()
        moves = []
        position = HEAD_BYTES
        for region in regions:
            moves.append((kept + position, region.data_ptr(), region.numel(), region))
            position += align(region.numel())
        self._moves[area, block, growth] = moves
        return moves

    def _area(self, area: int, size: int) -> torch.Tensor:
        arena = self._memory.arena(f"undo.{area}", size)
        arena.close()
        return flat(arena.memory, "uint8", 0, size)

    # --- after a death ----------------------------------------------------------------------------------------

    def remaining(self, blocks: int) -> list[int]:
        """Put back what was being touched in this job; the blocks that are still to be done."""
        left = []
        for block in range(blocks):
            mark = self._marks[block]
            if mark == self._job | DONE:
                continue
            if mark & ~DONE == self._job and mark & DONE:
                self._put_back((mark & DONE) - 1, block)
            left.append(block)
        return left

    def _put_back(self, area: int, block: int) -> None:
        found = self._memory.found(f"undo.{area}")
        assert found is not None
        kept = flat(found.memory, "uint8", 0, found.size_bytes)
        count = int(kept[:8].view(torch.int64).item())
        position = HEAD_BYTES
        for region in (self._others or self._regions)(block)[:count]:
            region.copy_(kept[position : position + region.numel()])
            position += align(region.numel())
        if self._others is None:
            self._forget(block, count)
