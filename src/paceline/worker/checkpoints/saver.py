"""Write checkpoints beside the training: a thread of one worker fetches copies from the ps and writes them.

Started by worker/session when ps:0 says that this worker writes; called in the foreground at the end and by ctx.save.
It has connections of its own, so that the thread that trains never waits for it. A checkpoint that cannot be written is
reported and left out: training goes on, and the one before it stays.

1. ask ps:0 until the announced update is made and every worker has said where it is after it,
2. ask the other shards until they have copied the same round (elsewhere: let each copy itself now),
3. fetch, write, remove what need not be kept, and free the copies. Discard a checkpoint that was copied before a
   rewind: it would be the newest when the run goes back again.
"""

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.checkpoint.read import newest_whole
from paceline.checkpoint.retain import retain
from paceline.checkpoint.room import elsewhere, give_way, holds
from paceline.checkpoint.store import is_full
from paceline.errors import CheckpointError, ClusterError, PacelineError
from paceline.params.layout import Layout
from paceline.params.placement import Plan
from paceline.telemetry import losses
from paceline.wire import messages as m
from paceline.worker.checkpoints.connection import Connection, CopyGone
from paceline.worker.checkpoints.saving import Content, fetched
from paceline.worker.requests.deadline import SAY_EVERY_S, Deadline
from paceline.worker.requests.identity import Identity
from paceline.worker.requests.joining import RETRY_S, SLOWEST_RETRY_S, TRANSIENT, device

ASK_AGAIN_S = (0.01, 0.5)  # between two questions: at first, at most
POSITIONS_S = 60.0  # that workers have to say where they are at an update; then what their heartbeats said counts
NOW_POSITIONS_S = 1.0  # ctx.save() waits so long for workers that do not call it too
NOW_TRIES = 50
FINAL = "the newest model lies elsewhere:"
LOST = "no new checkpoint; those that were there are still there, and training goes on"
Event = Callable[..., None]


class Later(Exception):
    """Yield to a foreground save, which must not wait for this background one."""


