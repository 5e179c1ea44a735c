"""Write the ledger of a ps: who trains, in which mode, which gradients made which update, which did not count.

Written by server/core from the actions of each event, before they are done; telemetry/verify reads it.
"""

from collections.abc import Callable, Sequence

from paceline.cluster.membership import Phase
from paceline.modes.base import Mode
from paceline.server.control.actions import Action, Add, Answer, Apply, Copy, Entered, Left, ModeHolds, Part, Restored
from paceline.server.control.state import ShardState
from paceline.telemetry import ledger as led
from paceline.telemetry.ledger import Kind, Ledger
from paceline.wire.decisions import Key
from paceline.wire.frames import Outcome

UNCOUNTED = frozenset((Outcome.DISCARDED, Outcome.NOT_FINITE, Outcome.DUPLICATE, Outcome.FENCED))

_APPLY, _ADD, _ROUND, _DISCARD = int(Kind.APPLY), int(Kind.ADD), int(Kind.ROUND), int(Kind.DISCARD)
_LEFT = {
    Phase.PAUSED: led.LEFT_PAUSED,
    Phase.CLOSED: led.LEFT_CLOSED,
    Phase.GONE: led.LEFT_GONE,
    Phase.LOST: led.LEFT_LOST,
}


class PsLedger:
    """One ps's ledger. `lineage` is what its records belong to."""

    def __init__(self, ledger: Ledger, lineage: int = 0) -> None:
        self._ledger = ledger
        self._write = ledger.write
        self.lineage = lineage

    @property
    def position(self) -> int:
        """Where the next record will lie, in bytes."""
        return self._ledger.position

    def close(self) -> None:
        self._ledger.close()

    def started(self, state: ShardState, is_kept: bool) -> None:
        """Record that this process begins, and its mode; `is_kept`: with all that an earlier process knew."""
        outcome = led.START_KEPT if is_kept else led.START_EMPTY
        self._write(Kind.START, outcome, version=state.version, lineage=self.lineage)
        self.mode(state.mode, state.turn, state.version)

    def mode(self, mode: Mode, turn: int, version: int) -> None:
        """Record that this mode holds from here on."""
        name = led.MODE_BOUNDED if mode.keeps_clocks else led.MODE_ROUNDS if mode.has_rounds else led.MODE_EACH_PUSH
        bound = min(mode.spec.staleness, led.MAX_AMOUNT) if mode.keeps_clocks else 0
        self._write(Kind.MODE, name, push_id=turn, version=version, amount=bound, lineage=self.lineage)

    def entered(self, worker: int, incarnation: int, clock: int, version: int) -> None:
        """Record that a worker trains from now on; in bounded mode `clock` steps count as done."""
        self._write(Kind.ENTER, 0, worker, incarnation, clock, version, lineage=self.lineage)

    def left(self, worker: int, incarnation: int, phase: Phase) -> None:
        """Record that a worker trains no more."""
        self._write(Kind.LEAVE, _LEFT[phase], worker, incarnation, lineage=self.lineage)

    def decided(self, actions: Sequence[Action], version: int) -> None:
        """Record what an event decided, before it is done: a ps that dies in the middle does it to its end, and a
        worker that reads shared memory may see an update before this ps goes on. `version`: after all of it."""
        updates = version
        for action in actions:
            updates -= type(action) is Apply
        for action in actions:
            kind = type(action)
            if type(action) is Apply:
                updates += 1
                self.applied(action.parts, updates, action.round)
            elif type(action) is Add:
                self.added(action.key, action.push_id, updates)
            elif type(action) is Answer:
                if action.outcome in UNCOUNTED:
                    self.discarded(action)
            elif kind in RECORDS:
                RECORDS[kind](self, *action)

    def applied(self, parts: Sequence[Part], version: int, round_: int | None) -> None:
        """Record one update; `round_`: the round it was, as ps:0 counts, where there are rounds."""
        for (worker, incarnation), push_id, gradients, _, _ in parts:
            self._write(_APPLY, 0, worker, incarnation, push_id, version, gradients, self.lineage)
        if round_ is not None:
            self._write(_ROUND, 0, 0, 0, round_, version, len(parts), self.lineage)

    def added(self, key: Key, push_id: int, version: int) -> None:
        """Record that a gradient counts in the open round, to which its worker may add more."""
        self._write(_ADD, 0, key[0], key[1], push_id, version, 1, self.lineage)

    def discarded(self, answer: Answer) -> None:
        """Record that a push does not count."""
        worker, incarnation = answer.key
        self._write(_DISCARD, answer.outcome, worker, incarnation, answer.push_id, answer.version, 0, self.lineage)

    def copied(self, version: int, number: int, global_step: int) -> None:
        """Record that this version was copied for a checkpoint."""
        self._write(Kind.CHECKPOINT, push_id=global_step, version=version, lineage=self.lineage)

    def restored(self, version: int, lineage: int, source: int) -> None:
        """Record that the shard begins again at this version; `source`: telemetry/ledger FROM_*."""
        self.lineage = lineage
        self._write(Kind.RESTORE, source, version=version, lineage=lineage)


RECORDS: dict[type, Callable[..., None]] = {
    Entered: PsLedger.entered,
    Left: PsLedger.left,
    ModeHolds: PsLedger.mode,
    Copy: PsLedger.copied,
    Restored: PsLedger.restored,
}
