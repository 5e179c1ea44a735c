"""HOW are tasks started on many hosts? Each has an agent that does as this side says; a host that is lost is replaced.

Called by launchers/crew in place of launchers/here; launchers/restart decides, as on one host. What runs there is
hosts/agent. Must never block the launcher on a host that hangs, nor leave an agent behind.

A host whose ssh ends, or that says nothing for a while, is lost for this run. Its tasks end as lost, and whoever is
started again is so on a host that has a slot left: with what it has told, a chief with the newest checkpoint. A ps that
moves is told to everybody by cluster/moved.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.checkpoint import read
from paceline.checkpoint.retain import retain
from paceline.cluster import moved
from paceline.cluster.hosts import Host, joined
from paceline.cluster.settings import Settings
from paceline.cluster.spec import Task
from paceline.cluster.spelling import listed
from paceline.errors import CheckpointError, ClusterError
from paceline.launchers.children import Children
from paceline.launchers.crew import Run
from paceline.launchers.here import Start
from paceline.launchers.hosts import frames as f
from paceline.launchers.hosts.far_host import FarHost, FarProcess
from paceline.launchers.hosts.frames import Hello, Ready
from paceline.launchers.hosts.ssh import at_once
from paceline.launchers.mirror import name_of, told_by, whole
from paceline.launchers.pieces import Piece, keep, sweep
from paceline.launchers.restart import LOST
from paceline.telemetry.ledgers import note_cut
from paceline.telemetry.losses import Loss
from paceline.telemetry.output import complain
from paceline.telemetry.sink import append

READY_S = 12.0  # it imports no torch before, and the host has just answered the same python
CLEARING_S = 30.0  # where it may first have to remove what a launcher that died has left
BEAT_S = 1.0
NAMED = 5  # files, of many
LOST_LEASES, LEAST_LOST_S = 3, 10.0
STUCK_S = 60.0  # at the end: how long a host may live without sending anything of the run folder


def lost_s(settings: Settings) -> float:
    """How long a host may be silent: longer than a task, which comes back by itself when a link is mended.

    >>> lost_s(Settings(run_id=""))
    15.0
    """
    return max(LEAST_LOST_S, LOST_LEASES * settings.lease_s)


def ready_s(hellos: Iterable[Hello]) -> float:
    """How long agents may take until they are ready."""
    return CLEARING_S if any(hello.is_going_on for hello in hellos) else READY_S


def left_words(names: list[str]) -> str:
    """What of a run folder could not be sent.

    >>> left_words(["latest.pt"])
    'hidden files and links are not sent, nor what cannot be read (latest.pt)'
    """
    return f"hidden files and links are not sent, nor what cannot be read ({listed(names, NAMED)})"


class Far:
    """The tasks of a run on many hosts; `addresses`: where each host is reached by the others."""

    def __init__(self, run: Run, placed: Mapping[Task, Host], addresses: Mapping[str, str]) -> None:
        self.children = Children()
        self._run = run
        self._placed = {task: host.name for task, host in placed.items()}
        self._addresses = addresses
        self._hosts: dict[str, FarHost] = {}
        self._begun: set[Task] = set()  # whoever was started before, where it is now
        self._at: dict[Task, str] = {}  # addresses of ps that moved
        self._told: set[str] = set()  # hosts whose loss was told with a task's
        self._keeping = threading.Lock()
        self._is_over = threading.Event()

    def open(self, hosts: list[Host], hellos: Mapping[str, Hello]) -> dict[str, Ready]:
        """Start all agents at once, and wait for them; ClusterError, with nothing left running, when some fail."""
        deadline_s = time.monotonic() + ready_s(hellos.values())
        try:
            for host in hosts:
                far = self._hosts[host.name] = FarHost(host, self._keep, self._tell_lost)
                far.say(hellos[host.name])
            answers = {name: far.wait_until_ready(deadline_s) for name, far in self._hosts.items()}
            ready = {name: answer for name, answer in answers.items() if answer is not None}
            if len(ready) < len(answers):
                raise ClusterError(" ".join(far.why for far in self._hosts.values() if far.ready is None))
        except BaseException:
            self._close_all()
            raise
        threading.Thread(target=self._watch, daemon=True, name="hosts").start()
        return ready

    def refusal(self, task: Task) -> str:
        return "" if self._host_for(task) is not None else "no other host has room for it"

    def start(self, start: Start) -> None:
        task, far = start.task, self._host_for(start.task)
        if far is None:  # the last one went away a moment ago
            process = FarProcess(task, self._hosts[self._placed[task]])
            process.end(LOST)
            self.children.add(task, process)
            return
        if far.host.name != self._placed[task]:
            self._move(task, far)
        resume = self._bring_checkpoints(far) if task == self._run.cluster.chief else ""
        made = start.assignment
        self._begun.add(task)
        order = f.Start(task, made.cluster.as_dict(), made.incarnation, self._at.get(task), resume)
        self.children.add(task, far.start(order))

    def has_memory(self, task: Task) -> bool:
        is_kept = task.job == "ps" and self._run.settings.max_restarts > 0
        return is_kept and task in self._begun and not self._hosts[self._placed[task]].is_lost

    def forget(self, task: Task) -> None:
        self._begun.discard(task)
        self._hosts[self._placed[task]].say(f.Forget(task))

    def losses(self) -> list[Loss]:
        """Where a file or model is not here, too, its host is named."""
        found = []
        for far in self._hosts.values():
            while far.losses:
                loss = far.losses.popleft()
                file = loss.file if far.is_shared else f"{far.host.name}:{loss.file}"
                is_here = not loss.model or Path(loss.model).is_dir()
                model = loss.model if is_here else f"{far.host.name}:{loss.model}"
                found.append(msgspec.structs.replace(loss, file=file, model=model))
        return found

    def close(self) -> bool:
        """All processes have ended: what the hosts have yet to send comes, and then their agents go."""
        for far in self._hosts.values():
            far.say(f.End())
        try:
            for far in self._hosts.values():
                began_s = time.monotonic()
                while not far.wait_until_over(BEAT_S):  # a silent one is lost, and then over, too
                    if time.monotonic() - max(began_s, far.news_s) > STUCK_S:
                        break
        except KeyboardInterrupt:
            complain("Interrupted: what the hosts have not sent yet stays there.")
            self._told.update(self._hosts)
        self._close_all()
        sweep(self._run.paths.root)
        cut = [far for far in self._hosts.values() if not far.has_said_over and not far.is_shared]
        for far in cut:
            self._tell_cut(far)
        for far in self._hosts.values():
            if far.left and far.ready is not None:
                complain(f"{far.host.name} keeps {far.ready.run_dir}: {left_words(far.left)}.")
        return not cut

    def _close_all(self) -> None:
        self._is_over.set()
        at_once(FarHost.close, list(self._hosts.values()))

    def _watch(self) -> None:
        """Let all agents know that somebody is there, and see who is not."""
        limit_s = lost_s(self._run.settings)
        while not self._is_over.wait(BEAT_S):
            for name, far in [(name, far) for name, far in self._hosts.items() if not far.is_lost]:
                far.say(f.Beat())
                silent_s = time.monotonic() - far.heard_s
                if silent_s > limit_s:
                    far.lose(f"{name} is lost: no word from it for {silent_s:.0f} s.")

    def _host_for(self, task: Task) -> FarHost | None:
        """Where it is started now: where it was, else the host with most room for it; None: there is none."""
        own = self._hosts[self._placed[task]]
        if not own.is_lost:
            return own
        rooms = {name: self._room(far, task) for name, far in self._hosts.items() if not far.is_lost}
        best = max(rooms, key=lambda name: rooms[name], default="")
        return self._hosts[best] if best and rooms[best] > 0 else None

    def _room(self, far: FarHost, task: Task) -> int:
        """How many more tasks like this one a host takes; any number of ps, the fewer it has the better."""
        is_ps = task.job == "ps"
        if not far.host.has("ps" if is_ps else "worker"):
            return 0
        if is_ps and (far.ready is None or not far.ready.spare_ports):  # the file of hosts gives it few
            return 0
        there = [each for each, name in self._placed.items() if name == far.host.name and (each.job == "ps") == is_ps]
        busy = [each for each in there if each not in self.children.codes]  # who has ended leaves room
        return (len(self._placed) + 1 if is_ps else far.host.slots) - len(busy)

    def _move(self, task: Task, far: FarHost) -> None:
        """To another host: what it has told so far goes there, so that it goes on behind that."""
        assert far.ready is not None
        paths, lost = self._run.paths, self._placed[task]
        self._placed[task] = far.host.name
        self._begun.discard(task)
        text = f"{lost} is lost; it starts on {far.host.name}"
        if task.job == "ps":
            self._at[task] = address = joined(self._addresses[far.host.name], far.ready.spare_ports.pop())
            moved.write(paths.root, {task: address})
            for each in self._hosts.values():
                each.say(f.Moved({str(task): address}))
            text += f", at {address}, and is restored from the newest checkpoint: what came after that is lost"
        append(paths.telemetry(task), "warning", task=str(task), text=text)
        far.put(told_by(paths, task))

    def _bring_checkpoints(self, far: FarHost) -> str:
        """The newest one to the chief's host, if it lacks it; and what `--resume PATH` names, whose name there comes
        back."""
        assert far.ready is not None
        if far.ready.is_shared:
            return ""
        newest = read.newest_whole(self._run.paths.checkpoints)
        if newest is not None:
            self._bring(far, newest.path.absolute())
        resume = self._run.settings.resume
        if resume in ("auto", "none"):
            return ""
        found = read.named(Path(resume))
        return self._bring(far, found) if found is not None else ""

    def _bring(self, far: FarHost, checkpoint: Path) -> str:
        """A checkpoint to a host that may lack it; its name there."""
        found, name = read.examine(checkpoint), name_of(checkpoint)
        if found.manifest is not None and found.manifest.sha256 not in far.has:
            far.has.add(found.manifest.sha256)
            far.put(whole(checkpoint, name))
        return name

    def _keep(self, far: FarHost, piece: Piece) -> None:
        """What a host sends lies in the run folder here; a checkpoint is brought to the chief, if another wrote it."""
        with self._keeping:
            try:
                made = keep(self._run.paths.root, piece, far.host.name)
            except OSError as error:
                self._tell_short(far, piece, error)
                return
            if made is None:
                return
            manifest = read.examine(made).manifest
            far.has.update([manifest.sha256] if manifest is not None else [])
            try:
                retain(made.parent, self._run.settings.keep)
            except CheckpointError as error:
                complain(str(error))
        chief = self._hosts[self._placed[self._run.cluster.chief]]
        if chief is not far and chief.ready is not None and not chief.ready.is_shared:
            self._bring(chief, made)

    def _tell_short(self, far: FarHost, piece: Piece, error: OSError) -> None:
        """What costs no more than a file must not cost the run, nor a host: it keeps its folder."""
        if not far.is_short:
            far.is_short = True
            self._told.add(far.host.name)
            why = f"a piece of {piece.path} from {far.host.name} could not be kept here: {error.strerror or error}"
            complain(f"{why}; the run goes on, and {far.host.name} keeps its folder.")

    def _tell_cut(self, far: FarHost) -> None:
        """What it wrote last has not come; one that was lost with a task has been told of already."""
        name = far.host.name
        if name not in self._told:
            complain(f"{far.why or f'{name} does not end.'} What it has not sent yet stays there.")
        self._note_cut([task for task, where in self._placed.items() if where == name])

    def _tell_lost(self, far: FarHost) -> None:
        """Once, in the telemetry of a task that is lost with it: the view shows it. What it wrote last never came."""
        tasks = far.tasks
        for task in tasks[:1]:
            self._told.add(far.host.name)
            append(self._run.paths.telemetry(task), "warning", task=str(task), text=far.why)
        if far.ready is not None and not far.is_shared:
            self._note_cut(tasks)

    def _note_cut(self, tasks: Sequence[Task]) -> None:
        """What was written down last of these never came; of one that had just begun, nothing did."""
        for task in tasks if self._run.settings.ledger else []:
            with suppress(OSError):  # a full disk must not keep the run from its end
                note_cut(self._run.paths.ledger(task))
