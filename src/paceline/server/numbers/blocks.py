"""Cut a shard into blocks that fit a core's cache, and each block into runs that have one optimizer state each.

Used by shard.py. The arithmetic is torch's own: every block has a real torch optimizer over its runs.

A run is one parameter to that optimizer. torch's default implementations give the same bits wherever a vector is cut,
so neighbouring pieces of a group make one run: one call instead of many. Three things need a run per piece: `fused` and
`foreach` implementations and half precision, whose bits depend on where a vector ends, and a push in which one tensor
of a run has a gradient and another has none; then the block is split for good.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from paceline.errors import ProtocolError
from paceline.params.constraint import Constraint
from paceline.params.layout import ITEM_BYTES, Layout
from paceline.params.placement import Piece
from paceline.params.recast import Recast
from paceline.server.numbers.optimizers import OPTIMIZERS, raw_step
from paceline.views import flat, shaped
from paceline.wire.messages import OptimizerSpec, Options

BLOCK_ELEMENTS = 1 << 18
SAME_ANYWHERE = ("float64", "float32")  # half precision is rounded otherwise in the last lanes of a vector

State = dict[str, torch.Tensor]
# A group; the names of its state, and whether each is a number. None: as the optimizer makes it.
StateNames = tuple[int, frozenset[tuple[str, bool]] | None]


class Memories(NamedTuple):
    """The parameters that workers read, and those that updates change; both may be the same memory."""

    model: memoryview
    masters: memoryview


class Run(NamedTuple):
    """Neighbouring pieces of one group; `start` and `numel` count elements of the block, with the padding between."""

    group: int
    pieces: tuple[Piece, ...]
    start: int
    numel: int


class Block:
    """Neighbouring pieces of one dtype, up to 2^18 elements, with the optimizer that updates them.

    `dtype` is the dtype of updates; `model_dtype` and `model_offset` hold for the memory that workers read.
    """

    def __init__(
        self, layout: Layout, pieces: Sequence[Piece], memories: Memories, master: Recast, optimizer: OptimizerSpec
    ) -> None:
        self.model_dtype = layout.trained[pieces[0].tensor].dtype
        self.model_offset = pieces[0].offset
        self.dtype = master.dtype(self.model_dtype)
        self.numel = self._element(pieces[-1]) + pieces[-1].numel
        self._layout = layout
        if self.dtype == self.model_dtype:
            self.vector = flat(memories.model, self.dtype, self.model_offset, self.numel)
        else:
            self.vector = flat(memories.masters, self.dtype, master.offset(self.model_offset), self.numel)
        self.constrained = list(self._constrained(pieces))
        is_merged = self.dtype in SAME_ANYWHERE and _is_plain_loop(optimizer)
        self._use(self._merged(pieces) if is_merged else self._apart(pieces), optimizer)

    def _use(self, runs: list[Run], spec: OptimizerSpec) -> None:
        self.runs = runs
        self.parameters = self.views(self.vector)
        members: list[list[torch.Tensor]] = [[] for _ in spec.groups]
        for run, parameter in zip(runs, self.parameters, strict=True):
            if run.group >= len(members):
                raise ProtocolError(f"a tensor of group {run.group} came with {len(members)} groups")
            members[run.group].append(parameter)
        self.optimizer = _make(spec, members)

    def _constrained(self, pieces: Sequence[Piece]) -> Iterator[tuple[torch.Tensor, Constraint]]:
        """Yield every piece that has a constraint; as a tensor of whole rows if the constraint is of rows."""
        for piece in pieces:
            spec = self._layout.trained[piece.tensor]
            if spec.constraint is None or not piece.numel:
                continue
            start = self._element(piece)
            values = self.vector[start : start + piece.numel]
            if spec.constraint.is_of_rows:
                rows = piece.numel * spec.shape[0] // spec.numel
                values = shaped(values, (rows, *spec.shape[1:]), spec.stride)
            yield values, spec.constraint

    def views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a vector of the block's size (parameters, a gradient, a sum), one per run."""
        return [vector[run.start : run.start + run.numel] for run in self.runs]

    def _element(self, piece: Piece) -> int:
        return (piece.offset - self.model_offset) // ITEM_BYTES[self.model_dtype]

    def places(self) -> Iterator[tuple[Piece, int]]:
        """Yield every piece and the element of the block at which it starts."""
        for run in self.runs:
            for piece in run.pieces:
                yield piece, self._element(piece)

    def _apart(self, pieces: Sequence[Piece]) -> list[Run]:
        groups = [self._layout.trained[p.tensor].group for p in pieces]
        return [Run(g, (p,), self._element(p), p.numel) for g, p in zip(groups, pieces, strict=True)]

    def _merged(self, pieces: Sequence[Piece]) -> list[Run]:
        runs: list[Run] = []
        for run in self._apart(pieces):
            if runs and runs[-1].group == run.group:
                last = runs.pop()
                run = Run(run.group, last.pieces + run.pieces, last.start, run.start + run.numel - last.start)
            runs.append(run)
        return runs

    def set_options(self, options: Sequence[Options]) -> None:
        """Give the optimizer's groups these options."""
        for group, new in zip(self.optimizer.param_groups, options, strict=True):
            group.update(torch_options(new))

    def split(self, spec: OptimizerSpec) -> None:
        """Make one run per piece from now on, each with its part of the state that its run had."""
        states = dict(self.states())
        self._use(self._apart([p for run in self.runs for p in run.pieces]), spec)
        for run, parameter in zip(self.runs, self.parameters, strict=True):
            if run.pieces[0] in states:
                self.optimizer.state[parameter] = {n: v.clone() for n, v in states[run.pieces[0]].items()}

    def states(self) -> Iterator[tuple[Piece, State]]:
        """Yield the optimizer state of every piece that has any."""
        for run, parameter in zip(self.runs, self.parameters, strict=True):
            state = self.optimizer.state.get(parameter, {})
            for piece in run.pieces if state else ():
                start = self._element(piece) - run.start
                yield piece, {n: _part(v, start, start + piece.numel) for n, v in state.items()}

    def load_together(self, states: dict[Piece, State]) -> bool:
        """Replace the state of all pieces and return True, if the pieces of each run agree: it has one state."""
        made = [self._together(run, [states[piece] for piece in run.pieces]) for run in self.runs]
        if any(state is None for state in made):
            return False
        for parameter, state in zip(self.parameters, made, strict=True):
            self.optimizer.state.pop(parameter, None)
            if state:
                self.optimizer.state[parameter] = state
        return True

    def _together(self, run: Run, states: Sequence[State]) -> State | None:
        first, together = states[0], State()
        if any(state.keys() != first.keys() for state in states):
            return None
        for name, value in first.items():
            values = [state[name] for state in states]
            if value.dim() == 0:
                if any(not torch.equal(each, value) for each in values):
                    return None
                together[name] = value
                continue
            together[name] = torch.zeros(run.numel, dtype=value.dtype)
            for piece, each in zip(run.pieces, values, strict=True):
                start = self._element(piece) - run.start
                together[name][start : start + piece.numel].copy_(each)
        return together

    def load(self, piece: Piece, state: State) -> None:
        """Replace a piece's state; the block must be split."""
        index = next(i for i, run in enumerate(self.runs) if run.pieces == (piece,))
        self.optimizer.state.pop(self.parameters[index], None)
        if state:
            self.optimizer.state[self.parameters[index]] = state


