"""Cold messages: everything that is not sent every step, as msgspec structs in a frame's tail.

Used by server/service and worker/requests/client. A request gets one reply; `Failed` is the reply of a refusal.
Numbers travel, code never does: an optimizer is a name and its options.
"""

import msgspec

from paceline.errors import ProtocolError
from paceline.modes.spec import ModeSpec
from paceline.params.layout import Layout
from paceline.wire.decisions import Decision

Scalar = int | float | bool | None
Options = dict[str, Scalar | list[float]]  # one parameter group's options, without its parameters


class OptimizerSpec(msgspec.Struct, frozen=True):
    """The optimizer a ps shall run: torch's class name and each group's options."""

    name: str
    groups: list[Options]


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all cold messages."""


# --- a worker joins -----------------------------------------------------------------------------------------------


class Join(Message, frozen=True):
    """Step 1 of joining, to every ps: who the worker is and what it trains. `job` is worker, chief or evaluator."""

    job: str
    worker: int
    incarnation: int
    run_id: str
    is_chief: bool
    mode: str
    placement: str
    num_ps: int
    layout: Layout
    optimizer: OptimizerSpec
    wire: str = "float32"
    weight: float = 0.0  # samples in each push of this worker; 0: unknown yet
    offer: int = -1  # the version of this shard's values that the worker has, if workers may restore it (--reseed)
    trained_in: int = -1  # the lineage in which the worker has trained with this ps; -1: none


class Fenced(Message, frozen=True):
    """The worker may not join as this incarnation: `incarnation` is the newest known here. `is_taken`: another process
    has its place; else the worker may join as a newer one, and its last push is void."""

    incarnation: int
    is_taken: bool
    reason: str


class Joined(Message, frozen=True):
    """The worker has joined. Where memory is shared, two descriptors follow: the parameters (read-only), its slot."""

    is_initialised: bool
    version: int
    lineage: int
    segment_bytes: list[int]
    offers: int = 0  # to a ps without values: how many workers have some, and who has the newest
    freshest: int = -1
    is_chief_lost: bool = False  # and no launcher will start it again
    trained_in: int = -1  # to a ps without values came one that had trained with it: it has lost them
    empty_s: float = 0.0  # and so long ago the first one came: whose turn it is to bring some, all tell by one clock


EPOCH, STEP, BATCH = "epoch", "step", "batch"  # boundaries: the next value of ctx.epochs or ctx.steps, the next batch


class Position(Message, frozen=True):
    """Where a worker's next step begins. One way, to ps:0, for the update that makes `version`; also in heartbeats.

    `passes`: which pass over the loader, `batch`: batches taken in it, `at`: the kind of boundary. `rng`: random
    generators' states there, `start`: when the pass began; both empty where they are not known. `samples`: in all
    gradients that this worker has pushed; None where that is not known."""

    worker: int
    version: int = 0
    epoch: int = 0
    passes: int = 0
    batch: int = 0
    steps: int = 0
    at: str = ""
    rng: dict[str, bytes] = {}
    start: dict[str, bytes] = {}
    schedulers: list[dict[str, object] | None] = []
    groups: list[dict[str, object]] | None = None
    samples: float | None = 0.0
    done: int = 0  # passes that were taken to their end
    loop: dict[str, str | int] = {}  # which loop of the script takes them: checkpoint/loop

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Which place in the data this is: epoch, pass, batch."""
        return self.epoch, self.passes, self.batch


class Init(Message, frozen=True):
    """Step 2, the chief's: the bulk is the shard's first values, on ps:0 followed by the carried block. The rest is
    what a checkpoint says: `version` of all shards, and for ps:0 the data's seed and where each worker was."""

    version: int = 0
    lineage: int = 0
    seed: int | None = None
    positions: list[Position] = []


class Start(Message, frozen=True):
    """Step 3, to ps:0: answered when every worker of the cluster has joined. `has_values`: asked once more by one that
    was told `is_first`, after its first pull; answered when all of them have asked."""

    has_values: bool = False


class Dial(Message, frozen=True):
    """The mode that holds from now on: its `turn` counts switches, `version` is ps:0's at the switch, `decisions`
    are to be carried to a shard before it obeys."""

    turn: int
    spec: ModeSpec
    version: int
    decisions: tuple[Decision, ...] = ()


class Started(Message, frozen=True):
    """The worker may train. `decisions` are to be carried to the other shards before the first pull."""

    seed: int
    global_step: int
    decisions: tuple[Decision, ...]
    dial: Dial
    position: Position | None = None  # where this worker, or its predecessor, was
    saves_next: bool = False  # the next update will be saved (Flag.SAVE of an answer that never came)
    is_again: bool = False  # an earlier start of this worker has trained in this run
    is_first: bool = False  # the run begins now: ask again after the first pull, before the script can change values


