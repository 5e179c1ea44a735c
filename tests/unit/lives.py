"""HOW does a ps die in a test? At every point between two stores, by an exception; its memory stays for the next life.

Used by test_survival. `Pieces` is what a keeper holds; `Deaths` counts the points at which a process could be killed
and kills at one of them. A step of torch that is cut in the middle leaves anything: there the bytes are scrambled.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from paceline.modes import make as make_mode
from paceline.modes.spec import ModeSpec
from paceline.params.arena import Arena
from paceline.params.layout import Layout
from paceline.server.control import saving
from paceline.server.control.actions import Answer
from paceline.server.control.config import PsConfig
from paceline.server.core import Core, Peer, Reply
from paceline.server.journal import Journal
from paceline.server.memory import Memory
from paceline.server.numbers import shard as shard_module
from paceline.server.numbers.gradients import Slot
from paceline.server.numbers.optimizer_memory import OptimizerMemory
from paceline.server.numbers.undo import Undo
from paceline.wire.frames import Outcome
from paceline.wire.messages import Copied, Copy, OptimizerSpec


class Killed(BaseException):
    """kill -9: nothing catches it."""


class Pieces(Memory):
    """Pieces that the test holds."""

    is_kept = True

    def __init__(self, pieces: dict[str, Arena] | None = None) -> None:
        self.pieces = {} if pieces is None else pieces

    def arena(self, name: str, size_bytes: int) -> Arena:
        known = self.pieces.get(name)
        if known is None or known.size_bytes != size_bytes:
            known = self.pieces[name] = Arena.private(size_bytes)
        return known

    def own(self, name: str, size_bytes: int) -> memoryview:
        return self.arena(name, size_bytes).memory

    def names(self) -> list[str]:
        return list(self.pieces)

    def found(self, name: str) -> Arena | None:
        return self.pieces.get(name)

    def put(self, name: str, data: bytes) -> None:
        piece = Arena.private(len(data))
        piece.memory[:] = data
        self.pieces[name] = piece

    def free(self, name: str) -> None:
        self.pieces.pop(name, None)


class Deaths:
    """Counts points, and kills at the `fatal`-th."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.points = 0
        self.fatal = 0
        self._patch = patch
        for owner, name in (
            (Journal, "announce"), (Journal, "announce_short"), (Journal, "did_job"), (Journal, "fulfil"),
            (Journal, "write"), (Undo, "done"), (OptimizerMemory, "adopt"),
            (OptimizerMemory, "_taken"), (Slot, "add_block"),
        ):  # fmt: skip
            self._watch(owner, name)
        self._watch_save()

    def point(self) -> None:
        self.points += 1
        if self.points == self.fatal:
            raise Killed

    def _watch(self, owner: type, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            self.point()
            result = real(*args, **options)
            self.point()
            return result

        self._patch.setattr(owner, name, watched)

    def _watch_save(self) -> None:
        """Also between the copy and its mark, and in the middle of the step that follows."""
        real = Undo.save

        def save(undo: Undo, area: int, block: int, job: int, regions: Sequence[torch.Tensor] | None = None) -> None:
            self.point()
            real(undo, area, block, job, regions)
            if self.points + 1 == self.fatal:
                for region in regions or undo._regions(block):
                    region.copy_(torch.randint(0, 2, region.shape, dtype=torch.uint8))
            self.point()

        self._patch.setattr(Undo, "save", save)

    @contextmanager
    def at(self, fatal: int) -> Iterator[None]:
        self.points, self.fatal = 0, fatal
        yield
        self.fatal = 0


def small_blocks(patch: pytest.MonkeyPatch, elements: int) -> None:
    """So that a shard of a few numbers has several blocks."""
    from paceline.server.numbers import blocks

    patch.setattr(blocks, "BLOCK_ELEMENTS", elements)
    patch.setattr(shard_module, "MIN_BLOCKS", 1 << 30)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "SGD plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
}


