"""HOW is a ps run? Its service, its printed lines, its telemetry and its end, put together.

Called by launchers/task and launchers/threads. Decides nothing about training.
"""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from paceline import hangup
from paceline.cluster import moved
from paceline.cluster.discovery import Assignment, may_look
from paceline.cluster.listening import listen
from paceline.cluster.pinning import parse
from paceline.errors import ProtocolError, Refused
from paceline.launchers import chaos, descriptors, keeper
from paceline.launchers.notice import RELEASE, save_soon
from paceline.launchers.successor import Successor
from paceline.launchers.ticks import PsTicks
from paceline.modes import make as make_mode
from paceline.server.control.config import PsConfig
from paceline.server.core import Core
from paceline.server.ledger_writer import PsLedger
from paceline.server.memory import Memory
from paceline.server.service import Service
from paceline.telemetry import ledgers, lines, losses, read, summary
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.meter import Meter
from paceline.telemetry.paths import RunPaths
from paceline.telemetry.sink import Sink

HANGUP_S = 15.0  # how long a ps whose terminal was closed serves workers that save
REJOIN_S = 15.0  # how long a ps that nobody supervises waits for a worker that went away without a word


def make_service(
    assignment: Assignment,
    on_report: Callable[[str, bytes], None],
    memory: Memory | None = None,
    owns_process: bool = False,
) -> Service:
    """The service of one ps, not listening yet."""
    cluster, settings = assignment.cluster, assignment.settings
    config = PsConfig(
        index=assignment.task.index,
        num_ps=len(cluster.ps),
        num_workers=len(cluster.workers),
        run_id=settings.run_id,
        mode=make_mode(settings.mode_spec, len(cluster.workers)),
        placement=settings.placement,
        lease_s=settings.lease_s,
        expected=settings.started_workers,
        min_workers=settings.min_workers,
        ema=settings.ema,
        wire=settings.wire,
        master=settings.master,
        save_every=settings.save_every,
        stall_s=settings.stall_s,
        # A launcher says who will not come back; by hand nobody does.
        rejoin_s=settings.wait_s if assignment.source == "launcher" else REJOIN_S,
        may_look=may_look(),
        owns_process=owns_process,
        cluster=cluster.as_dict(),
    )
    return Service(config, assignment.secret, on_report, memory)


class Leaving:
    """Ends a ps whose terminal was closed, perhaps with those of all tasks: have the chief save, wait HANGUP_S for the
    run to end, then stop."""

    def __init__(self, assignment: Assignment, stop: Callable[[], None]) -> None:
        self._assignment = assignment
        self._stop = stop
        self.is_over = threading.Event()  # it has ended in another way
        self.has_left = False

    def begin(self) -> None:
        """Begin, from a signal handler."""
        threading.Thread(target=self._leave, daemon=True, name="leave").start()

    def _leave(self) -> None:
        made = self._assignment
        if made.task.index == 0:
            save_soon(made.cluster, made.secret, made.settings.run_dir)
        if not self.is_over.wait(HANGUP_S):
            self.has_left = True
            self._stop()


