"""Bind one model and its optimizer to the cluster: a step pushes the gradient and takes the newest parameters.

The part that every framework shares; frameworks/torch/training_step and frameworks/keras/training_step bring the
tensors. No framework: the arena is bytes. Everything here runs on the thread that trains. The way of one step
(docs/step.md):

1. what the script has written into the parameters goes to the ps, or is refused,
2. the gradient goes into the slot (large ones on tcp: onto the wire from where they lie), looked at with one sum,
3. push, and wait for the answer: after the framework's step the model holds the newest parameters.

What a script writes into the parameters itself is looked for before they are overwritten or pushed against, by digests,
because a write through `.data` or numpy leaves no other trace. With one worker it goes to the ps, as if this were one
process; with several it is refused outside ctx.assign().
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from xxhash import xxh3_64_intdigest as digest

from paceline import forks
from paceline.cluster.spec import Task
from paceline.cluster.spelling import listed
from paceline.errors import NonFiniteGradient, PacelineError, UsageError
from paceline.params.arena import Arena
from paceline.params.layout import Layout, TensorSpec
from paceline.params.placement import Plan, place
from paceline.wire.frames import Flag, Outcome
from paceline.wire.messages import Assign, Fetch, Fetched, OptimizerSpec, Options, PushTail, encode
from paceline.worker.requests.client import Client
from paceline.worker.script import check_owner, script_depth, script_line
from paceline.worker.step.optimizer_state import Slots, gather
from paceline.worker.step.outgoing import Outgoing
from paceline.worker.step.slowness import Slowness

if TYPE_CHECKING:
    from paceline.worker.session import WorkerSession

NOTHING = id(None)
SAVE = int(Flag.SAVE)
MAX_NOT_FINITE = 10  # in a row; then something is wrong with the training, not with a batch


class Writes(Protocol):
    """Tells whether parameters that lie elsewhere than in the arena are still what was pulled."""

    def remember(self) -> None:
        """Take the values that lie there now for those of the ps."""
        ...

    def found(self) -> Sequence[int]:
        """Return the indices of the trained tensors that were written since `remember`."""
        ...


class Early(Protocol):
    """Gradients that leave while backward runs (--overlap)."""

    shards: Collection[int]

    def flush(self, gradients: Any) -> None: ...

    def forget(self) -> None: ...

    def close(self) -> None: ...


class Samples(Protocol):
    """The samples that a gradient is made of."""

    def begin_pass(self) -> None: ...

    def pushed(self) -> float | None: ...

    def close(self) -> None: ...


class TrainingStep(ABC):
    """One model and its optimizer, bound to the cluster; each framework has a subclass."""

    has_mirror = True  # the model's own tensors are no views of the arena
    shows_state = False  # the script has seen the optimizer's state since the last step, and may have written it
    is_local = False  # the optimizer runs here, and deltas are pushed
    loading = "model.load_state_dict()"  # what loads values into the model

    def __init__(self, spec: OptimizerSpec, layout: Layout, session: "WorkerSession") -> None:
        self.owner = forks.Owner()
        self._session = session
        self._say = session.say
        self._me = session.identity()
        self.progress = session.progress
        self.clock = session.clock
        self.after_step = session.clock.step
        self.own_weight = session.own_weight  # samples of a push, as ctx.weight() says
        self.injection = session.injection
        self.spec = spec
        self.layout = layout
        self.plan: Plan = place(layout, len(self._me.ps_addresses), self._me.placement)
        self.arena = Arena.private(self.plan.total_bytes)
        self.client = Client(
            self._me, layout, self.plan, self.arena.memory, session.say,
            beat=session.beat, recovery=session.recovery(self), model=self, clock=session.clock,
        )  # fmt: skip
        self._outgoing: Outgoing = None  # type: ignore[assignment]  # set by find_slots, after the client has joined
        self._overlap: Early | None = None
        self.samples: Samples | None = None  # where the framework counts them, and several workers train
        self._sent_options: Any = None
        self.watched: Sequence[memoryview] = ()  # each trained tensor's memory, where the script can write it
        self._digests: list[int] = []  # of that memory, as it was pulled
        self.writes: Writes | None = None  # the framework's own, where that memory is not the host's
        self.is_alone = True  # no other worker trains this model
        self.has_joined = False  # and found its slots
        self.goes_on = False  # until the loop begins: this run has made updates already
        self.carried_at_start = b""  # where the run goes on: buffers and frozen parameters as prepare() took them
        self._is_first = True  # no step yet
        self._holds_averages = False
        self._refreshes_later = False
        self.slowness: Slowness | None = None
        self.steps = 0
        self.samples_pushed: float | None = 0.0  # in all of this worker's gradients; None: not known
        self.pushes = 0
        self.wants_ticket = False
        self.is_budgeted = False  # ctx.steps(total) was used: nothing counts beyond it
        self.has_ticket = False
        self.last_outcome = Outcome.APPLIED
        self.discarded = 0
        self.not_finite = 0
        self._not_finite_in_a_row = 0
        self.weight = 0.0
        self._sent_weight: float | None = 0.0

    # --- what a framework brings ------------------------------------------------------------------------------

    @abstractmethod
    def mirror(self) -> None:
        """Copy the arena's values into the model."""

    @abstractmethod
    def fill_arena(self) -> None:
        """Copy the model's values into the arena."""

    @abstractmethod
    def block_of(self, specs: Sequence[TensorSpec], offsets: Sequence[int], size_bytes: int) -> bytes:
        """Copy the values of these carried tensors, each to its offset."""

    @abstractmethod
    def take_carried(self, block: bytearray) -> None:
        """Overwrite the frozen parameters and buffers at the start, with the chief's."""

    def unsaved_block(self) -> bytes:
        """Copy the values of the buffers that no checkpoint holds; empty where a framework has none."""
        return b""

    def take_unsaved(self, block: bytearray) -> None:  # noqa: B027 (the same)
        """Overwrite the buffers that no checkpoint holds with the chief's."""

    @abstractmethod
    def find_slots(self) -> None:
        """Lay out where gradients go; a ps that was connected to again has another slot."""

    @abstractmethod
    def _option_values(self) -> Any:
        """Return the optimizer's options as they are now, to be compared with those of the last push."""

    @abstractmethod
    def _group_options(self) -> list[Options]:
        """Return the options of each group as a ps takes them."""

    @abstractmethod
    def _spoil(self) -> None:
        """Set one element of the gradient to NaN (--chaos nan)."""

    @abstractmethod
    def device_name(self, pin: Callable[[], Any]) -> str:
        """Return what tables show for the device that this model is on; `pin` finds the worker's own, in torch's
        words."""

    @abstractmethod
    def mapping_lines(self, task: Task) -> list[str]:
        """Return the lines `Device mapping:` of --log-device-placement."""

    # --- connecting -------------------------------------------------------------------------------------------

    def joined(self, on_load: Callable[[], None]) -> None:
        """Find the slots and take the parameters of the ps, once the client has joined. Call `on_load` whenever the
        script has loaded values into the model."""
        self.find_slots()
        self.has_joined = True
        self.mirror()

    def reconnected(self) -> None:
        """Find the slots again: a ps that was connected to again has another one."""
        if self.has_joined:
            self.find_slots()

    def returned(self) -> None:
        """Take what the others have made without this worker."""
        if self.has_joined:
            self.refresh()
        else:
            self.client.pull()

    def parameters_of(self, index: int) -> memoryview:
        """Return this worker's parameters of one shard."""
        self.fill_arena()
        base = self.plan.base(index)
        return self.arena.memory[base : base + self.plan.shard_bytes[index]]

    # --- one step ---------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Check and prepare everything before a gradient leaves."""
        if not self.owner.is_here:
            check_owner(self.owner, "optimizer.step()")
        if self._holds_averages:
            raise PacelineError("a step inside ctx.ema(): the model holds averaged parameters there; step outside")
        if self.client.is_pending:
            self.settle()  # Ctrl+C has interrupted the wait for it
        self.check_parameters()
        if self.writes is not None or self.shows_state or list(map(digest, self.watched)) != self._digests:
            self._keep_found()
        if self._is_first:
            self.end_first()
        if self.slowness is not None:
            self.slowness.hold_back()
        if self.injection is not None:
            self.injection.before_push(self.steps + 1, self._spoil)

    def check_parameters(self) -> None:  # noqa: B027 (a framework whose tensors cannot move has nothing to check)
        """Refuse parameters that are no longer what was bound, or bind them again where that is right."""

    def assigned(self, is_chief: bool) -> None:  # noqa: B027 (the same)
        """Note that inside ctx.assign() the script has written what all workers will have."""

    def lay_back(self) -> None:  # noqa: B027 (the same)
        """Bind parameters again whose values lie elsewhere now. Leave refusals to the next step: a script may cast its
        model after its last one."""

    # --- what the script writes into the parameters -----------------------------------------------------------

    def keep_writes(self) -> None:
        """Send what the script has written into the parameters since the last pull to the ps, or refuse it. The caller
        must have taken the last answer."""
        self.lay_back()
        self._keep_found()

    def remember(self) -> None:
        """Take the values of now for those of the ps."""
        if self.writes is not None:
            self.writes.remember()
        self._digests = list(map(digest, self.watched))

    def found(self) -> Sequence[int]:
        """Return the indices of the trained tensors that were written since `remember`."""
        if self.writes is not None:
            return self.writes.found()
        both = zip(map(digest, self.watched), self._digests, strict=True)
        return [index for index, (now, then) in enumerate(both) if now != then]

    def _keep_found(self) -> None:
        self.shows_state = False
        written = self.found()
        if not written:
            return
        if self.goes_on:
            self._say(
                f"paceline: {self._named(written)} written between prepare() and the first step, and this run goes on "
                f"from global step {self.client.links[0].version}: the values on the ps count. Write before prepare()"
            )
            self.take_newest()
        elif self.is_alone:
            self._send_parameters("parameters" if self._is_first else "written")
        else:
            raise UsageError(
                f"{self._named(written)} written by the script after prepare(), before this call{script_line()}: the "
                f"other workers would not see it. {self._instead_of_writing(written)}"
            )

    def _sends_state(self, what: str, instead: str, remembers: str) -> bool:
        """Tell whether what the script has written into the optimizer's state goes to the ps; refuse it beside other
        workers."""
        if self.goes_on:
            self._say(
                f"paceline: {what} written between prepare() and the first step, and this run goes on: what the ps "
                f"{remembers} counts"
            )
        elif not self.is_alone:
            raise UsageError(
                f"{what} written by the script after prepare(), before this call{script_line()}: the other workers "
                f"would not see it. Write {instead} on all workers inside `with ctx.assign():` (the chief's values "
                "count)"
            )
        return not self.goes_on

    def _instead_of_writing(self, indices: Sequence[int]) -> str:
        """Say what a script with several workers can do instead of writing these tensors."""
        return (
            "Write before prepare(), or on all workers inside `with ctx.assign():` (the chief's values count), or let "
            "the ps keep a constraint: paceline.constrain(p, min=…, max=…)"
        )

    def _named(self, indices: Sequence[int]) -> str:
        names = [self.layout.trained[index].name for index in indices]
        return f"{listed(names)} {'was' if len(names) == 1 else 'were'}"

    def _send_parameters(self, what: str) -> None:
        self.fill_arena()
        for link in self.client.links:
            link.ask(Assign(what), bulk=[link.into] if link.into.nbytes else [])
        self.remember()

    def begin_loop(self) -> None:
        """Drop what the script has written since prepare(), where the run goes on: its loop begins now."""
        if self.goes_on:
            self.keep_writes()
            self._drop_carried()
            self.goes_on = False

    def _drop_carried(self) -> None:
        """Take buffers and frozen parameters as they were at the end of prepare()."""
        known, now = self.carried_at_start, self.carried_block()
        if not known or known == now:
            return
        ends = [*self.layout.carried_offsets[1:], len(known)]
        parts = zip(self.layout.carried, self.layout.carried_offsets, ends, strict=True)
        names = [spec.name for spec, start, end in parts if known[start:end] != now[start:end]]
        self._say(
            f"paceline: {listed(names)} changed between prepare() and the loop, and this run goes "
            f"on from global step {self.client.links[0].version}: the values of its checkpoint count"
        )
        self.take_carried(bytearray(known))

    def end_first(self) -> None:
        """Treat what the script writes from now on as training, no longer as first values."""
        self._is_first = self.goes_on = False

    def newest_step(self) -> int:
        """Return the global step with this worker's last push in it."""
        return self.client.links[0].version

    def _push(self, gradients: Any) -> None:
        """Send this gradient, and take the answer to it."""
        progress, clock, overlap, outgoing = self.progress, self.clock, self._overlap, self._outgoing
        if progress.expects_push:
            progress.before_push()
        clock.pushing_since_s = perf_counter() - clock.wait_s  # until the step ends
        mask = bits([g is not None for g in gradients]) if NOTHING in map(id, gradients) else b""
        options = self._changed_options()
        counts = self.samples is not None or self.own_weight is not None or not self.is_alone
        weight = self._changed_weight() if counts or self.weight != self._sent_weight else None
        tail = encode(PushTail(options, mask, weight)) if mask or options is not None or weight is not None else b""
        sent = () if overlap is None else overlap.shards
        payloads, looks_finite = outgoing.write(gradients, bool(mask), sent)
        is_finite = looks_finite or self._is_finite(gradients)
        if is_finite:
            self._not_finite_in_a_row = 0
            if overlap is not None:
                overlap.flush(gradients)
        self.has_ticket = False
        self.client.push(payloads, tail, is_finite, self.wants_ticket, sent, outgoing.again)
        self.pushes += 1
        if progress.is_saving:
            progress.pushed()
        else:
            progress.has_pushed = True
        self.settle()

    def settle(self) -> None:
        """Wait for the answer to the last push, if it has not been taken yet."""
        if not self.client.is_pending:
            return
        clock = self.clock
        waited_s, began_s = clock.wait_s, perf_counter()
        taken = self.client.take()
        if self._outgoing.direct:
            self._outgoing.forget()
        if self.has_mirror:
            self.mirror()
        if self.writes is not None:
            self.writes.remember()
        self._digests = list(map(digest, self.watched))
        took_s = perf_counter() - began_s
        if not clock.pushing_since_s:  # else it is a part of the push
            clock.exchange_s += took_s - (clock.wait_s - waited_s)
        if self.slowness is not None and self.client.dial.spec.waits_for_others:
            self.slowness.waited(took_s)
        self.has_ticket = taken.has_ticket
        self.last_outcome = taken.outcome
        if taken.flags & SAVE:
            self._session.announced(taken.version + 1, bool(taken.flags & Flag.WRITES))
        if taken.outcome is Outcome.DISCARDED or taken.outcome is Outcome.NOT_FINITE:
            self.discarded += 1

    def refresh(self) -> None:
        """Take the newest parameters now; inside ctx.ema(), when the model holds its own again."""
        self.settle()
        if self._holds_averages:
            self._refreshes_later = True
        else:
            self.keep_writes()
            self.take_newest()

    def take_newest(self) -> None:
        """Overwrite the model's parameters with the newest of the ps."""
        clock = self.clock
        waited_s, began_s = clock.wait_s, perf_counter()
        self.client.pull()
        self.mirror()
        self.remember()
        if not clock.pushing_since_s:
            clock.exchange_s += perf_counter() - began_s - (clock.wait_s - waited_s)
        if self._overlap is not None:
            self._overlap.forget()

    def forget_steps(self) -> None:  # noqa: B027 (only mode local makes any)
        """Drop the steps that this worker has made by itself since the last pull."""

    def finish(self) -> UsageError | None:
        """Send what is left of this worker's training. Return the refusal of what the script wrote last, if there is
        one: the caller must save what was trained before it raises that."""
        self.settle()
        try:
            self.keep_writes()
        except UsageError as refused:
            self.remember()
            return refused
        return None

    def close(self) -> None:
        """Close the connections and remove the hooks."""
        if self._overlap is not None:
            self._overlap.close()
        if self.samples is not None:
            self.samples.close()
        self.client.close()

    # --- what a push says beside its numbers ------------------------------------------------------------------

    def _changed_options(self) -> list[Options] | None:
        """Return all groups' options if one of them has changed since the last push (by a scheduler, say)."""
        values = self._option_values()
        if values == self._sent_options:
            return None
        self._sent_options = values
        self.spec = OptimizerSpec(self.spec.name, self._group_options())
        return self.spec.groups

    def _changed_weight(self) -> float | None:
        """Return how many samples this push is the mean of, if that is another number than at the last push."""
        samples = self._samples()
        self._count(samples)
        self.weight = self.own_weight or (self.weight if samples is None else samples)
        if self.weight == self._sent_weight:
            return None
        self._sent_weight = self.weight
        return self.weight

    def _count(self, samples: float | None) -> None:
        """Add a push's samples to those of all; a worker that trains alone is compared with none."""
        if given := self.own_weight or samples:
            self.samples_pushed = None if self.samples_pushed is None else self.samples_pushed + given
        elif not self.is_alone and (samples is not None or self.samples is None):
            self.samples_pushed = None

    def _samples(self) -> float | None:
        """Return how many samples are in the gradient that is pushed; 0: unknown, None: as many as before."""
        return None if self.samples is None else self.samples.pushed()

    def _is_finite(self, gradients: Any) -> bool:
        """Look at each gradient, because their sum is not finite; count and name those that are not."""
        bad = self._outgoing.not_finite(gradients)
        if not bad:
            return True
        self.not_finite += 1
        self._not_finite_in_a_row += 1
        who, where = f"worker:{self._me.worker}", ", ".join(bad)
        if self._not_finite_in_a_row >= MAX_NOT_FINITE:
            raise NonFiniteGradient(f"{who}: {self._not_finite_in_a_row} gradients in a row not finite, now in {where}")
        self._sent_options = []  # only ps:0 gets this push: the next one repeats its options
        self._sent_weight = None
        warnings.warn(
            f"paceline: {who}: step {self.steps + 1} discarded, gradient not finite in {where}",
            stacklevel=script_depth(),  # the script's own optimizer.step()
        )
        return False

    # --- from outside the loop --------------------------------------------------------------------------------

    def assign_parameters(self) -> None:
        """Make the chief's parameters, as they are now, the cluster's."""
        self.settle()
        self.check_parameters()
        self._send_parameters("parameters")
        self.send_carried()

    def carried_block(self) -> bytes:
        """Return the values of all carried tensors, one after the other."""
        return self.block_of(self.layout.carried, self.layout.carried_offsets, self.layout.carried_bytes)

    def own_block(self) -> bytes:
        """Return the values of all buffers, one after the other."""
        return self.block_of(self.layout.own, self.layout.own_offsets, self.layout.own_bytes)

    def send_carried(self) -> None:
        """Send the chief's buffers and frozen parameters, as they are now."""
        if self.layout.carried_bytes:
            self.client.links[0].ask(Assign("carried"), bulk=[self.carried_block()])

    def slots(self) -> Slots:
        """Fetch all optimizer state of the cluster."""
        check_owner(self.owner, "the optimizer's state read")
        self.settle()
        return gather(self.client.links, self.layout)

    @contextmanager
    def averages(self) -> Iterator[None]:
        """Have the model hold the averaged parameters of the ps inside, and its own again afterwards, to the bit."""
        self.settle()
        self.keep_writes()
        blocks = [link.ask_bulk(Fetch("ema"), Fetched, link.into.nbytes)[1] for link in self.client.links]
        memory = self.arena.memory
        self.fill_arena()
        own = bytes(memory)
        for link, block in zip(self.client.links, blocks, strict=True):
            link.into[:] = block
        self.mirror()
        self.remember()
        did_hold, self._holds_averages = self._holds_averages, True
        try:
            yield
            if written := self.found():
                raise UsageError(
                    f"{self._named(written)} written inside ctx.ema(), where the averages can only be read"
                )
        finally:
            self._holds_averages = did_hold
            memory[:] = own
            self.mirror()
            self.remember()
            if self._refreshes_later and not did_hold:
                self._refreshes_later = False
                self.take_newest()


def bits(flags: Sequence[bool]) -> bytes:
    """Pack flags into bytes, the first into the lowest bit.

    >>> bits([True, False, True]).hex()
    '05'
    """
    out = bytearray((len(flags) + 7) // 8)
    for index, flag in enumerate(flags):
        if flag:
            out[index >> 3] |= 1 << (index & 7)
    return bytes(out)