class Saver:
    """Writes the checkpoints of one run folder."""

    def __init__(
        self,
        me: Identity,
        layout: Layout,
        plan: Plan,
        folder: Path,
        keep: int,
        say: Callable[[str], None],
        event: Event,
        lineage_of: Callable[[int], int] = lambda index: 0,  # the one in which this worker trains with that ps
        has_means: bool = True,  # of the workers' running statistics, in model.safetensors
        in_use: Path | None = None,  # what this run was resumed from
    ) -> None:
        self._me = me
        self._layout = layout
        self._plan = plan
        self._folder = folder
        self._keep = keep
        self._say = say
        self._event = event
        self._busy = threading.Lock()
        self._writing = threading.Lock()  # held from before its folder appears
        self._work: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_ended = threading.Event()
        self._calm = threading.Event()  # set while no foreground save runs
        self._calm.set()
        self.incarnation = me.incarnation
        self._lineage_of = lineage_of
        self.carried = b""  # what ps:0 is to have of the chief first, where the chief has not told it
        self._has_means = has_means
        self._in_use = in_use
        self.saved_at = -1
        self._saved_s = float("-inf")
        self._has_made_room = False

    # --- beside the training ----------------------------------------------------------------------------------

    def wake(self, version: int) -> None:
        """Save the update that ps:0 has announced."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="saver", daemon=True)
            self._thread.start()
        self._work.put(version)

    def close(self, limit_s: float) -> None:
        """Wait at most `limit_s` for a checkpoint that is being written."""
        self._is_ended.set()
        self._work.put(None)
        if self._thread is not None:
            self._thread.join(limit_s)

    def _run(self) -> None:
        while (version := self._work.get()) is not None:
            self._calm.wait()
            try:
                with self._busy:
                    self._save_announced()
            except Later:
                self._work.put(version)
            except (PacelineError, OSError) as error:
                if not self._is_ended.is_set():
                    self._tell_failure(error)

    def _save_announced(self) -> None:
        """Do steps 1, 2 and 3, unless this update was announced more than once and is saved by now."""
        connections = [Connection(self._me, 0)]
        try:
            first = self._await_copy(connections[0])
            if first is None:
                return
            connections += [Connection(self._me, index) for index in range(1, self._plan.num_ps)]
            copies = [first, *(self._await_same(each, first) for each in connections[1:])]
            self._write(connections, copies)
        finally:
            self._let_go(connections)

    def _await_copy(self, connection: Connection) -> m.Copied | None:
        deadline = time.monotonic() + self._me.wait_s
        pause_s = ASK_AGAIN_S[0]
        while True:
            copy = connection.copied(self._request())
            if not copy.is_wanted or self._is_ended.is_set():
                return None
            is_late = copy.is_taken and time.monotonic() > deadline - self._me.wait_s + POSITIONS_S
            if copy.is_taken and (not copy.awaited or is_late):
                return copy
            self._wait(pause_s)
            pause_s = min(2 * pause_s, ASK_AGAIN_S[1])

    def _await_same(self, connection: Connection, first: m.Copied) -> m.Copied:
        if not first.has_rounds:
            return connection.copied(self._request(is_now=True))
        deadline = time.monotonic() + self._me.wait_s
        while True:
            copy = connection.copied(self._request())
            if copy.is_taken and copy.round == first.round:
                return copy
            if time.monotonic() > deadline or self._is_ended.is_set():
                raise ClusterError(f"ps:{connection.index} has not copied round {first.round}, as ps:0 has")
            self._wait(ASK_AGAIN_S[0])

    def _wait(self, pause_s: float) -> None:
        self._is_ended.wait(pause_s)
        if not self._calm.is_set():
            raise Later

    def _request(self, is_now: bool = False) -> m.Copy:
        return m.Copy(self._me.worker, self.incarnation, is_now)

    # --- now --------------------------------------------------------------------------------------------------

    def save_now(
        self, position: m.Position | None, waits_for_others: bool = False, others: Collection[Path] | None = None
    ) -> Path:
        """Write a checkpoint of this moment; `position` is this worker's, None if ps:0 knows it. A ps that is started
        again meanwhile has its memory, but not the copy: ask for another one, until the deadline. `others`: it is the
        last checkpoint, older ones give way to it, and these are places for it if the run folder is full."""
        waiting = Deadline(
            self._me.wait_s,
            [device(i) for i in range(self._plan.num_ps)],
            self._say,
            SAY_EVERY_S,
            style=self._me.log_style,
        )
        pause_s = RETRY_S
        self._calm.clear()
        try:
            with self._busy:
                while True:
                    try:
                        return self._try_now(position, waits_for_others, others)
                    except (*TRANSIENT, CopyGone) as error:
                        waiting.again(f"a ps went away while it was to be saved ({error})")
                    self._is_ended.wait(pause_s)
                    pause_s = min(SLOWEST_RETRY_S, 2 * pause_s)
        finally:
            self._calm.set()

    def _try_now(self, position: m.Position | None, waits_for_others: bool, others: Collection[Path] | None) -> Path:
        connections: list[Connection] = []
        try:
            for index in range(self._plan.num_ps):
                connections.append(Connection(self._me, index))
            copies = self._copy_now(connections, position)
            if waits_for_others:
                copies[0] = self._await_positions(connections[0], copies[0])
            return self._write(connections, copies, others)
        finally:
            self._let_go(connections)

    def _copy_now(self, connections: Sequence[Connection], position: m.Position | None) -> list[m.Copied]:
        """In rounds: all at the same one, so ps:0's open decisions are carried to the others; those who train may
        make another round meanwhile, then we try again."""
        me, incarnation = self._me.worker, self.incarnation
        rounds: list[int] = []
        for _ in range(NOW_TRIES):
            first = connections[0].copied(m.Copy(me, incarnation, is_now=True, position=position), self.carried)
            decisions = first.decisions if first.has_rounds else ()
            request = m.Copy(me, incarnation, is_now=True, decisions=decisions)
            copies = [first, *(each.copied(request) for each in connections[1:])]
            rounds = [copy.round for copy in copies]
            if not first.has_rounds or len(set(rounds)) == 1:
                return copies
        raise ClusterError(f"the shards do not stand still at one round, but at {rounds}")

    def _await_positions(self, connection: Connection, copy: m.Copied) -> m.Copied:
        """Wait a moment for the positions of the other workers: in rounds all call ctx.save at the same step."""
        deadline = time.monotonic() + NOW_POSITIONS_S
        while copy.awaited and copy.has_rounds and time.monotonic() < deadline:
            self._is_ended.wait(ASK_AGAIN_S[0])
            copy = connection.copied(m.Copy(self._me.worker, self.incarnation, is_again=True))
        return copy

    def has_just_saved(self, within_s: float, limit_s: float) -> bool:
        """Tell whether the last checkpoint is newer than `within_s`; wait `limit_s` for one that is being written."""
        if not self._writing.acquire(timeout=limit_s):
            return False
        self._writing.release()
        return time.monotonic() - self._saved_s < within_s

    # --- both -------------------------------------------------------------------------------------------------

    def _write(
        self, connections: Sequence[Connection], copies: Sequence[m.Copied], others: Collection[Path] | None = None
    ) -> Path:
        with self._writing:
            began = time.monotonic()
            num_workers = len(self._me.worker_devices)
            content = fetched(
                connections, self._layout, self._plan, copies, self._me.run_id, num_workers, self._has_means
            )
            for each, copy in zip(connections, copies, strict=True):
                if copy.lineage < self._lineage_of(each.index):
                    raise CopyGone(f"ps:{each.index} has gone back to a checkpoint since it was copied.")
            path = self._put_down(content, others)
            if path.parent == self._folder:
                losses.written(self._folder)
                if path != self._in_use:
                    self._in_use = None  # this run has a checkpoint of its own now
                with suppress(CheckpointError):  # an old checkpoint that stays does no harm
                    retain(self._folder, self._keep, [self._in_use] if self._in_use is not None else [])
            self.saved_at, self._saved_s = copies[0].round, time.monotonic()
            self._event(
                "checkpoint",
                folder=str(path),
                global_step=copies[0].round,
                pause_ms=round(max(copy.pause_ms for copy in copies), 3),
                write_s=round(time.monotonic() - began, 3),
                bytes=content.size_bytes,
            )
            return path

    def _put_down(self, content: Content, others: Collection[Path] | None) -> Path:
        """Write it into the run folder. On a full disk, remove first what it would replace; put the last checkpoint of
        a run elsewhere."""
        in_use = [self._in_use] if self._in_use is not None else []
        while True:
            try:
                return content.write(self._folder)
            except CheckpointError as error:
                is_final = others is not None
                gone = give_way(self._folder, self._keep, in_use, is_final) if is_full(error) else None
                if gone is not None:
                    self._tell_gone(gone, content.state.global_step, error, is_final)
                elif others is None:
                    raise
                else:
                    return self._put_elsewhere(content, others, error)

    def _tell_gone(self, gone: Path, step: int, error: CheckpointError, is_final: bool) -> None:
        text = f"{gone.name} gives way to the checkpoint of step {step} ({losses.reason(error)} in {self._folder})"
        self._say(f"paceline: {text}")
        if is_final or not self._has_made_room:  # on the terminal, too
            self._event("warning", text=text)
        self._has_made_room = True

    def _put_elsewhere(self, content: Content, others: Collection[Path], error: CheckpointError) -> Path:
        state = content.state
        whole = newest_whole(self._folder)
        if whole is not None and holds(whole, self._folder, state.global_step, state.lineage):
            self._say(f"paceline: {error} That step is saved already, as it was before the end.")
            return whole.path
        path = elsewhere(f"paceline-{self._folder.parent.name}", others, content.write)
        if path is None:
            raise CheckpointError(f"{error} No other place took it: {', '.join(map(str, others))}.") from error
        losses.tell(self._folder, error, f"{FINAL} {path}; go on from there with --resume {path}", model=str(path))
        self._say(f"paceline: {error} {FINAL} {path}")
        return path

    def _let_go(self, connections: Sequence[Connection]) -> None:
        for each in reversed(connections):  # ps:0 last: it announces the next one
            with suppress(PacelineError):
                each.ask(m.FreeCopy(self._me.worker, self.incarnation))
            each.close()

    def _tell_failure(self, error: Exception) -> None:
        losses.tell(self._folder, error, LOST)
        self._say(f"paceline: no checkpoint was written this time: {error} Training goes on.")
        self._event("checkpoint_failed", error=str(error))