class Attach(Message, frozen=True):
    """A second connection of a worker to ps:0, for heartbeats and questions while the first one waits."""

    worker: int
    incarnation: int


class AskStatus(Message, frozen=True):
    """Ask who is missing, and for whom the open round waits."""


class Awaited(msgspec.Struct, frozen=True):
    """A worker that others wait for: `does` says in a few words what it does as far as ps:0 knows, `for_s` since when,
    `evicted_in_s` when it will be given up (None: never)."""

    worker: int
    does: str
    for_s: float
    evicted_in_s: float | None = None


class Status(Message, frozen=True):
    """`live`: workers that are in now; `lacks`: so many more are needed before training goes on (--min-workers);
    `wanted`: the mode that is to hold when all workers stand still; `awaited`: more about `waiting_for`."""

    missing: list[int]
    waiting_for: list[int]
    version: int
    live: list[int] = []
    lacks: int = 0
    wanted: str = ""
    awaited: list[Awaited] = []
    ended: dict[int, tuple[int, int]] = {}  # of each worker that has closed: passes taken to their end, steps


# --- while it trains ----------------------------------------------------------------------------------------------


class PushTail(Message, frozen=True):
    """The tail of a push: options that changed, a bit per tensor that had a gradient, and the number of samples that it
    is the mean of, if that changed."""

    options: list[Options] | None = None
    mask: bytes = b""
    weight: float | None = None


class Carried(Message, frozen=True):
    """The decisions in a pull's tail, and in an answer's."""

    decisions: tuple[Decision, ...]


class Pause(Message, frozen=True):
    """Leave the worker out of rounds until Resume."""


class Resume(Message, frozen=True):
    """Answered with the Dial that holds now."""


class Barrier(Message, frozen=True):
    """Answered with the Dial that holds, when every live worker is in. `number` counts this worker's barriers: one
    that was left, but whose answer got lost, is not waited in again."""

    number: int = 0


class Ready(Message, frozen=True):
    """The worker stands still between two steps; answered with the new Dial when all workers do."""


class Align(Message, frozen=True):
    """To every shard but ps:0, by a worker that has a new dial: obey it from now on."""

    dial: Dial


class Aligned(Message, frozen=True):
    """`offset`: this shard's version less ps:0's; its rounds are counted from there."""

    offset: int
    version: int


class SwitchMode(Message, frozen=True):
    """From `paceline ctl mode` or a script, to ps:0: change the mode. `waits`: answer when it is done."""

    spec: ModeSpec
    waits: bool = True


class Switched(Message, frozen=True):
    """`pause_ms`: how long the first worker that stood still did so; None: it is only under way."""

    before: ModeSpec
    after: ModeSpec
    global_step: int
    pause_ms: float | None


class Steps(Message, frozen=True):
    """The cluster shall apply exactly `total` updates; answered with a Ticket."""

    total: int


class Ticket(Message, frozen=True):
    is_granted: bool
    is_spent: bool
    global_step: int
    dial: Dial


class Fetch(Message, frozen=True):
    """what: parameters, slots, carried, unsaved or ema. tensor: one trained tensor only. is_copy: of the copy that was
    made for a checkpoint, which must still be the one with that `number`; worker: of carried, that one's buffers
    alone. A Fetched with bulk answers."""

    what: str
    tensor: int | None = None
    is_copy: bool = False
    worker: int | None = None
    number: int = 0


# Slots beside the optimizer's own: the wider value of a half-precision parameter, and of its average.
MASTER = "master"
WIDE_AVERAGE = "wide_ema"


class SlotEntry(msgspec.Struct, frozen=True):
    """Where one piece of optimizer state lies in a Fetched's bulk; `is_scalar`: one number for the whole piece."""

    tensor: int
    start: int
    stop: int
    slot: str
    dtype: str
    is_scalar: bool
    offset: int
    size_bytes: int


class Fetched(Message, frozen=True):
    version: int
    slots: list[SlotEntry] = []


class Copy(Message, frozen=True):
    """From the worker that writes a checkpoint: is the copy of the announced update there? `is_now`: make one now,
    after these decisions of ps:0; `is_again`: the one that was made, with the positions that came since. `position`:
    the writer's own. The chief's may come with all that is carried, for which its own connection has no time."""

    worker: int
    incarnation: int
    is_now: bool = False
    is_again: bool = False
    decisions: tuple[Decision, ...] = ()
    position: Position | None = None


