"""WHAT do a ps and a worker do, message for message? The simulated tasks; what counts is decided by the real code.

Made by plan/simulate. A ps drives server/control/state as server/service does; a worker follows worker/requests/client,
and the numbers in comments are those of server/control/rounds. Pure: time passes only in plan/sharing's world, dice
come in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from paceline.plan.costs import RECEIVE_SHARE
from paceline.server.control.actions import Action, Add, Answer, Apply, Wake
from paceline.server.control.state import ShardState
from paceline.wire.decisions import Decision, Key
from paceline.wire.frames import WITHOUT_PARAMETERS, Flag, Kind, Outcome

READ_AHEAD = 0.8  # of the reading, at most

if TYPE_CHECKING:
    from paceline.plan.simulate import Host, Simulation


class Message(NamedTuple):
    """From a worker to a ps; of nobody (-1): a grace is over."""

    kind: Kind
    worker: int
    push_id: int = 0
    version: int = 0
    decisions: tuple[Decision, ...] = ()
    is_counted: bool = False


class Ps:
    """One ps: a queue, one message at a time (the lock, and the interpreter's), the real state. `stands_for`: so many
    ps of which each sees the same messages at the same time."""

    def __init__(self, simulation: Simulation, index: int, host: Host, stands_for: int) -> None:
        self.index = index
        self.host = host
        self.stands_for = stands_for
        self.state = ShardState(simulation.mode, simulation.members, index == 0)
        self.version = 0  # of the last update that is finished
        self.busy_s = 0.0
        self._simulation = simulation
        self._queue: deque[Message] = deque()
        self._is_busy = False
        self._began = 0.0

    def enter(self, message: Message) -> None:
        """All of it is here."""
        self._queue.append(message)
        if not self._is_busy:
            self._is_busy, self._began = True, self._simulation.world.now + self._simulation.wake_s
            self._simulation.woken(self._serve)

    def _serve(self) -> None:
        message = self._queue.popleft()
        self.host.cpu.use(self._simulation.message_s * RECEIVE_SHARE, lambda: self._decide(message))

    def _decide(self, message: Message) -> None:
        simulation = self._simulation
        actions = self._actions(message, simulation.world.now)
        answers = [action for action in actions if type(action) is Answer]
        work_s = simulation.message_s * (1 - RECEIVE_SHARE) * len(answers)
        for action in actions:
            if type(action) is Apply:
                work_s += simulation.apply_s(sum(part.gradients for part in action.parts))
            elif type(action) is Add:
                work_s += simulation.add_s
            elif type(action) is Wake:
                simulation.world.after(action.after_s, lambda: self.enter(Message(Kind.BEAT, -1)))
        work_s += simulation.copy_s * sum(self._is_copied(answer) for answer in answers)
        self.host.cpu.use(work_s, lambda: self._answer(answers))

    def _actions(self, message: Message, now_s: float) -> list[Action]:
        state, key = self.state, (message.worker, 1)
        if message.worker < 0:
            return state.look_again(now_s)
        if message.kind == Kind.PUSH:
            return state.push(key, message.push_id, message.version, now_s=now_s)
        if message.kind == Kind.STAGE:
            return state.stage(key, message.push_id, message.version)
        if message.is_counted:
            return state.count(key, message.push_id)
        return state.carry(key, message.push_id, message.decisions)

    def _is_copied(self, answer: Answer) -> bool:
        """On tcp: parameters that others may change while they are on their way (server/service._parameters)."""
        mode = self._simulation.mode
        has_none = answer.outcome in WITHOUT_PARAMETERS
        is_alone = self._simulation.topology.num_workers == 1
        return bool(self._simulation.bulk_s) and not (has_none or is_alone or (mode.is_lockstep and answer.is_push))

    def _answer(self, answers: list[Answer]) -> None:
        self.version = self.state.version
        for answer in answers:
            self._simulation.answer(self, answer)
        if self._queue:
            self._serve()
        else:
            self._is_busy = False
            self.busy_s += self._simulation.world.now - self._began

    def busy_until(self, now: float) -> float:
        """Seconds of work so far, the one under way too."""
        return self.busy_s + (max(0.0, now - self._began) if self._is_busy else 0.0)


class Worker:
    """Computes, pushes, loads its next batch, takes the answer; for ever."""

    def __init__(self, simulation: Simulation, index: int, host: Host, factor: float) -> None:
        self.index = index
        self.host = host
        self.waited_s = 0.0
        self.steps = 0
        self.stepped_s = 0.0  # when its last step ended
        self.key: Key = (index, 1)
        self._simulation = simulation
        self._factor = factor
        self._push_id = 0
        self._versions = [0] * len(simulation.ps)
        self._inbox: dict[int, Answer] = {}
        self._awaited = -1  # the ps whose answer it sleeps for
        self._waits_since_s = 0.0
        self._read_ahead_s = 0.0
        self._since_s = 0.0  # when its own part of this step began
        self._taking_s = 0.0  # and so much of it was for an answer
        self._life = self._live()
        simulation.world.after(simulation.start_s(), self._go)

    def _go(self) -> None:
        next(self._life)

    def receive(self, ps: int, answer: Answer, version: int, began_s: float) -> None:
        """An answer is here; on tcp with the parameters of that version, which a worker of a host of its own has read
        while they came, if it waited for them."""
        self._inbox[ps] = answer
        if self._simulation.topology.link is not None and self._awaited == ps:
            since_s = max(began_s, self._waits_since_s)
            self._read_ahead_s = min(self._simulation.world.now - since_s, READ_AHEAD * self._simulation.read_s)
        if not self._simulation.shares_memory and answer.outcome not in WITHOUT_PARAMETERS:
            self._versions[ps] = version
        if self._awaited == ps:
            self._awaited = -1
            self._simulation.woken(self._go)

    # --- its life: each `yield` is a wait that ends with _go ----------------------------------------------------

    def _live(self) -> Iterator[None]:
        simulation = self._simulation
        while True:
            device_s, compute_s = simulation.compute_s()
            if device_s:
                simulation.world.after(device_s, self._go)
                yield
            self.host.cpu.use(compute_s, self._go, simulation.costs.compute_cores)
            yield
            yield from self._hold_back()
            yield from self._push()
            taking_since_s = simulation.world.now
            yield from self._take()
            yield from self._work(simulation.read_s - self._read_ahead_s)
            self._taking_s = simulation.world.now - taking_since_s
            self.steps += 1
            self.stepped_s = simulation.world.now
            self._read_ahead_s = 0.0
            simulation.stepped()

    def _hold_back(self) -> Iterator[None]:
        """As worker/step/slowness does it: by the clock, so who shares its core is slowed by so many times that."""
        simulation = self._simulation
        if self._factor > 1 and self.steps:
            left_out_s = self._taking_s if simulation.topology.mode.waits_for_others else 0.0
            own_s = max(0.0, simulation.world.now - self._since_s - left_out_s)
            simulation.world.after((self._factor - 1) * own_s + simulation.wake_s, self._go)
            yield
        self._since_s = simulation.world.now

    def _work(self, work_s: float) -> Iterator[None]:
        if work_s > 0:
            self.host.cpu.use(work_s, self._go)
            yield

    def _push(self) -> Iterator[None]:
        """The gradient is copied while what was copied is on its way; in rounds ps:0's part comes last."""
        simulation = self._simulation
        self._push_id += 1
        first, others = simulation.ps[0], simulation.ps[1:]
        if simulation.mode.has_rounds and others:
            share = sum(ps.stands_for for ps in others) / simulation.topology.num_ps
            yield from self._send(others, Kind.STAGE, simulation.push_s * share)  # 1
            for ps in others:
                yield from self._await(ps)
            yield from self._send([first], Kind.PUSH, simulation.push_s * (1 - share))  # 2
        else:
            yield from self._send([*others, first], Kind.PUSH, simulation.push_s)

    def _take(self) -> Iterator[None]:
        simulation = self._simulation
        first, others = simulation.ps[0], simulation.ps[1:]
        yield from self._await(first)  # 3
        answer = self._inbox.pop(0)
        if answer.outcome is Outcome.ADDED:
            for ps in others:
                simulation.ask(ps, Message(Kind.PULL, self.index, self._push_id, is_counted=True))
            for ps in others:
                yield from self._await(ps)
            return
        self._read(first)
        if simulation.mode.has_rounds:
            yield from self._carry(answer.decisions if others else ())  # 4
            return
        for ps in others:
            yield from self._await(ps)
            if answer.flags & Flag.WAITED and not simulation.shares_memory:
                yield from self._pull(ps, ())
            self._read(ps)

    def _carry(self, decisions: tuple[Decision, ...]) -> Iterator[None]:
        """Until all shards are at one round; if they are not, another round has closed since."""
        simulation = self._simulation
        others = simulation.ps[1:]
        while others:
            for ps in others:
                if decisions or not simulation.shares_memory:
                    yield from self._pull(ps, decisions)
                self._read(ps)
            if len(set(self._versions)) == 1:
                return
            yield from self._pull(simulation.ps[0], ())
            self._read(simulation.ps[0])
            decisions = simulation.ps[0].state.rounds.open_decisions

    def _pull(self, ps: Ps, decisions: tuple[Decision, ...]) -> Iterator[None]:
        self._simulation.ask(ps, Message(Kind.PULL, self.index, self._push_id, 0, decisions))
        yield from self._await(ps)
        self._inbox.pop(ps.index, None)

    def _read(self, ps: Ps) -> None:
        """Shared memory: what is there now."""
        if self._simulation.shares_memory:
            self._versions[ps.index] = ps.version

    def _send(self, to: list[Ps], kind: Kind, work_s: float) -> Iterator[None]:
        simulation = self._simulation
        copied = simulation.waits(self._go)
        for ps in to:
            self._inbox.pop(ps.index, None)
            simulation.push(self, ps, Message(kind, self.index, self._push_id, self._versions[ps.index]), copied)
        self.host.cpu.use(work_s, copied.close)
        yield

    def _await(self, ps: Ps) -> Iterator[None]:
        if ps.index not in self._inbox:
            self._awaited = ps.index
            self._waits_since_s = self._simulation.world.now
            yield
            self.waited_s += self._simulation.world.now - self._waits_since_s
        if ps.index:
            self._inbox.pop(ps.index, None)