def serve(assignment: Assignment, say: Callable[[str], None], is_main: bool) -> None:
    """Serve until the run is over; a signal ends it early."""
    settings, task = assignment.settings, assignment.task
    paths = RunPaths(settings.run_dir) if settings.run_dir else None
    sink = Sink(paths.telemetry(task) if paths else None)
    is_mine = assignment.source == "launcher"  # then the launcher sums up, else ps:0 does

    def on_report(of: str, report: bytes) -> None:
        if not is_mine:
            job, _, index = of.partition(":")  # a worker's index counts the chief first
            name = of if job == "ps" else str(assignment.cluster.workers[int(index)])
            try:
                sink.event("report", task=name, report=msgspec.json.decode(report))
            except msgspec.MsgspecError as error:
                raise ProtocolError(f"a report that is no JSON: {error}") from error

    descriptors.check(len(assignment.cluster.workers))
    service = make_service(assignment, on_report, keeper.kept_memory() if is_main else None, is_main)
    core = service.core
    _recover(core, assignment, paths, say)
    faults = chaos.of_ps(assignment)
    if faults is not None:
        core.on_update = faults.at_version
    service.on_refusal = lambda reason: say(f"Refused: {reason}")
    core.on_eviction = lambda reason: say(f"Evicted: {reason}")
    successor = _listen(service, assignment, say)
    if is_main:
        signal.signal(signal.SIGTERM, lambda *_: service.stop())
    if is_main and is_mine:
        service.is_released = not settings.max_restarts
        signal.signal(RELEASE, lambda *_: service.release())  # without a handler it would be the end
    if paths is not None and not is_mine and task.index == 0:
        paths.summary.unlink(missing_ok=True)  # of an earlier run in this folder
    sink.event("start", task=str(task), incarnation=assignment.incarnation)
    meter = meter_of(assignment) if is_main else None
    ticks = PsTicks(assignment, sink, say, is_supervised=is_main and is_mine, meter=meter)
    spent_s = 0.0

    def tick(core: Core) -> None:
        nonlocal spent_s
        began_s = time.thread_time()
        ticks.tick(core)
        spent_s += time.thread_time() - began_s

    leaving = Leaving(assignment, service.stop)
    began = time.monotonic()
    try:
        with hangup.handled(leaving.begin):
            tick(service.core)  # the waiting lines at once
            service.run(tick)
    finally:
        leaving.is_over.set()
        has_successor = successor is not None and successor.ends()
        if task.index == 0:
            ticks.tell_changes(core)
        use = meter.use(spent_s + sink.cpu_s) if meter is not None else None
        report = msgspec.structs.replace(core.report(), use=use)
        if not has_successor:
            sink.event("report", task=str(task), report=msgspec.to_builtins(report))
        sink.close()
        if core.ledger is not None:
            core.ledger.close()
        if paths is not None and not is_mine and task.index == 0 and not has_successor:
            _sum_up(core, assignment, paths, time.monotonic() - began)
    if successor is not None and has_successor:
        raise Refused(f"{task} was started again at {successor.address}: this one ends, and what it holds is void")
    if leaving.has_left:
        raise KeyboardInterrupt
    say(f"ps:{task.index} served {core.control.state.version} updates")


def _recover(core: Core, assignment: Assignment, paths: RunPaths | None, say: Callable[[str], None]) -> None:
    """What this ps, killed and started again, still holds; and its ledger, where one is asked for."""
    task = assignment.task
    if assignment.at is not None and paths is not None and core.ledger_position() is None:  # its own else
        ledgers.set_predecessor_aside(paths.root, task)
    if assignment.settings.ledger and paths is not None:
        try:
            core.ledger = PsLedger(Ledger(paths.ledger(task), core.ledger_position()))
        except OSError as error:  # a full disk must not cost what is held in memory
            say(f"{task} writes no ledger, so nobody can verify this run: {error}")
    is_back = core.recover()
    if is_back:
        say(f"ps:{task.index} is back, with all that it knew: {core.control.state.version} updates")
    if core.ledger is not None:
        core.ledger.started(core.control.state, is_back)


def _sum_up(core: Core, assignment: Assignment, paths: RunPaths, wall_s: float) -> None:
    """Where no launcher does: summary.json, by ps:0."""
    lost = [str(assignment.cluster.workers[w]) for w in core.control.members.gone]
    told = summary.build(
        assignment.settings,
        assignment.cluster,
        read.reports(paths.root),
        ok=not lost,
        wall_s=wall_s,
        restarts=0,
        lost=lost,
        error=None,
    )
    try:
        summary.write(paths.root, told)
    except OSError as error:
        losses.tell(paths.summary, error, "there is no summary of this run; what was trained is not touched by that")


def meter_of(assignment: Assignment) -> Meter:
    """From now on; cards only where this ps was given one."""
    devices = parse(assignment.settings.ps_device, "ps")
    meter = Meter(str(assignment.task), is_on_card=any(device.kind == "GPU" for device in devices))
    meter.look()
    return meter


def _listen(service: Service, assignment: Assignment, say: Callable[[str], None]) -> Successor | None:
    """Open its doors, say so to whoever looks for a ps that has moved, and look whether it moves on."""
    if assignment.settings.insecure and assignment.source != "launcher":  # which has said so itself
        say(lines.INSECURE_LINE)
    task, run_dir = assignment.task, assignment.settings.run_dir
    address = listen(assignment, service.listen, assignment.settings.lane, say)
    say(lines.started_line(address, assignment.settings.log_style))
    if run_dir is None:
        return None
    if assignment.at is not None:
        moved.write(run_dir, {task: address})
        RunPaths(run_dir).summary.unlink(missing_ok=True)  # a ps that lost sight of everybody may have summed up
    successor = Successor(Path(run_dir), task, address, service.stop)
    successor.begin()
    return successor