def cut(
    layout: Layout, pieces: Sequence[Piece], memories: Memories, master: Recast, optimizer: OptimizerSpec
) -> list[Block]:
    """Return the blocks of a shard: cut long pieces at 2^18 elements, or at the nearest place before that at which they
    may be cut; put short neighbours of one dtype together."""
    found: list[list[Piece]] = []
    for whole in pieces:
        dtype, every = layout.trained[whole.tensor].dtype, layout.trained[whole.tensor].cut_every
        item = ITEM_BYTES[dtype]
        length = max(BLOCK_ELEMENTS // every, 1) * every
        for start in range(whole.start, whole.stop, length):
            stop = min(start + length, whole.stop)
            piece = Piece(whole.tensor, start, stop, whole.offset + (start - whole.start) * item)
            first = found[-1][0] if found else None
            is_near = first is not None and (piece.offset - first.offset) // item + piece.numel <= BLOCK_ELEMENTS
            if is_near and first is not None and layout.trained[first.tensor].dtype == dtype:
                found[-1].append(piece)
            else:
                found.append([piece])
    return [Block(layout, each, memories, master, optimizer) for each in found]


def torch_options(options: Options) -> dict[str, object]:
    """Return the options as torch wants them. An implementation that is left open is the plain loop on a CPU; saying so
    here saves torch from working that out at each step."""
    made: dict[str, object] = {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}
    if made.get("foreach", True) is None and made.get("fused") is None:
        made["foreach"] = False
        if "fused" in made:
            made["fused"] = False
    return made


def _make(spec: OptimizerSpec, members: Sequence[list[torch.Tensor]]) -> torch.optim.Optimizer:
    """Make a torch optimizer; its groups are the user's, and some may be empty here."""
    groups = [{"params": p, **torch_options(o)} for p, o in zip(members, spec.groups, strict=True)]
    # Adagrad fills its first sums when it is made, from its argument and not from its groups.
    start = {n: o for n, o in spec.groups[0].items() if n == "initial_accumulator_value"}
    made: Any = OPTIMIZERS[spec.name]
    optimizer: torch.optim.Optimizer = made(groups, **start)
    return optimizer


def update_error(spec: OptimizerSpec, dtypes: Collection[str], states: Collection[StateNames]) -> str:
    """Return torch's error for an update with these options where parameters have this state; empty if there is none.
    It is tried on one element of each dtype."""
    for dtype in sorted(dtypes):
        for group, names in states:
            parameter = flat(memoryview(bytearray(ITEM_BYTES[dtype])), dtype, 0, 1)
            parameter.grad = torch.zeros_like(parameter)
            members: list[list[torch.Tensor]] = [[] for _ in spec.groups]
            members[group].append(parameter)
            try:
                optimizer = _make(spec, members)
                if names is not None:
                    like = {name: torch.ones((), dtype=torch.float32) if one else parameter for name, one in names}
                    optimizer.state[parameter] = {name: torch.ones_like(value) for name, value in like.items()}
                with torch.no_grad():
                    raw_step(spec.name)(optimizer)
            except Exception as error:  # of any class: it must not end the ps in the middle of an update
                return f"{type(error).__name__}: {error}"
    return ""


def _is_plain_loop(spec: OptimizerSpec) -> bool:
    """Tell whether torch's default implementation was chosen: no fused, no foreach."""
    return not any(group.get("foreach") or group.get("fused") for group in spec.groups)


def _part(value: torch.Tensor | float, start: int, stop: int) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return torch.tensor(value, dtype=torch.float64)
    return value if value.dim() == 0 else value[start:stop]
