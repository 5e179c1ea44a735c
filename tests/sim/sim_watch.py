"""WHAT must hold at every moment? Looks over the shoulder of one ps while it decides; keeps clocks of its own.

Told by sim_ps of every push, answer, update and event. It reads what the ps knows, and changes nothing.
INVARIANT I3: bounded mode never lets a worker run more than S steps ahead; here: at the moment of answering.
"""

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.cluster.membership import Membership
from paceline.modes.base import Mode
from paceline.server.control.actions import Answer, Part
from paceline.server.control.state import EARLY_S
from paceline.server.core import Core, Peer
from paceline.wire.decisions import Key
from paceline.wire.frames import Flag, Frame

if TYPE_CHECKING:
    from sim_ps import SimService

Gradient = tuple[int, int, int, int]  # worker, incarnation, push id, base version (in rounds: ps:0's)
A_MOMENT_S = EARLY_S + 1e-6


class Moment(NamedTuple):
    """What held when an update was decided; the same event may have changed it since."""

    mode: Mode
    turn: int
    is_switching: bool
    training: frozenset[int]
    waiting: frozenset[int]
    lacks: int


class WatchedMembership(Membership):
    """Says who begins to train, whoever caused it."""

    watch: "Watch"

    def join(self, worker: int, incarnation: int, now_s: float) -> bool:
        never_left = self.is_current(worker, incarnation) and worker in self.training  # the ps was away
        is_in = super().join(worker, incarnation, now_s)
        if is_in and not never_left:
            self.watch.entered(worker)
        if is_in:
            self.watch.open.pop((worker, incarnation), None)
        return is_in

    def resume(self, worker: int) -> None:
        was_training = worker in self.training
        super().resume(worker)
        if not was_training:
            self.watch.entered(worker)


