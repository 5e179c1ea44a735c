"""Actions of a ps after an event: plain values that the control plane returns and server/core performs.

Jobs change numbers. Answers and messages leave when the journal is written and the lock is released. Records go to the
ledger, where there is one; what jobs and answers say already is not recorded twice.
"""

from typing import NamedTuple

from paceline.cluster.membership import Phase
from paceline.modes.base import Mode
from paceline.wire.decisions import Decision, Key
from paceline.wire.frames import Outcome
from paceline.wire.messages import Copied, Joined, Options, Reply


class Part(NamedTuple):
    """The part of one worker in an update: the sum of its counted gradients, the one in its slot, or both."""

    key: Key
    push_id: int
    gradients: int = 1
    has_sum: bool = False
    has_slot: bool = True


# --- jobs -------------------------------------------------------------------------------------------------------------


class Apply(NamedTuple):
    """Make one update from these, in this order; its lr divided by `divisor`. `round`: the round it is, as ps:0 counts
    them, in modes with rounds: then the workers wait for it."""

    parts: tuple[Part, ...]
    divisor: int = 1
    round: int | None = None


class Add(NamedTuple):
    """Add the gradient in this worker's slot to its sum: it is counted, and the slot is needed again."""

    key: Key
    is_first: bool
    push_id: int = 0


class Copy(NamedTuple):
    """Copy everything as it is after the jobs before this: it is to be saved."""

    version: int
    number: int = 0
    round: int = 0


class SetVersion(NamedTuple):
    """The values are of this version from now on."""

    version: int


class Store(NamedTuple):
    """Keep the carried tensors of this worker that came with the request; those of the chief hold for all workers."""

    worker: int


class Free(NamedTuple):
    """Free this gradient slot: no update will read it."""

    key: Key


# --- what is sent -----------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """Tell this worker what became of its push, and that it may read `version` now. Of a pull: only the latter."""

    key: Key
    push_id: int
    outcome: Outcome
    version: int
    decisions: tuple[Decision, ...] = ()
    flags: int = 0
    is_push: bool = True


class Say(NamedTuple):
    """Send this on a connection."""

    connection: int
    message: Reply


class Refuse(NamedTuple):
    """Refuse what was asked for on a connection, after other actions."""

    connection: int
    reason: str


class Seat(NamedTuple):
    """Give this worker a slot, if it has none, and send the reply with the sizes of its memory, or the memory."""

    connection: int
    key: Key
    reply: Joined
    options: list[Options]
    weight: float


class SayCopied(NamedTuple):
    """Send this about the newest copy, with what only the numbers know of it."""

    connection: int
    reply: Copied


class SayClosed(NamedTuple):
    """Send Closed with the report of this ps."""

    connection: int
    is_last: bool


class End(NamedTuple):
    """End this connection: its worker was given up, or has connected again."""

    connection: int


class Evicted(NamedTuple):
    """Tell the user that a worker was evicted."""

    reason: str


class Wake(NamedTuple):
    """Ask again after so many seconds: a grace ends then."""

    after_s: float


# --- records ----------------------------------------------------------------------------------------------------------


class Entered(NamedTuple):
    """A worker trains from now on; in bounded mode `clock` steps count as done."""

    worker: int
    incarnation: int
    clock: int
    version: int


class Left(NamedTuple):
    """A worker trains no more."""

    worker: int
    incarnation: int
    phase: Phase


class ModeHolds(NamedTuple):
    """This mode holds from this version on."""

    mode: Mode
    turn: int
    version: int


class Restored(NamedTuple):
    """The shard begins again at this version; `source`: telemetry/ledger FROM_*."""

    version: int
    lineage: int
    source: int


Job = Apply | Add
Sent = Answer | Say | Refuse | Seat | SayCopied | SayClosed | Evicted
Action = Job | Copy | SetVersion | Store | Free | Sent | End | Wake | Entered | Left | ModeHolds | Restored
