"""WHO runs a session's steps? The task that the session was opened at: it has the graph, places it, and hands it out.

Its verbs are called by ingraph/session, from this process or another. The way of a step:

1. decide, purely, what runs where (ingraph/partition); a refusal comes before anything runs,
2. give every task its parts, all at the same time, this task too,
3. wait for all; when one fails, or its task dies, abort the others, and tell the first cause.
"""

import itertools
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from paceline.cluster.devices import Device
from paceline.cluster.pinning import mark
from paceline.cluster.spec import Task
from paceline.cluster.spelling import listed
from paceline.errors import PacelineError, ProtocolError, UsageError
from paceline.frameworks.torch import devices as torch_devices
from paceline.ingraph.neighbours import Neighbours, caller, still_wanted
from paceline.ingraph.partition import Def, Part, cut, place, prune
from paceline.ingraph.parts import Parts, Work
from paceline.ingraph.raised import text_of
from paceline.ingraph.together import Awaited, together
from paceline.telemetry import lines
from paceline.transport.base import Stream

KEEP_S = 60.0  # for a client whose last connection has ended, and who may come back
MAX_SESSIONS = 256  # the one that was used longest ago is forgotten
MAX_NAMED = 3  # nodes in an error's sentence


class NodeDef(msgspec.Struct):
    """A node as a client sends it; `args` has Refs where other nodes' values belong. No op: a placeholder."""

    name: str
    kind: str
    op: str
    device: str
    inputs: list[str]
    controls: list[str]
    args: Any


class Options(msgspec.Struct, frozen=True):
    """What a session asks for; `text` is how its config is shown. `timeout_s`: of a step, 0: none."""

    is_soft: bool = True
    is_logged: bool = False
    text: str = ""
    timeout_s: float = 0.0


class Offer(msgspec.Struct, frozen=True):
    """What a task has, as it says to other masters; `is_soft`: its missing GPUs may be replaced by its CPU."""

    gpus: list[str]  # by name, as tables show them
    is_soft: bool = True


class _Session:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.defs: dict[str, Def] = {}
        self.nodes: dict[str, NodeDef] = {}
        self.logged: set[str] = set()
        self.said: set[str] = set()
        self.lock = threading.Lock()
        self.callers: set[Stream] = set()
        self.alone_since_s: float | None = None

    @property
    def is_alone(self) -> bool:
        """It had connections, and has none now."""
        return not self.callers and self.alone_since_s is not None


