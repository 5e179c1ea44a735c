"""HOW does a task run its parts of a step? One thread a device, each with its own ready queue; values meet in an inbox.

Used by ingraph/server, where the master calls it, and by a session without a server. The way of a step at one task:

1. the master calls `run_parts` with what each device here shall do; values from other tasks may have come before,
2. a device runs what is ready, sends on what others need, and waits when nothing is ready,
3. the fetched values are the answer. If anything fails, here or anywhere, the step is aborted and nobody waits on.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from paceline.cluster.devices import Device
from paceline.errors import ProtocolError, StepAborted, UsageError
from paceline.ingraph import kernels, scope, values
from paceline.ingraph.hardware import run_on
from paceline.ingraph.neighbours import Neighbours, serving, still_wanted
from paceline.ingraph.op import Op, find, is_internal
from paceline.ingraph.partition import AFTER
from paceline.ingraph.raised import is_ours, text_of, told
from paceline.ingraph.schedule import Schedule

assert kernels.KERNELS  # whoever runs parts has the plain ops too
MAX_EARLY = 1024  # steps of which something came before the step itself; a master that died leaves one behind
MAX_EARLY_BYTES = 1 << 30  # of what came for them; the newest is kept however large it is
MAX_OVER = 4096  # steps that are over, and remembered: what comes for one of them comes too late
DROPPED = "what had come for it was dropped, because too much came for steps that never began"
LOOK_S = 1.0  # how often a device that waits looks whether anybody still wants the step


class Work(msgspec.Struct):
    """A Part and all that it takes to run it: `nodes` are (name, op, (args, kwargs)) with Refs among the arguments."""

    device: str
    nodes: list[tuple[str, str, Any]]
    needs: dict[str, list[str]]
    feeds: dict[str, Any]
    sends: dict[str, list[str]]
    fetches: list[str]


class _Step:
    """What is known here of one step: values that have come for each device, and whether it is given up."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.inbox: dict[str, dict[str, Any]] = {}
        self.reason: str | None = None
        self.is_begun = False
        self.size_bytes = 0  # of what came before it began

    def deliver(self, device: str, name: str, value: Any) -> None:
        with self.changed:
            self.inbox.setdefault(device, {})[name] = value
            self.changed.notify_all()

    def abort(self, reason: str) -> None:
        with self.changed:
            self.reason = self.reason or reason
            self.changed.notify_all()


class Parts:
    """All steps that this task takes part in."""

    def __init__(self, neighbours: Neighbours) -> None:
        self._neighbours = neighbours
        self._steps: OrderedDict[str, _Step] = OrderedDict()
        self._over: OrderedDict[str, str] = OrderedDict()  # and why, where it never began
        self._lock = threading.Lock()
        self.verbs: dict[str, Callable[..., Any]] = {
            "run_parts": self._run_parts,
            "deliver": self.deliver,
            "abort": self.abort,
        }

    def deliver(self, step: str, device: str, name: str, value: Any) -> None:
        """A value for one of our devices, from another task or another device."""
        known = self._step(step)
        if known is not None:
            known.deliver(device, name, value)
            known.size_bytes += values.size_bytes(value)
            self._drop_early(step)

    def abort(self, step: str, reason: str) -> None:
        """Nobody wants this step any more."""
        known = self._step(step)
        if known is not None:
            known.abort(reason)
            self._drop_early(step)

    def run(self, step: str, works: Sequence[Work], is_wanted: Callable[[], bool] = lambda: True) -> dict[str, Any]:
        """All parts of a step on this task; the values of their fetches come back."""
        known = self._step(step)
        if known is None:
            raise StepAborted(f"the step was given up: {self._over.get(step) or 'it is over'}")
        known.is_begun = True
        runs = [_Run(self, known, step, work, is_wanted) for work in works]
        try:
            threads = [threading.Thread(target=run.go, name=f"part {run.work.device}", daemon=True) for run in runs[1:]]
            for thread in threads:
                thread.start()
            runs[0].go()
            for thread in threads:
                thread.join()
        finally:
            with self._lock:
                self._end(step)
        errors = [run.error for run in runs if run.error is not None]
        if errors:
            raise next((each for each in errors if not isinstance(each, StepAborted)), errors[0])
        return {name: value for run in runs for name, value in run.fetched.items()}

    def send(self, step: str, device: str, name: str, value: Any) -> None:
        """A value to a device of the cluster, which may be one of this task."""
        task = Device.parse(device).task_of()
        assert task is not None
        if task == self._neighbours.task:
            self.deliver(step, device, name, value)
        else:
            self._neighbours.remote(task).call("deliver", (step, device, name, value), wait_s=0.0)

    @property
    def neighbours(self) -> Neighbours:
        return self._neighbours

    def close(self) -> None:
        """The server ends: nobody is to wait here for ever."""
        with self._lock:
            steps = list(self._steps.values())
        for each in steps:
            each.abort(f"{self._neighbours.task.device} was stopped")

    def _run_parts(self, step: str, works: list[dict[str, Any]]) -> dict[str, Any]:
        try:
            mine = msgspec.convert(works, list[Work])
        except msgspec.ValidationError as error:
            raise ProtocolError(f"parts of a step that do not parse: {error}") from error
        return self.run(step, mine, is_wanted=still_wanted())

    def _step(self, name: str) -> _Step | None:
        """Known from the first word about it, which need not come from the master; None: it is over."""
        with self._lock:
            if name in self._over:
                return None
            return self._steps.setdefault(name, _Step())

    def _drop_early(self, newest: str) -> None:
        """The oldest of the steps that have not begun, as long as too many of them are kept, or too much for them."""
        with self._lock:
            if newest not in self._steps or self._steps[newest].is_begun:
                return
            early = [(name, step.size_bytes) for name, step in self._steps.items() if not step.is_begun]
            count, kept_bytes = len(early), sum(size for _, size in early)
            for name, size_bytes in early:
                if (count <= MAX_EARLY and kept_bytes <= MAX_EARLY_BYTES) or name == newest:
                    break
                self._end(name, DROPPED)
                count, kept_bytes = count - 1, kept_bytes - size_bytes

    def _end(self, name: str, why: str = "") -> None:
        """From now on what is said about this step is not kept. Wants the lock."""
        self._steps.pop(name, None)
        self._over[name] = why
        while len(self._over) > MAX_OVER:
            self._over.popitem(last=False)