class Copied(Message, frozen=True):
    """`is_wanted`: it is there, or will be when the announced update is made. `awaited`: workers whose position is
    still to come. `round` is the version in ps:0's count, `number` which copy of this ps it is."""

    is_taken: bool
    is_wanted: bool = False
    version: int = 0
    round: int = 0
    has_rounds: bool = False
    lineage: int = 0
    pause_ms: float = 0.0
    seed: int = 0
    turn: int = 0
    spec: ModeSpec | None = None
    has_averages: bool = False
    optimizer: OptimizerSpec | None = None
    applied: dict[int, tuple[int, int]] = {}
    awaited: list[int] = []
    positions: list[Position] = []
    decisions: tuple[Decision, ...] = ()
    buffers_of: dict[int, tuple[int, float | None]] = {}  # whose are here: steps and samples they were told after
    number: int = 0


class Rewind(Message, frozen=True):
    """From the worker that brings values to a ps without memory, on a connection of its own: Init, Assign and Restored
    follow. `is_fencing`: a ps that has its memory goes back too, and workers that train there come back as newer ones.
    `is_lost`: this is the one that was found empty; values that another worker has brought since stay."""

    worker: int
    incarnation: int
    lineage: int
    is_fencing: bool
    layout: Layout
    optimizer: OptimizerSpec
    is_lost: bool = False


class Restored(Message, frozen=True):
    """The values are there: all workers may go on at this version. `dial` and `seed` are for ps:0; `live`: who is in as
    ps:0 says, for a ps that has never heard of the others."""

    version: int
    dial: Dial | None = None
    seed: int | None = None
    is_reseeded: bool = False
    live: list[int] | None = None


class FreeCopy(Message, frozen=True):
    """The checkpoint is written, or will not be."""

    worker: int
    incarnation: int


MAX_UNSAVED_BYTES = 1 << 28  # of buffers that no checkpoint holds: more are not sent
MAX_UNSAVED_BLOCK = MAX_UNSAVED_BYTES + 64  # with a digest in front


class Assign(Message, frozen=True):
    """The chief writes: what = parameters or ema (the bulk is the shard), written (parameters that training changed
    without the optimizer: averages go on), carried (with `worker`: that one's buffers alone), unsaved (the chief's
    buffers that no checkpoint holds), or slots (described by `slots`)."""

    what: str
    slots: list[SlotEntry] = []
    worker: int | None = None


class AskDecisions(Message, frozen=True):
    """Ask what must be carried to the other shards. Answered with Carried."""


class Describe(Message, frozen=True):
    """Ask what the ps holds, without joining (kv)."""


class Described(Message, frozen=True):
    run_id: str
    spec: ModeSpec
    placement: str
    num_ps: int
    version: int
    layout: Layout | None
    lineage: int = 0
    turn: int = 0  # how often the mode was changed
    cluster: dict[str, list[str]] = {}  # jobs and addresses, as this ps was started with them


# --- the end ------------------------------------------------------------------------------------------------------


class Close(Message, frozen=True):
    """The worker is done; `report` is its WorkerReport as JSON, `ps_reports` those of the other ps."""

    report: bytes = b""
    ps_reports: list[bytes] = []


class Closed(Message, frozen=True):
    """`is_last`: no worker trains any more; write the final checkpoint, then disconnect."""

    is_last: bool
    report: bytes = b""


class Lost(Message, frozen=True):
    """From a launcher: this worker will not come back; one that has taken its place since, stays."""

    worker: int
    incarnation: int | None = None


class Serves(Message, frozen=True):
    """From a worker that runs ops for others and trains nothing: the others need not wait for it."""

    worker: int
    incarnation: int


class SaveSoon(Message, frozen=True):
    """From the launcher, whose user wants to stop: save one of the next updates, with the place of each worker."""


class Done(Message, frozen=True):
    pass


class Failed(Message, frozen=True):
    reason: str


Request = (
    Join | Init | Start | Attach | AskStatus | PushTail | Carried | Pause | Resume | Barrier | Ready | Align
    | SwitchMode | Steps | Fetch | Assign | AskDecisions | Describe | Close | Lost | Position | Copy | FreeCopy
    | Rewind | Restored | Serves | SaveSoon
)  # fmt: skip
Reply = (
    Joined | Fenced | Started | Status | Carried | Dial | Aligned | Switched | Ticket | Fetched | Described | Closed
    | Done | Failed | Copied
)  # fmt: skip

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Request | Reply] = msgspec.msgpack.Decoder(Request | Reply)

encode = _ENCODER.encode


def decode(data: bytes) -> Request | Reply:
    """Return the message in bytes that may be anything.

    >>> decode(encode(Lost(3)))
    Lost(worker=3, incarnation=None)
    """
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a message that does not parse: {error}") from error
