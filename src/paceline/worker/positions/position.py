"""Follow a worker through its data: epoch, pass and batch between two steps, and where to go on from.

Driven by ctx.epochs, ctx.steps and the prepared loader; read by checkpoints and heartbeats. No framework: generators
and options come in through `Own`. Must cost nothing between two saves: a few comparisons a step.

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

import msgspec
from msgspec.structs import replace

from paceline.checkpoint.loop import EPOCHS, FIT, OWN, PASS, STEPS, UNKNOWN, Loop, loop_of
from paceline.errors import UsageError
from paceline.wire.messages import BATCH, EPOCH, Position
from paceline.worker.positions import loops

Rng = dict[str, bytes]
Schedulers = list[dict[str, object] | None]
Groups = list[dict[str, object]] | None
Count = SupportsIndex | SupportsFloat  # 60000 / 100 is a float, and a whole number
MAX_COUNT = (1 << 63) - 1


class Own:
    """What belongs to the framework: random generators, schedulers, options of the optimizer. Here: none of it."""

    goes_on = False  # the options count all steps that were made, also those of an epoch that begins again

    def capture(self) -> Rng:
        """Return the states of the random generators."""
        return {}

    def restore(self, states: Mapping[str, bytes]) -> None:
        """Set the random generators to these states."""

    def options(self) -> tuple[list[dict[str, object] | None], list[dict[str, object]]]:
        """Return the schedulers' states and the options of the optimizer's groups."""
        return [], []

    def load(self, position: Position) -> None:
        """Set the options and schedulers to those of the position."""


class Trains(Protocol):
    """The worker whose position this is (worker/session)."""

    def steps_done(self) -> int:
        """Return how many steps it has made."""
        return 0

    def samples_done(self) -> float | None:
        """Return how many samples were in all of its gradients; None if that is not known."""
        return 0.0

    def send_position(self, position: Position) -> None:
        """Send the position for the update that will be saved."""
        return None

    def check_loop(self, loop: Loop) -> None:
        """Refuse a loop that neither ctx.epochs nor ctx.steps guides, or warn of it: the run goes on, and it begins."""
        return None


class NoWorker(Trains):
    """Nothing trains here yet."""


class Progress:
    """One worker's way through its data."""

    def __init__(self, worker: int, trains: Trains | None = None) -> None:
        self._worker = worker
        self._trains: Trains = trains or NoWorker()
        self.own = Own()
        self.epoch = 0
        self.passes = 0  # which pass over the loader the next batch belongs to
        self.batch = 0  # batches taken in it
        self.is_guided = False  # ctx.epochs or ctx.steps is used
        self.is_by_epochs = False  # ctx.epochs is
        self.is_exhausted = False  # the pass is over, its epoch is not
        self.done = 0  # passes that were taken to their end
        self.length: int | None = None  # batches of this pass, where that is known
        self.loop = UNKNOWN  # which loop of the script trains
        self.asks_step = False  # the script has read ctx.global_step before its first push: its loop counts from there
        self.on_repeat: Callable[[bool], None] | None = None  # may end a loop that begins again; says if inside a pass
        self._is_judged = False
        self.expects_push = True  # before_push has something to look at
        self.is_saving = False  # the next push is part of an update that will be saved
        self._has_pass = False
        self._stood_done = 0
        self.is_in_pass = False
        self._start: Rng = {}  # random states when the pass began
        self._stood = (0, 0, 0)
        self.has_pushed = False
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
        """Take this position of an earlier start as the place to go on from."""
        self.epoch, self.passes, self.batch = position.epoch, position.passes, position.batch
        self.done = self._stood_done = position.done
        self._stood = position.numbers
        self._resumed = position
        self._last = position
        self.is_resumed = position.epoch + position.passes + position.batch + position.steps > 0
        if position.rng:
            self._rng_to_set = position

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that remain of `count`, which whole() has checked."""
        if self._resumed is not None and loop_of(self._resumed.loop).kind not in ("", EPOCHS):
            self.epoch = self.done  # of another loop a pass was an epoch
        self.is_guided = self.is_by_epochs = True
        self.loop = Loop(kind=EPOCHS)
        while self.epoch < count:
            self.boundary(EPOCH)
            yield self.epoch
            self.epoch += 1
            if self.is_in_pass:
                self.end_pass()
        self.boundary(EPOCH, is_last=True)

    def begin_pass(self, number: int | None = None) -> Position | None:
        """Begin a pass over the training loader; `number`: which, if the loader counts. Return the position to go on
        from if the pass was begun before a restart."""
        if not self.is_guided:
            self._note_loop(loops.around_this(instead=loops.PER_EPOCH))
        self._repeats(is_inside_pass=False)
        resumed, self._resumed, self._has_pass = self._resumed, None, True
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

    @property
    def goes_on_in_pass(self) -> bool:
        """Tell whether the next pass was begun before a restart."""
        return self._resumed is not None

    def end_pass(self) -> None:
        """End this pass: the next batch is the first of another one."""
        self.passes, self.batch, self.is_in_pass, self._start = self.passes + 1, 0, False, {}
        self.is_exhausted = False

    def pass_was_taken(self) -> None:
        """End a pass that a restarted worker found without a batch left; the next pass begins in its place."""
        if self.length is None:  # the position could not count it: where the pass ends was not known
            self.done += 1
            self.epoch += self.is_by_epochs
        self.end_pass()

    def begin_fit(self, counts_on: bool) -> None:
        """Note that Keras's fit begins to count its epochs; `counts_on`: from where the script says."""
        if not self.is_guided:
            self._note_loop(Loop(kind=OWN) if counts_on else loops.around_fit())

    def begin_fit_epoch(self) -> None:
        """Note that an epoch of fit begins."""
        self._has_pass = True
        self._repeats(is_inside_pass=False)

    def end_fit_epoch(self) -> None:
        """Note that an epoch of fit is over."""
        self.done += 1
        self._stood_done = self.done

    def took_batch(self) -> None:
        self.batch += 1
        self._repeats(is_inside_pass=True)

    def _repeats(self, is_inside_pass: bool) -> None:
        if self.on_repeat is not None:
            self.on_repeat(is_inside_pass)

    def _note_loop(self, loop: Loop) -> None:
        if self.loop.kind in ("", PASS, FIT):
            is_own = loop.begins_again and self.asks_step
            self.loop, self._is_judged, self.expects_push = Loop(kind=OWN) if is_own else loop, False, True

    def before_push(self) -> None:
        """Find the training loop at the first step; refuse or warn if the run goes on and that loop begins again."""
        if self._is_judged:
            if self.on_repeat is not None and not self._has_pass:
                self.on_repeat(True)
            self.expects_push = self.on_repeat is not None
            return
        if self.is_guided:
            self.loop = Loop(kind=EPOCHS if self.is_by_epochs else STEPS)
        elif not self._has_pass:
            self._note_loop(loops.around_this(instead=loops.PER_STEP))
        self._is_judged = True
        if self.is_resumed and self.loop.kind not in (EPOCHS, STEPS, OWN):
            self._trains.check_loop(self.loop)

    def took_all(self) -> None:
        """Note that the pass is over. With ctx.epochs a restarted worker begins with the next epoch, never with a pass
        without batches. Without it, the script repeats what it does between this pass and the next."""
        self.done += not self.is_exhausted and self.is_in_pass
        self.is_exhausted = True
        if self._stood == (self.epoch, self.passes, self.batch) and not self.has_pushed:
            self._last = self.here(BATCH, 0)

    def boundary(self, kind: str, is_last: bool = False) -> None:
        """Note that the next step begins here; take the position if it is asked for."""
        if self._rng_to_set is not None and self._rng_to_set.at == kind:
            self.own.restore(self._rng_to_set.rng)
            self._rng_to_set = None
        if kind == EPOCH:
            self._begun = self.own.options()
        if self.has_pushed or kind == EPOCH:
            self.has_pushed, self._kind = False, kind
            self._stood, self._stood_done = (self.epoch, self.passes, self.batch), self._done_here()
            if self._armed or self._is_asked or is_last:
                self._last, self._is_asked = self.here(kind, self._armed), False
                if self._armed:
                    self._armed = 0
                    self._trains.send_position(self._last)

    # --- saving -----------------------------------------------------------------------------------------------

    def announced(self, version: int) -> None:
        """Note that the update which makes this version will be saved, and that the next push is for it."""
        self._announced, self.is_saving = version, True

    def pushed(self) -> None:
        """Note a push. The caller may set `has_pushed` instead where `is_saving` does not hold."""
        if self._armed:  # a loop without a boundary: send the numbers, without random states
            self._trains.send_position(self._numbers(self._armed))
            self._armed = 0
        self.has_pushed = True
        if self._announced:
            self._armed, self._announced = self._announced, 0
        self.is_saving = self._armed > 0

    def here(self, kind: str, version: int) -> Position:
        """Return the position here, with everything that going on from it needs."""
        schedulers, groups = self.own.options()
        if (self.is_exhausted or self._is_taken) and self.is_by_epochs and kind != EPOCH:
            numbers, kind, start = (self.epoch + 1, self.passes + 1, 0), EPOCH, {}
        else:
            numbers = self.epoch, self.passes, self.batch
            start = self._start if self.is_in_pass else {}
        return Position(
            self._worker, version, *numbers, self._trains.steps_done(), kind, self.own.capture(), start, schedulers,
            groups, self._trains.samples_done(), self._done_here(), self._loop_fields(),
        )  # fmt: skip

    def _done_here(self) -> int:
        """Count the passes that were taken to their end, with one whose last batch was just taken."""
        return self.done + (self._is_taken and not self.is_exhausted)

    @property
    def _is_taken(self) -> bool:
        return self.length is not None and self.is_in_pass and self.batch >= self.length > 0

    def _loop_fields(self) -> dict[str, str | int]:
        fields: dict[str, str | int] = msgspec.to_builtins(self.loop) if self.loop.kind else {}
        return fields

    def at_end(self, version: int) -> Position:
        """Return where the next step would begin, for the last checkpoint or one that the script asks for."""
        last = self._last
        if self.has_pushed and self._kind:
            return self.here(self._kind, version)
        if last is not None and last.rng and self._stood == last.numbers:
            return replace(last, version=version, steps=self._trains.steps_done(), samples=self._trains.samples_done())
        return self._numbers(version)

    def _numbers(self, version: int) -> Position:
        # The batches of an epoch may not be seen. It begins again, with the options that it began with.
        schedulers, groups = self._begun if self.has_pushed and not self.own.goes_on else self.own.options()
        return self._rough(version, self._stood, schedulers, groups)

    # --- heartbeats: another thread asks ----------------------------------------------------------------------

    def beat(self) -> Position:
        """Return the position of the last boundary. Its options are those of the boundary before the last beat, or of
        the epoch's begin; options that count all steps (`goes_on`) are those of now."""
        self._is_asked = True
        stood, last = self._stood, self._last
        schedulers, groups = (last.schedulers, last.groups) if last is not None else self._begun
        if last is None or last.numbers != stood or self.own.goes_on:
            schedulers, groups = self._options_at(stood) or (schedulers, groups)
        return self._rough(0, stood, schedulers, groups)

    def _rough(self, version: int, stood: tuple[int, int, int], schedulers: Schedulers, groups: Groups) -> Position:
        return Position(
            self._worker, version, *stood, self._trains.steps_done(), schedulers=schedulers, groups=groups,
            samples=self._trains.samples_done(),
            done=self._stood_done, loop=self._loop_fields(),
        )  # fmt: skip

    def _options_at(self, stood: tuple[int, int, int]) -> tuple[Schedulers, Groups] | None:
        """Return the options of that boundary if they cannot have changed since (schedulers are stepped after a push);
        options that count all steps are those of now."""
        goes_on = self.own.goes_on
        if self.has_pushed and not goes_on:
            return self._begun if self._kind == EPOCH else None
        try:
            options = self.own.options()
        except RuntimeError:  # the training thread changed them meanwhile
            return None
        return options if goes_on or not (self.has_pushed or self._stood != stood) else None


def whole(what: str, given: Count) -> int:
    """Return how many steps or epochs are asked for; refuse what is no whole number.

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