class Master:
    """The sessions that were opened at this task. `say` prints a line of its log."""

    def __init__(self, neighbours: Neighbours, parts: Parts, say: Callable[[str], None]) -> None:
        self._neighbours = neighbours
        self._parts = parts
        self._say = say
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._lock = threading.Lock()
        self._steps = itertools.count(1)
        self._offers: dict[Task, Offer] = {}
        self._has_sweeper = False
        self.verbs: dict[str, Callable[..., Any]] = {
            "hello": self.hello,
            "open_session": self._open,
            "extend": self._extend,
            "run": self._run,
            "close_session": self.close,
        }

    def hello(self) -> dict[str, Any]:
        """What this task has: asked by other masters."""
        return msgspec.structs.asdict(self._offer())

    def _offer(self) -> Offer:
        here = torch_devices.here()
        return Offer(here.names, here.use.is_soft)

    # --- sessions ---------------------------------------------------------------------------------------------

    def open(self, options: Options, is_announced: bool = True) -> str:
        """A new session, once every task of the cluster is there."""
        self._meet_all(options.timeout_s or None)
        name = secrets.token_hex(8)
        with self._lock:
            self._sessions[name] = made = _Session(options)
            if (stream := caller()) is not None:
                made.callers.add(stream)
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        if is_announced:
            self._say(lines.session_line(name, options.text, self._neighbours.log_style))
        if self._is_logged(options):
            for line in torch_devices.mapping_lines(self._neighbours.task):
                self._say(line)
        return name

    def extend(self, session: str, nodes: Sequence[NodeDef]) -> None:
        """Further nodes of the session's graph; a node that is there already has new controls at most."""
        of = self._session(session)
        with of.lock:
            for node in nodes:
                of.nodes[node.name] = node
                of.defs[node.name] = Def(
                    node.name,
                    node.kind,
                    tuple(node.inputs),
                    tuple(node.controls),
                    Device.parse(node.device),
                    is_fed_only=not node.op,
                )

    def close(self, session: str) -> None:
        with self._lock:
            self._sessions.pop(session, None)

    def left(self, stream: Stream) -> None:
        """A connection has ended. A session of which it was the last one is kept a while: a client whose call failed
        connects anew, one that was killed does not."""
        with self._lock:
            for each in self._sessions.values():
                if stream in each.callers:
                    each.callers.discard(stream)
                    each.alone_since_s = time.monotonic()
            self._sweep_later()

    def _sweep_later(self) -> None:
        """One thread waits for all. Wants the lock."""
        if not self._has_sweeper and any(each.is_alone for each in self._sessions.values()):
            self._has_sweeper = True
            sweeper = threading.Timer(KEEP_S, self._sweep)
            sweeper.daemon = True
            sweeper.start()

    def _sweep(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            for name, each in list(self._sessions.items()):
                if each.is_alone and now_s - (each.alone_since_s or 0.0) >= KEEP_S:
                    del self._sessions[name]
            self._has_sweeper = False
            self._sweep_later()

    def _is_logged(self, options: Options) -> bool:
        """Asked for by the session, or for this task as a whole."""
        return options.is_logged or self._neighbours.is_logged

    def _open(self, options: dict[str, Any]) -> str:
        return self.open(msgspec.convert(options, Options))

    def _extend(self, session: str, nodes: list[dict[str, Any]]) -> None:
        try:
            self.extend(session, msgspec.convert(nodes, list[NodeDef]))
        except msgspec.ValidationError as error:
            raise ProtocolError(f"nodes of a graph that do not parse: {error}") from error

    def _session(self, name: str) -> _Session:
        with self._lock:
            if name not in self._sessions:
                raise UsageError(f"{self._neighbours.task.device} knows no session {name}; was it started again?")
            self._sessions.move_to_end(name)
            if (stream := caller()) is not None:
                self._sessions[name].callers.add(stream)
            return self._sessions[name]

    def _meet_all(self, limit_s: float | None) -> None:
        """Every task is asked what it has; the waiting lines are those of the missing ones. A ps has nothing."""
        own = self._neighbours.task
        others = [task for task in self._neighbours.serving_tasks if task != own]
        offers = together(
            {task: self._meeting(task, limit_s) for task in others}, lambda error: None, Awaited(still_wanted())
        )
        self._offers = {**offers, own: self._offer()}

    def _meeting(self, task: Task, limit_s: float | None) -> Callable[[], Offer]:
        remote = self._neighbours.remote(task)

        def meet() -> Offer:
            try:
                return msgspec.convert(remote.call("hello", wait_s=limit_s, limit_s=limit_s), Offer)
            except UsageError:
                if not remote.is_ps:
                    raise
                return Offer([])

        return meet

    # --- a step -----------------------------------------------------------------------------------------------

    def _run(self, session: str, fetches: list[str], feeds: dict[str, Any]) -> list[Any]:
        return self.run(session, fetches, feeds, still_wanted())

    def run(
        self, session: str, fetches: list[str], feeds: dict[str, Any], is_wanted: Callable[[], bool] = lambda: True
    ) -> list[Any]:
        """The values of the fetches, in their order."""
        of = self._session(session)
        with of.lock:
            parts = self._decide(of, fetches, feeds)  # 1
            works = [_work(part, of.nodes, feeds) for part in parts]
        by_task: dict[Task, list[Work]] = {}
        for work in works:
            task = Device.parse(work.device).task_of()
            assert task is not None
            by_task.setdefault(task, []).append(work)
        step = f"{session}/{next(self._steps)}/{secrets.token_hex(4)}"
        found: dict[str, Any] = dict(feeds)
        for fetched in self._hand_out(step, by_task, Awaited(is_wanted, of.options.timeout_s)).values():
            found.update(fetched)
        return [found[name] for name in fetches]

    def _decide(self, of: _Session, fetches: Sequence[str], feeds: Mapping[str, Any]) -> list[Part]:
        order = prune(of.defs, fetches, list(feeds))
        default = Task(self._neighbours.task.job, 0)
        cluster = self._neighbours.cluster
        gpus = {task: len(offer.gpus) for task, offer in self._offers.items()}
        strict = [task for task, offer in self._offers.items() if not (offer.is_soft and of.options.is_soft)]
        placed, said = place(of.defs, order, default, cluster, gpus, strict)
        self._check_serve(of, placed)
        for line in said:
            if line not in of.said:
                of.said.add(line)
                self._say(line)
        if self._is_logged(of.options):
            for name in order:
                if name not in of.logged:
                    of.logged.add(name)
                    line = lines.placed_line(name, of.defs[name].kind, placed[name], self._neighbours.log_style)
                    self._say(f"{line}{self._mark(placed[name])}")
        return cut(of.defs, order, placed, fetches)

    def _check_serve(self, of: _Session, placed: Mapping[str, Device]) -> None:
        for name, device in placed.items():
            task = device.task_of()
            assert task is not None
            try:
                self._neighbours.check_serves(task)
            except UsageError as error:
                raise UsageError(f"Node {name!r} is placed on '{of.defs[name].device}': {error}") from None

    def _mark(self, device: Device) -> str:
        """What a device's name is marked with: it may be virtual."""
        task = device.task_of()
        return mark(device, self._offers[task].gpus) if task in self._offers else ""

    def _hand_out(self, step: str, by_task: Mapping[Task, list[Work]], awaited: Awaited) -> dict[Task, dict[str, Any]]:
        """2 and 3."""
        own = self._neighbours.task

        def running(task: Task, works: list[Work]) -> Callable[[], dict[str, Any]]:
            if task == own:
                return lambda: self._parts.run(step, works)
            described = [msgspec.structs.asdict(work) for work in works]
            return lambda: dict(self._neighbours.remote(task).call("run_parts", (step, described), what=_named(works)))

        def give_up(error: BaseException) -> None:
            for task in by_task:
                if task == own:
                    self._parts.abort(step, text_of(error))
                else:
                    threading.Thread(target=self._abort_at, args=(task, step, text_of(error)), daemon=True).start()

        return together({task: running(task, works) for task, works in by_task.items()}, give_up, awaited)

    def _abort_at(self, task: Task, step: str, reason: str) -> None:
        """As far as it can be told: a task that is gone waits for nothing."""
        try:
            self._neighbours.remote(task).call("abort", (step, reason), wait_s=0.0)
        except PacelineError:
            return


def _named(works: Sequence[Work]) -> str:
    """What an error calls a task's part of a step: its first nodes."""
    names = [repr(name) for work in works for name, _, _ in work.nodes]
    return f"node{'s' * (len(names) > 1)} {listed(names, MAX_NAMED)}"


def _work(part: Part, nodes: Mapping[str, NodeDef], feeds: Mapping[str, Any]) -> Work:
    return Work(
        device=str(part.device),
        nodes=[(name, nodes[name].op, nodes[name].args) for name in part.nodes],
        needs=part.needs,
        feeds={name: feeds[name] for name in part.feeds},
        sends={key: [str(device) for device in devices] for key, devices in part.sends.items()},
        fetches=part.fetches,
    )
