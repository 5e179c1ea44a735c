"""Undo log of a ps: each block is copied before it is updated, and put back if the ps dies in the middle.

Used by shard.py, on memory that outlives the process. Before a block is touched, everything of it that the update
changes is copied into an *undo area* (one per core) and the block's *mark* says so; after the update, the mark says
that it is done. A mark names the job it belongs to, so marks of old jobs mean nothing.

    mark u64 per block: job << 8 | 0xFF (done)   or   job << 8 | area + 1 (its old bytes are in that area)
"""

from collections.abc import Callable, Sequence

import torch

from paceline.params.arena import mover
from paceline.params.layout import align
from paceline.server.memory import Memory
from paceline.views import flat

DONE = 0xFF
HEAD_BYTES = 64  # of an area: the number of regions in it

Regions = Callable[[int], Sequence[torch.Tensor]]
Move = tuple[int, int, int, torch.Tensor]  # address in the area, address of the region, bytes; the region, kept alive


class Undo:
    """Copies of the blocks that are being updated.

    `regions(block)` returns, as bytes, what an update of that block changes. It may grow by further regions at its
    end, which were empty before; `forget(block, count)` empties all but the first `count` again. What is added up in a
    sum is passed to each call as `regions` instead. The numbers of jobs only grow.
    """

    def __init__(self, memory: Memory, num_blocks: int, regions: Regions, forget: Callable[[int, int], None]) -> None:
        self._memory = memory
        self._marks = memory.own("marks", max(8, 8 * num_blocks)).cast("Q")
        self._regions = regions
        self._forget = forget
        self._areas: list[torch.Tensor] = []
        self._counts: list[int] = []  # regions in each area, as its head says
        self._has_one_block = num_blocks == 1
        self._copies_ahead = False
        self._move = mover()
        self._moves: dict[tuple[int, int, int], list[Move]] = {}
        self._growth = 0
        self._copied_ahead: list[Move] | None = None  # these regions are in area 0 as they are now

    def make_areas(self, count: int) -> None:
        """Let so many cores update blocks at once."""
        self._areas += [torch.empty(0, dtype=torch.uint8)] * (count - len(self._areas))
        self._counts += [0] * (count - len(self._counts))

    def save_ahead(self) -> None:
        """Copy what the next update will change, if that is a single block. Call it when the answers to an update have
        left, so that no worker waits for it."""
        if self._copies_ahead:
            moves = self._moves.get((0, 0, self._growth)) or self._lay_block(0, 0)
            for kept, region, size, _ in moves:
                self._move(kept, region, size)
            self._copied_ahead = moves

    def changed(self) -> None:
        """Forget what was copied ahead: something other than an update changes parameters or optimizer state."""
        self._copied_ahead = None

    def save(self, area: int, block: int, job: int, regions: Sequence[torch.Tensor] | None = None) -> None:
        """Copy the block as it is, then mark it. A single block's parameters are then written over themselves: workers
        have read them, and all of that memory is taken from their caches at once for less than the update would pay,
        line by line."""
        if regions is None:
            moves = self._moves.get((area, block, self._growth)) or self._lay_block(area, block)
        else:
            moves = self._lay(area, regions)
        if moves is not self._copied_ahead:
            for kept, region, size, _ in moves:
                self._move(kept, region, size)
        self._copied_ahead = None
        if self._counts[area] != len(moves):
            self._areas[area][:8].view(torch.int64)[0] = self._counts[area] = len(moves)
        self._marks[block] = job << 8 | area + 1
        self._copies_ahead = self._has_one_block and regions is None
        if self._copies_ahead:
            kept, parameters, size, _ = moves[0]
            self._move(parameters, kept, size)

    def done(self, block: int, job: int) -> None:
        """Mark the block as updated."""
        self._marks[block] = job << 8 | DONE

    def grown(self) -> None:
        """Ask for the regions again: there are more than before."""
        self._growth += 1
        self._moves.clear()

    def _lay_block(self, area: int, block: int) -> list[Move]:
        growth = self._growth  # another core may see more regions meanwhile
        moves = self._lay(area, self._regions(block))
        self._moves[area, block, growth] = moves
        return moves

    def _lay(self, area: int, regions: Sequence[torch.Tensor]) -> list[Move]:
        """Give each region its place in the area, which is made large enough."""
        size = HEAD_BYTES + sum(align(region.numel()) for region in regions)
        if self._areas[area].numel() < size:
            self._areas[area] = flat(self._memory.own(f"undo.{area}", size), "uint8", 0, size)
            self._counts[area] = 0
            self._moves.clear()  # some of them were of the smaller area
        position = self._areas[area].data_ptr() + HEAD_BYTES
        moves = []
        for region in regions:
            moves.append((position, region.data_ptr(), region.numel(), region))
            position += align(region.numel())
        return moves

    # --- after a death ----------------------------------------------------------------------------------------

    def remaining(self, blocks: int, job: int, regions: Regions | None = None) -> list[int]:
        """Put back the blocks that this job had begun, and return all that it has not done."""
        left = []
        for block in range(blocks):
            mark = self._marks[block]
            if mark == job << 8 | DONE:
                continue
            if mark >> 8 == job and mark & DONE:
                self._put_back((mark & DONE) - 1, block, regions)
            left.append(block)
        return left

    def _put_back(self, area: int, block: int, regions: Regions | None) -> None:
        found = self._memory.found(f"undo.{area}")
        assert found is not None
        kept = flat(found.memory, "uint8", 0, found.size_bytes)
        count = int(kept[:8].view(torch.int64).item())
        position = HEAD_BYTES
        for region in (regions or self._regions)(block)[:count]:
            region.copy_(kept[position : position + region.numel()])
            position += align(region.numel())
        if regions is None:
            self._forget(block, count)