class _Run:
    """One device's part of a step, in one thread."""

    def __init__(self, parts: Parts, step: _Step, name: str, work: Work, is_wanted: Callable[[], bool]) -> None:
        self.work = work
        self.error: BaseException | None = None
        self.fetched: dict[str, Any] = {}
        self._parts = parts
        self._step = step
        self._name = name
        self._is_wanted = is_wanted
        self._values: dict[str, Any] = dict(work.feeds)

    def go(self) -> None:
        """2. Until every node here has run; what goes wrong is kept, and ends the other devices of this task too."""
        try:
            with serving(self._parts.neighbours):
                self._go()
            self.fetched = {name: self._values[name] for name in self.work.fetches}
        except BaseException as error:
            self.error = error
            self._step.abort(text_of(error))

    def _go(self) -> None:
        ops = {name: (find(op), args) for name, op, args in self.work.nodes}
        schedule = Schedule(self.work.needs)
        while not schedule.is_over:
            self._take_in(schedule)
            name = schedule.next()
            if name is None:
                self._wait(schedule)
                continue
            self._values[name] = self._run(name, *ops[name])
            schedule.done(name)
            for key in (name, AFTER + name):
                for device in self.work.sends.get(key, ()):
                    self._parts.send(self._name, device, key, self._values[name] if key == name else None)

    def _take_in(self, schedule: Schedule) -> None:
        """What has come for this device since."""
        with self._step.changed:
            if self._step.reason is not None:
                raise StepAborted(f"the step was given up: {self._step.reason}")
            came = self._step.inbox.pop(self.work.device, {})
        for name, value in came.items():
            self._values[name] = value
            schedule.done(name)

    def _wait(self, schedule: Schedule) -> None:
        with self._step.changed:
            if self._step.reason is None and not self._step.inbox.get(self.work.device):
                self._step.changed.wait(LOOK_S)
        if not self._is_wanted():
            raise StepAborted(f"the master went away while {', '.join(schedule.awaited)} was waited for")

    def _run(self, name: str, op: Op[..., Any], arguments: Any) -> Any:
        args, kwargs = values.mapped(list(arguments), self._resolved)
        try:
            with scope.fresh():
                return run_on(Device.parse(self.work.device), op.fn, args, kwargs)
        except BaseException as error:  # an op may call sys.exit, and somebody waits for it
            if is_ours(error) or isinstance(error, KeyboardInterrupt):
                raise
            what = f"Node {name!r}" if is_internal(op.name) else f"Node {name!r} ({op.name})"
            raise told(what, self._parts.neighbours.task.device, error) from error

    def _resolved(self, leaf: Any) -> Any:
        if not isinstance(leaf, values.Ref):
            return leaf
        if leaf.node not in self._values:
            raise UsageError(f"The value of {leaf.node!r} was never made; the graph that came is not whole.")
        return self._values[leaf.node]
