"""WHAT happens when, in a mode? Three workers, of which one is slow, around the product's own deciding code.

Used by draw.py. Decisions are server/control/state's with a mode of `modes.make`; only the time is simulated: a step
takes as many seconds as the scene says, messages and updates take none. Must never decide anything itself.
"""

import heapq
from collections import Counter
from dataclasses import dataclass, field
from itertools import cycle

from paceline.cluster.membership import Membership
from paceline.modes import make
from paceline.modes.spec import ModeSpec
from paceline.server.control.actions import Action, Answer, Apply, Wake
from paceline.server.control.state import ShardState
from paceline.wire.frames import Flag, Outcome

FAST, MEDIUM, SLOW = (1.0,), (1.15,), (3.3,)


@dataclass(frozen=True)
class Scene:
    """A mode, and how many seconds the steps of each worker take, over and over."""

    title: str
    flags: str
    spec: ModeSpec
    times: tuple[tuple[float, ...], ...] = (FAST, MEDIUM, SLOW)
    until_s: float = 10.7
    switch_s: float = 0.0
    then: ModeSpec | None = None  # the mode that is asked for at `switch_s`

    @property
    def own_steps(self) -> int:
        """Steps of a worker in one push."""
        return self.spec.local_steps if self.spec.name == "local" else 1


SCENES = {
    "async": Scene("async: nobody waits for anybody", "--mode async", ModeSpec(name="async"), until_s=7.9),
    "sync": Scene(
        "sync: a round takes as long as its slowest worker", "--mode sync", ModeSpec(name="sync"), until_s=8.6
    ),
    "k-of-n": Scene(
        "sync, 2 of 3: the first two make the round, what comes later is discarded",
        "--mode sync --replicas-to-aggregate 2",
        ModeSpec(name="sync", replicas_to_aggregate=2),
        until_s=8.6,
    ),
    "grace": Scene(
        "sync, 2 of 3 with grace: a round that is due waits 0.35 s for the third",
        "--mode sync --replicas-to-aggregate 2 --grace-ms 350",
        ModeSpec(name="sync", replicas_to_aggregate=2, grace_ms=350),
        (FAST, MEDIUM, (1.4, 1.6, 1.3)),
        until_s=8.6,
    ),
    "tokens": Scene(
        "sync, 5 gradients a round from 3 workers: fast ones give two, then wait",
        "--mode sync --replicas-to-aggregate 5 --extra-tokens 1",
        ModeSpec(name="sync", replicas_to_aggregate=5, extra_tokens=1),
    ),
    "bounded": Scene(
        "bounded: a worker that is more than 1 step ahead waits for the slowest",
        "--mode bounded --staleness 1",
        ModeSpec(name="bounded", staleness=1),
    ),
    "local": Scene(
        "local, outer sync: 3 steps of one's own, then one exchange in a round",
        "--mode local --local-steps 3 --outer sync",
        ModeSpec(name="local", local_steps=3),
        ((0.5,), (0.57,), (1.3,)),
        until_s=8.6,
    ),
    "switch": Scene(
        "async, then sync: everybody finishes a step and stands still until all do",
        "paceline ctl mode sync latest",
        ModeSpec(name="async"),
        switch_s=2.5,
        then=ModeSpec(name="sync"),
    ),
}


@dataclass
class Push:
    """What one worker computed from `start_s` to `stop_s`, of parameters of version `base`, and what became of it."""

    worker: int
    base: int
    start_s: float
    stop_s: float
    outcome: Outcome | None = None  # None: not answered before the picture ends
    goes_on_s: float | None = None  # when its worker began the next one
    staleness: int | None = None  # where every push is an update


@dataclass(frozen=True)
class Update:
    at_s: float
    version: int
    push: Push | None  # None: a round's


@dataclass
class Story:
    """A scene as it went."""

    scene: Scene
    pushes: list[Push] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    switched_s: float | None = None


def played(scene: Scene) -> Story:
    """The scene from 0 to its end."""
    return _Simulation(scene).run()


class _Simulation:
    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._story = Story(scene)
        members = Membership(len(scene.times))
        self._state = ShardState(make(scene.spec, len(scene.times)), members, is_coordinator=True)
        self._steps = [cycle(times) for times in scene.times]
        self._ids = Counter[int]()
        self._newest: dict[int, Push] = {}
        self._events: list[tuple[float, int, str]] = []  # when, which worker, what
        for worker in range(len(scene.times)):
            members.join(worker, 1, 0.0)
            self._begin(worker, 0.0)
        if scene.then is not None:
            heapq.heappush(self._events, (scene.switch_s, -1, "switch"))

    def run(self) -> Story:
        while self._events and self._events[0][0] < self._scene.until_s:
            now_s, worker, what = heapq.heappop(self._events)
            if what == "push":
                self._push(worker, now_s)
            elif what == "switch":
                self._perform(self._state.begin_switch(now_s), now_s)
            else:
                self._perform(self._state.changed(now_s), now_s)
        return self._story

    def _begin(self, worker: int, now_s: float) -> None:
        stop_s = now_s + next(self._steps[worker]) * self._scene.own_steps
        self._newest[worker] = Push(worker, self._state.version, now_s, stop_s)
        self._story.pushes.append(self._newest[worker])
        heapq.heappush(self._events, (stop_s, worker, "push"))

    def _push(self, worker: int, now_s: float) -> None:
        push, before = self._newest[worker], Counter(self._state.staleness[worker])
        self._ids[worker] += 1
        actions = self._state.push((worker, 1), self._ids[worker], push.base, now_s=now_s)
        if not self._state.mode.has_rounds:
            (push.staleness,) = Counter(self._state.staleness[worker]) - before
        self._perform(actions, now_s)

    def _perform(self, actions: list[Action], now_s: float) -> None:
        for action in actions:
            if isinstance(action, Apply):
                push = None if self._state.mode.has_rounds else self._newest[action.parts[0].key[0]]
                self._story.updates.append(Update(now_s, self._state.version, push))
            elif isinstance(action, Wake):
                heapq.heappush(self._events, (now_s + action.after_s, -1, "wake"))
            elif isinstance(action, Answer):
                self._answered(action, now_s)

    def _answered(self, answer: Answer, now_s: float) -> None:
        push = self._newest[answer.key[0]]
        push.outcome = answer.outcome
        if not answer.flags & Flag.SWITCH:
            push.goes_on_s = now_s
            self._begin(push.worker, now_s)
            return
        self._state.ready.add(answer.key)  # it says Ready and stands still
        if len(self._state.ready) == len(self._newest):
            self._switch(now_s)

    def _switch(self, now_s: float) -> None:
        assert self._scene.then is not None
        self._state.switch(make(self._scene.then, len(self._newest)))
        self._story.switched_s = now_s
        for worker in sorted(self._newest):
            self._newest[worker].goes_on_s = now_s
            self._begin(worker, now_s)