def spec_by_name(name: str) -> OptimizerSpec:
    made = OPTIMIZERS[name]([torch.zeros(1, requires_grad=True)])
    options = {n: list(v) if isinstance(v, tuple) else v for n, v in made.param_groups[0].items() if n != "params"}
    return OptimizerSpec(name.split()[0], [options])


class Life:
    """One ps and two workers that send the same gradients in every life."""

    def __init__(
        self,
        optimizer: OptimizerSpec,
        mode: ModeSpec,
        layout: Layout,
        ema: float | None = None,
        memory: Callable[[], Memory] | None = None,
    ) -> None:
        pieces: dict[str, Arena] = {}
        self._memory = memory or (lambda: Pieces(pieces))
        self._optimizer, self._mode, self._layout, self._ema = optimizer, mode, layout, ema
        self.outcomes: list[Outcome] = []
        self.core = self._core()
        if not self.core.recover():
            self._begin()

    def _core(self) -> Core:
        config = PsConfig(0, 1, 2, "r", make_mode(self._mode, 2), "bytes", 5.0, ema=self._ema)
        return Core(config, self._memory())

    def _begin(self) -> None:
        core = self.core
        shard = core.make_shard(self._layout, self._optimizer)
        assert core.durable is not None
        core.control.take_model(self._layout, self._optimizer)
        core.durable.model()
        for worker in range(2):
            core.control.members.join(worker, 1, 0.0)
            slot = core.slots[worker, 1] = core.new_slot((worker, 1))
            slot.options = self._optimizer.groups
        dtype = getattr(torch, self._layout.trained[0].dtype)
        count = shard.size_bytes // dtype.itemsize
        values = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)
        shard.fill(memoryview(values.view(torch.uint8).numpy()))  # type: ignore[arg-type]
        core.control.is_initialised = core.control.is_started = True
        core.perform([])

    def die(self) -> None:
        """Another process finds the memory."""
        self.core = self._core()
        assert self.core.recover()

    def push(self, number: int, mask: bytes = b"", weight: float = 0.0) -> None:
        """The `number`-th push of all: worker 0 and 1 in turn."""
        self.lay(number)
        self.again(number, mask, weight)

    def lay(self, number: int) -> None:
        """Its gradient lies in the slot before it is told."""
        generator = torch.Generator().manual_seed(100 + number)
        for vector in self.core.slots[number % 2, 1].flats:
            vector.copy_(torch.randn(vector.numel(), generator=generator))

    def again(self, number: int, mask: bytes = b"", weight: float = 0.0) -> None:
        """What a worker does that did not hear: the same push once more, its gradient still lies in its slot."""
        key, push_id = (number % 2, 1), number // 2 + 1
        slot, state = self.core.slots[key], self.core.control.state
        slot.mask, slot.weight = mask, weight
        self.core.control.do(state.push(key, push_id, state.version), 0.0)
        actions = self.core.control.take()
        self.core.perform(actions)
        assert self.core.shard is not None
        self.core.shard.prepare_next()
        self.outcomes += [a.outcome for a in actions if isinstance(a, Answer)]

    def copy(self, asked: Copy) -> Copied:
        """What is said to the worker that saves, on a connection of its own."""
        core, peer = self.core, Peer(None)  # type: ignore[arg-type]
        core.peers[peer.id] = peer
        ((_, reply),) = core.perform(saving.copy(core.control, peer.id, asked, 0.0))
        assert isinstance(reply, Reply) and isinstance(reply.message, Copied)
        return reply.message

    def bits(self) -> dict[str, bytes]:
        """All that training has made."""
        shard = self.core.shard
        assert shard is not None
        entries, data = shard.slots()
        made = {f"{e.tensor}.{e.start}.{e.slot}": bytes(d) for e, d in zip(entries, data, strict=True)}
        made["parameters"] = bytes(shard.memory)
        if self._ema is not None:
            made["ema"] = shard.copy_of(None, is_averaged=True)
        made["version"] = str((self.core.control.state.version, self.core.control.state.applied)).encode()
        made["sequence"] = bytes(shard.arena.memory[:8])
        return made