class Watch:
    """One ps, watched."""

    def __init__(self, service: "SimService", may_lose_votes: bool) -> None:
        self._service = service
        self._is_first = service.core.config.index == 0
        self._may_lose_votes = may_lose_votes  # gradients that are not finite are votes, and in no update
        self._done: Counter[int] = Counter()  # bounded: steps of each worker, a joiner's as many as the slowest's
        self._epoch = 0
        self._alone: int | None = None  # began to train when nobody did
        self._arrived_s: dict[tuple[int, int, int], float] = {}
        self.open: dict[Key, tuple[int, bool]] = {}  # pushes without an answer: id, and whether all steps were made
        self.received: Counter[int] = Counter()  # pushes of each worker, without retries
        self.specs = [service.core.control.dial.spec]  # the mode of each epoch

    def forget(self) -> None:
        """What it watched has lost its memory."""
        self.open.clear()
        self._arrived_s.clear()
        self._done.clear()
        self.received.clear()

    @property
    def _core(self) -> Core:
        return self._service.core  # of its life now

    def entered(self, worker: int) -> None:
        """It joined, or trains again. If nobody else trains, any clock will do: then it is the one that it is given."""
        self._catch_up()
        others = [self._done[w] for w in self._core.control.members.training if w != worker]
        if others:
            self._done[worker] = max(self._done[worker], min(others))
        else:
            self._alone = worker

    def _catch_up(self) -> None:
        """Before anything is looked at: a new mode starts all clocks."""
        if self._alone is not None:
            self._done[self._alone] = max(self._done[self._alone], self._core.control.state.clocks.get(self._alone, 0))
            self._alone = None
        if self._epoch != self._core.control.state.turn:
            self._epoch = self._core.control.state.turn
            self._done.clear()
            self.specs.append(self._core.control.dial.spec)

    def pushed(self, peer: Peer, frame: Frame) -> None:
        """Before the ps deals with it."""
        core, key = self._core, peer.key
        if not self._is_first or key is None or core.control.at.get(key) != peer.id:
            return
        self._catch_up()
        is_late = core.control.is_late(frame.flags)
        self.open[key] = frame.push_id, is_late
        if (name := (*key, frame.push_id)) in self._arrived_s:
            return
        self._arrived_s[name] = self._service.world.now
        self.received[key[0]] += 1
        if not is_late:
            self._done[key[0]] += 1

    def _ahead(self, worker: int) -> int:
        return self._done[worker] - min((self._done[w] for w in self._core.control.members.training), default=0)

    @property
    def _lacks(self) -> int:
        least = self._core.config.min_workers
        return self._core.control.members.lacks(least) if least > 1 else 0  # 1: a round of the dead is closed at once

    def answers(self, answer: Answer) -> None:
        """A push is answered: its worker begins the next step, or stands still for another mode."""
        state, key = self._core.control.state, answer.key
        push_id, is_late = self.open.get(key, (-1, False))
        if push_id != answer.push_id:
            return  # a pull, or somebody who is gone
        del self.open[key]
        if state.mode.has_rounds or is_late:
            return
        if self._lacks:
            self._service.fault(f"lets {key} go on though {self._lacks} worker(s) are missing")
        if state.mode.keeps_clocks and not answer.flags & Flag.SWITCH and self._is_too_far(key):
            self._service.fault(f"lets {key} start {self._ahead(key[0])} steps ahead: {dict(self._done)}")

    def _is_too_far(self, key: Key) -> bool:
        return self._ahead(key[0]) > self._core.control.state.mode.spec.staleness

    def moment(self) -> Moment:
        """An update is decided."""
        state = self._core.control.state
        waiting = frozenset(key[0] for key in self.open)
        training = self._core.control.members.training
        return Moment(state.mode, state.turn, state.is_switching, training, waiting, self._lacks)

    def updates(self, moment: Moment, gradients: tuple[Any, ...], divisor: int, version: int) -> None:
        """An update is made from these. What is no gradient at all is found at the end."""
        if not all(isinstance(g, tuple) for g in gradients):
            return
        mode = moment.mode
        if not mode.has_rounds:
            staleness = version - gradients[0][3]
            if staleness < 0 or divisor != (1 + staleness if mode.spec.staleness_scale else 1):
                self._service.fault(f"took {gradients} at version {version}, lr divided by {divisor}")
        elif self._is_first:
            if moment.lacks:
                self._service.fault(f"closed round {version} though {moment.lacks} worker(s) are missing")
            if not self._may_lose_votes:
                self._closes(moment, gradients, version)

    def _closes(self, moment: Moment, gradients: tuple[Gradient, ...], round_: int) -> None:
        """A round ends when it is due and its grace is over, or when the mode changes; not before."""
        mode, training = moment.mode, moment.training
        given = Counter(g[0] for g in gradients)
        if moment.is_switching:
            return
        if not any(mode.may_read(given[w]) for w in training if w not in moment.waiting):
            return  # nobody can add anything
        if not mode.is_due(given, training):
            self._service.fault(f"closed round {round_} too early, with {dict(given)} of {set(training)}")
        wanted, grace_s = mode.spec.replicas_to_aggregate, mode.spec.grace_ms / 1e3
        if wanted is None or len(gradients) < wanted:
            return
        due_s = sorted(self._arrived_s[g[:3]] for g in gradients)[wanted - 1]
        if self._service.world.now < due_s + grace_s - A_MOMENT_S:
            self._service.fault(f"closed round {round_} {due_s + grace_s - self._service.world.now} s too early")

    def writes_down(self, parts: tuple[Part, ...], gradients: tuple[Any, ...]) -> None:
        """What a ps with --ledger writes of an update is what was in it."""
        if not all(isinstance(g, tuple) for g in gradients):
            return
        given = Counter(g[:2] for g in gradients)
        last = {g[:2]: g[2] for g in gradients}
        if [(p.key, p.push_id, p.gradients) for p in parts] != [(k, last[k], n) for k, n in given.items()]:
            self._service.fault(f"writes {parts} of an update of {gradients}")

    def looks(self) -> None:
        """After everything that happens: nobody waits without need."""
        state = self._core.control.state
        if not self._is_first:
            return
        self._catch_up()
        if self._lacks or state.lacks:
            return
        if state.mode.has_rounds:
            given, training = state.rounds.given, self._core.control.members.training
            if given and state.due_s is None and state.mode.is_due(given, training):
                self._service.fault(f"leaves a round open that is due: {given} of {set(training)}")
            return
        for key in state.waiting:
            if not state.mode.keeps_clocks or not self._is_too_far(key):
                self._service.fault(f"holds {key} back without need: {dict(self._done)}")
