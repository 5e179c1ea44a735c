"""WHAT does a ps tell while it serves? A record a second, and in words: whom it waits for, what changed, what worries.

Called by launchers/serving four times a second, from the thread that serves nobody. Decides nothing about training;
what is told in words is printed, and an event in the telemetry file too, which the launcher's view reads.
"""

import time
from collections.abc import Callable

from paceline.cluster.discovery import Assignment
from paceline.cluster.membership import Phase
from paceline.errors import WaitTimeout
from paceline.server.core import Core
from paceline.telemetry import lines, staleness
from paceline.telemetry.meter import Meter
from paceline.telemetry.sink import Sink

SAY_EVERY_S = 10.0


class PsTicks:
    """One ps's clock work. What is one for the whole run (modes, pauses, warnings) is told by ps:0 alone.

    `is_supervised`: who started this ps sees how the workers fare, and ends it. Then a worker need not join where
    others serve ops: it may be their client. `meter`: None where the ps shares its process with other tasks.
    """

    def __init__(
        self,
        assignment: Assignment,
        sink: Sink,
        say: Callable[[str], None],
        is_supervised: bool = False,
        meter: Meter | None = None,
    ) -> None:
        self._settings = assignment.settings
        self._is_supervised = is_supervised
        self._task = str(assignment.task)
        self._is_first = assignment.task.index == 0
        self._devices = [t.device for t in assignment.cluster.workers]
        self._sink = sink
        self._say = say
        self._began = time.monotonic()
        self._said_s = -SAY_EVERY_S
        self._recorded_s = 0.0
        self._version = 0
        self._mode = str(assignment.settings.mode_spec)
        self._told_changes = 0
        self._lacks_since_s: float | None = None
        self._has_worried = False
        self._names = [str(t) for t in assignment.cluster.workers]
        self._gone: set[int] = set()
        self._meter = meter

    def tick(self, core: Core) -> None:
        """Tell what is due; WaitTimeout when workers did not come, or were too few for too long."""
        now_s = time.monotonic() - self._began
        self._wait_for_missing(core, now_s)
        if self._is_first:
            self.tell_changes(core)
            self._tell_gone(core)
            self._wait_for_enough(core, now_s)
        if now_s - self._recorded_s >= 1.0:
            if self._meter is not None:
                self._meter.look()
            self._record(core, now_s)

    def _wait_for_missing(self, core: Core, now_s: float) -> None:
        missing = core.control.members.missing
        if not missing:
            return
        if now_s > self._settings.wait_s:
            if self._is_supervised and _may_be_clients(core):
                return
            names = ", ".join(self._devices[w] for w in missing)
            raise WaitTimeout(f"gave up after {now_s:.0f} s: {names} did not join")
        if now_s - self._said_s >= SAY_EVERY_S:
            self._said_s = now_s - now_s % SAY_EVERY_S
            for worker in missing:
                self._say(lines.waiting_line(self._devices[worker], now_s, style=self._settings.log_style))

    def _wait_for_enough(self, core: Core, now_s: float) -> None:
        """--min-workers: said once when training pauses, and once when it goes on."""
        with core.lock:
            lacks, live = core.control.lacks(), len(core.control.members.live)
        since_s = self._lacks_since_s
        if lacks and since_s is None:
            self._lacks_since_s = now_s
            self._tell("warning", lines.paused_line(lacks, self._settings.min_workers))
        elif lacks and since_s is not None and now_s - since_s > self._settings.wait_s:
            needed = lines.paused_line(lacks, self._settings.min_workers).removeprefix("Paused: ")
            raise WaitTimeout(f"gave up after {now_s - since_s:.0f} s: {needed}")
        elif not lacks and since_s is not None:
            self._lacks_since_s = None
            self._tell("warning", lines.going_on_line(live, now_s - since_s))

    def _tell_gone(self, core: Core) -> None:
        """Who went away without a word, and who is back."""
        with core.lock:
            gone, live = set(core.control.members.gone), len(core.control.members.live)
        for worker in sorted(gone - self._gone):
            self._say(f"{self._names[worker]} is gone: its connection ended, or it was silent; {live} live")
            self._sink.event("gone", task=self._task, worker=self._names[worker])
        for worker in sorted(self._gone - gone):
            self._say(f"{self._names[worker]} is back; {live} live")
        self._gone = gone

    def tell_changes(self, core: Core) -> None:
        """The changes of mode since the last call; called once more at the end."""
        for change in core.control.mode_changes[self._told_changes :]:
            text = lines.switched_line(self._mode, change.mode, change.at_step, change.pause_ms)
            self._tell("mode", text, at_step=change.at_step, mode=change.mode, pause_ms=change.pause_ms)
            self._mode = change.mode
            self._told_changes += 1

    def _record(self, core: Core, now_s: float) -> None:
        with core.lock:
            version, mode, lacks = core.control.state.version, core.control.state.mode.spec, core.control.lacks()
            histograms = {worker: dict(counts) for worker, counts in sorted(core.control.state.staleness.items())}
            waited_s = dict(sorted(core.control.state.waited_s.items()))
            live = len(core.control.members.live)
            shard = core.shard
        all_pushes = staleness.together(histograms.values())
        mean = staleness.spread(all_pushes)["mean"]
        self._sink.tick(
            task=self._task,
            version=version,
            global_step=version,
            updates_per_s=round((version - self._version) / (now_s - self._recorded_s), 2),
            workers=live,
            mode=str(mode),
            lacks=lacks,
            staleness_mean=None if mean is None else round(mean, 3),
            staleness={str(worker): staleness.small(counts) for worker, counts in histograms.items()},
            waited_s={str(worker): round(seconds, 3) for worker, seconds in waited_s.items()},
            **(self._meter.told() if self._meter is not None else {}),
        )
        self._version, self._recorded_s = version, now_s
        if self._is_first and shard is not None and not self._has_worried:
            worry = staleness.worry(mode, shard.optimizer_name, shard.options, all_pushes)
            if worry is not None:
                self._has_worried = True
                self._tell("warning", worry)

    def _tell(self, kind: str, text: str, **fields: object) -> None:
        self._say(text)
        self._sink.event(kind, task=self._task, text=text, **fields)


def _may_be_clients(core: Core) -> bool:
    """Nobody trains, and somebody has said that it only serves ops."""
    return core.shard is None and any(member.phase is Phase.CLOSED for member in core.control.members)
