"""WHERE is this worker in its data? Epoch, pass and batch between two steps, and how to go on from there.

Told by ctx.epochs, ctx.steps and the prepared loader; asked by checkpoints and heartbeats. No framework: generators and
options come in through `Own`. Must cost nothing between two saves: a few comparisons a step.

A *boundary* is where the next step begins: ctx.epochs' or ctx.steps' next value, or the loader's next batch. A position
is taken at the first one after a push, because there nothing of a step is half done: the answer to that push may still
be on its way, and what the next step draws from random generators is not drawn yet. So:

1. an answer says that the next update will be saved (`announced`),
2. the next push is part of that update (`pushed`),
3. at the next boundary the position is taken and sent; what comes after it is what a resumed worker does first.

A resumed worker sets its generators at the first boundary of the same kind: what its script does before, it did before.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, SupportsFloat, SupportsIndex

from msgspec.structs import replace

from paceline.errors import UsageError
from paceline.wire.messages import BATCH, EPOCH, Position

Rng = dict[str, bytes]
Schedulers = list[dict[str, object] | None]
Groups = list[dict[str, object]] | None
Count = SupportsIndex | SupportsFloat  # 60000 / 100 is a float, and a whole number
MAX_COUNT = (1 << 63) - 1


class Own(Protocol):
    """What belongs to the framework: random generators, schedulers, options of the optimizer."""

    @property
    def goes_on(self) -> bool:
        """Whether the options count the steps that were made, also those of an epoch that begins again."""
        ...

    def capture(self) -> Rng: ...

    def restore(self, states: Mapping[str, bytes]) -> None: ...

    def options(self) -> tuple[list[dict[str, object] | None], list[dict[str, object]]]:
        """The schedulers' states and the optimizer's groups."""
        ...


class Nothing:
    """A worker that has none of it yet."""

    goes_on = False

    def capture(self) -> Rng:
        return {}

    def restore(self, states: Mapping[str, bytes]) -> None:
        pass

    def options(self) -> tuple[list[dict[str, object] | None], list[dict[str, object]]]:
        return [], []


class Progress:
    """One worker's way through its data."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self.own: Own = Nothing()
        self.send: Callable[[Position], None] | None = None
        self.steps: Callable[[], int] = lambda: 0
        self.samples: Callable[[], float | None] = lambda: 0.0
        self.epoch = 0
        self.passes = 0  # which pass over the loader the next batch belongs to
        self.batch = 0  # batches taken in it
        self.is_guided = False  # ctx.epochs or ctx.steps is used
        self.is_by_epochs = False  # ctx.epochs is
        self.is_exhausted = False  # the pass is over, its epoch is not
        self.on_unguided: Callable[[], None] | None = None
        self.is_in_pass = False
        self._start: Rng = {}  # random states when the pass began
        self._stood = (0, 0, 0)
        self._has_pushed = False
        self._announced = 0
        self._armed = 0
        self._is_asked = False
        self._kind = ""
        self._begun: tuple[Schedulers, Groups] = [], None  # the options as this epoch began
        self._last: Position | None = None
        self.is_resumed = False
        self._resumed: Position | None = None
        self._rng_to_set: Position | None = None

    # --- going on ---------------------------------------------------------------------------------------------

    def resume(self, position: Position) -> None:
        """Go on from there."""
        self.epoch, self.passes, self.batch = position.epoch, position.passes, position.batch
        self._stood = position.numbers
        self._resumed = position
        self._last = position
        self.is_resumed = position.epoch + position.passes + position.batch > 0
        if position.rng:
            self._rng_to_set = position

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that remain; `count` is whole()."""
        self.is_guided = self.is_by_epochs = True
        while self.epoch < count:
            self.boundary(EPOCH)
            yield self.epoch
            self.epoch += 1
            if self.is_in_pass:
                self.end_pass()
        self.boundary(EPOCH, is_last=True)

    def begin_pass(self, number: int | None = None) -> Position | None:
        """A pass over the training loader begins; `number`: which, if the loader counts. Not None: go on inside it."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            self.passes, self.batch, self.is_in_pass = resumed.passes, resumed.batch, True
            self._start = resumed.start or self.own.capture()
            return resumed
        if self.is_in_pass:
            self.end_pass()
        if number is not None:
            self.passes = number
        self.batch, self.is_in_pass, self.is_exhausted = 0, True, False
        self._start = self.own.capture()
        return None

    def end_pass(self) -> None:
        """The next batch will be the first of another pass."""
        self.passes, self.batch, self.is_in_pass, self._start = self.passes + 1, 0, False, {}
        self.is_exhausted = False

    def took_batch(self) -> None:
        self.batch += 1

    def took_all(self) -> None:
        """The pass is over. With ctx.epochs the next place to begin is the next epoch: nobody gets a pass without a
        batch. Else what the script does until the next pass, it does again if it is started again now."""
        self.is_exhausted = True
        if self._stood == (self.epoch, self.passes, self.batch) and not self._has_pushed:
            self._last = self.here(BATCH, 0)

    def boundary(self, kind: str, is_last: bool = False) -> None:
        """The next step begins here."""
        if self._rng_to_set is not None and self._rng_to_set.at == kind:
            self.own.restore(self._rng_to_set.rng)
            self._rng_to_set = None
        if kind == EPOCH:
            self._begun = self.own.options()
        if self._has_pushed or kind == EPOCH:
            self._has_pushed, self._kind = False, kind
            self._stood = (self.epoch, self.passes, self.batch)
            if self._armed or self._is_asked or is_last:
                self._tell(kind)

    # --- saving -----------------------------------------------------------------------------------------------

    def announced(self, version: int) -> None:
        """The update that makes this version will be saved; the next push is for it."""
        self._announced = version

    def pushed(self) -> None:
        if self.is_resumed and not self.is_guided and self.on_unguided is not None:
            tell, self.on_unguided = self.on_unguided, None
            tell()
        if self._armed:  # a loop without any boundary that we could see: say what we know
            self._send(self._numbers(self._armed))
            self._armed = 0
        self._has_pushed = True
        if self._announced:
            self._armed, self._announced = self._announced, 0

    def _tell(self, kind: str) -> None:
        """Take the position; send it, if an update is to be saved with it."""
        position = self.here(kind, self._armed)
        self._last, self._is_asked = position, False
        if self._armed:
            self._armed = 0
            self._send(position)

    def here(self, kind: str, version: int) -> Position:
        """Where we are now, with everything that going on from here needs."""
        schedulers, groups = self.own.options()
        if self.is_exhausted and self.is_by_epochs and kind != EPOCH:
            numbers, kind, start = (self.epoch + 1, self.passes + 1, 0), EPOCH, {}
        else:
            numbers = self.epoch, self.passes, self.batch
            start = self._start if self.is_in_pass else {}
        return Position(
            self._worker, version, *numbers, self.steps(), kind, self.own.capture(), start, schedulers, groups,
            self.samples(),
        )  # fmt: skip

    def at_end(self, version: int) -> Position:
        """For the last checkpoint, or one that the script asks for: where the next step would begin."""
        last = self._last
        if self._has_pushed and self._kind:
            return self.here(self._kind, version)
        if last is not None and last.rng and self._stood == last.numbers:
            return replace(last, version=version, steps=self.steps(), samples=self.samples())
        return self._numbers(version)

    def _numbers(self, version: int) -> Position:
        schedulers, groups = self._rough_options()
        return self._rough(version, self._stood, schedulers, groups)

    def _rough_options(self) -> tuple[Schedulers, Groups]:
        """Somewhere in an epoch whose batches we do not see: it begins again, and with it what does not go on."""
        return self._begun if self._has_pushed and not self.own.goes_on else self.own.options()

    def _send(self, position: Position) -> None:
        if self.send is not None:
            self.send(position)

    # --- heartbeats: another thread asks ----------------------------------------------------------------------

    def beat(self) -> Position:
        """Where the last boundary was; its options are as old as the boundary before the last beat, or as the epoch
        if none of it was asked for. Those that go on are as they are."""
        self._is_asked = True
        stood, last = self._stood, self._last
        schedulers, groups = (last.schedulers, last.groups) if last is not None else self._begun
        if last is None or last.numbers != stood or self.own.goes_on:
            schedulers, groups = self._options_at(stood) or (schedulers, groups)
        return self._rough(0, stood, schedulers, groups)

    def _rough(self, version: int, stood: tuple[int, int, int], schedulers: Schedulers, groups: Groups) -> Position:
        steps, samples = self.steps(), self.samples()
        return Position(self._worker, version, *stood, steps, schedulers=schedulers, groups=groups, samples=samples)

    def _options_at(self, stood: tuple[int, int, int]) -> tuple[Schedulers, Groups] | None:
        """The options of that boundary, if they cannot have changed since: schedulers are stepped after a push. What
        goes on is of now."""
        goes_on = self.own.goes_on
        if self._has_pushed and not goes_on:
            return self._begun if self._kind == EPOCH else None
        try:
            options = self.own.options()
        except RuntimeError:  # they were changed under our eyes
            return None
        return options if goes_on or not (self._has_pushed or self._stood != stood) else None


def whole(what: str, given: Count) -> int:
    """How many steps or epochs are asked for; refused here, before a ps hears of it.

    >>> whole("steps", 60000 / 100)
    600
    """
    count = -1
    try:
        count = operator.index(given)  # type: ignore[arg-type]  # what has none is looked at next
    except TypeError:
        if isinstance(given, SupportsFloat) and float(given).is_integer():
            count = int(float(given))
    if not 0 <= count <= MAX_COUNT:
        raise UsageError(f"ctx.{what}({given!r}): it takes a whole number, 0 or more, as in ctx.{what}(600)")
    return count
