"""WHO are the actors of a run, and how do they fare? The driver's side: starts tasks in them, and hears of them.

Made by ray/on_ray, used by launchers/crew as the one who starts tasks. Must never wait for an actor in the thread
of its caller: each start has a thread that waits for it.

A start: 1. the actor says where it is: Ray may have started it again, also on another machine; 2. it is told what to
start; 3. until the process has ended, its news are taken in: pieces of logs, telemetry, checkpoints.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from typing import Any

import msgspec

from paceline import files
from paceline.checkpoint import read
from paceline.checkpoint.retain import retain
from paceline.cluster import moved
from paceline.cluster.spec import Task
from paceline.errors import EXIT_CLUSTER, ClusterError, PacelineError, UsageError
from paceline.launchers import mirror
from paceline.launchers.children import Children
from paceline.launchers.crew import Run
from paceline.launchers.entry import Program
from paceline.launchers.here import Start
from paceline.launchers.pieces import Piece, keep, sweep
from paceline.launchers.ray.actors import Carried, News, Order, Place, carried, torch_version
from paceline.launchers.ray.member import ANSWER_S, Member, Remote
from paceline.launchers.ray.ray_cluster import sentence, why
from paceline.telemetry.lines import ERROR
from paceline.telemetry.losses import Loss
from paceline.telemetry.output import complain
from paceline.transport.tls import CERTIFICATE, PRIVATE_KEY
from paceline.version import VERSION

NEWS_S = 1.0  # that an actor waits before it says that there are none
REACH_S = 30.0  # an actor that is out of reach for longer counts as gone
AGAIN_S = 0.2
REST_S = 20.0


class Away(msgspec.Struct, frozen=True, kw_only=True):
    """What is different in an actor."""

    program: Program  # as it is called in Ray's copy of the user's folder
    host: str = ""  # where tasks listen; "": at their machine's address
    token: str = ""  # by which an actor knows the driver's run folder


class Team:
    """The actors of one run; launchers/crew starts tasks through it."""

    def __init__(self, ray: Any, run: Run, members: Mapping[Task, Member], away: Away) -> None:
        self.children = Children()
        self._ray = ray
        self._run = run
        self._members = members
        self._away = away
        self._moves: dict[Task, str] = {}  # ps that are elsewhere than the cluster says
        self._keeping = threading.Lock()
        self._losses: deque[Loss] = deque()
        self._has_told = self._has_compared = self._is_closed = False
        for member in members.values():
            if member.is_later:
                self._expect(member)

    def start(self, start: Start) -> None:
        member = self._members[start.task]
        if member.is_later and not member.is_there:
            self._expect(member)
            return
        remote = Remote(member, self._ray)
        self.children.add(start.task, remote)
        self._in_thread(f"task-{start.task}", lambda: self._live(remote, member, start))

    def settle_all(self) -> None:
        """Before the first start: the actors that are there find their folders, with what is to be gone on from."""
        try:
            for member in self._members.values():
                if member.place is not None:
                    member.known_life = self._settle(member, ANSWER_S).life
            if self._run.settings.resume != "none":
                for member in self._members.values():
                    self._bring_checkpoint(member)
        except self._ray.exceptions.RayError as error:
            raise ClusterError(f"the Ray actors could not be made ready: {why(error, self._ray)}") from None

    def refusal(self, task: Task) -> str:
        return ""

    def has_memory(self, task: Task) -> bool:
        return self._members[task].has_memory

    def forget(self, task: Task) -> None:
        self._members[task].is_empty = True

    def losses(self) -> list[Loss]:
        return [self._losses.popleft() for _ in range(len(self._losses))]

    def close(self) -> bool:
        """What the actors still have of their files is taken in, and removed there; whether all of it came."""
        self._is_closed = True
        apart = [each for each in self._members.values() if each.place is not None and not each.is_shared]
        came = [self._take_rest(member) for member in apart]
        sweep(self._run.paths.root)
        return all(came) and not self._has_told

    def _take_rest(self, member: Member) -> bool:
        """Whether all of it came; what could not be kept here stays there."""
        try:
            while True:
                member.seen, pieces = self._ray.get(member.handle.rest.remote(member.seen), timeout=REST_S)
                if not pieces:
                    break
                self._keep(member, pieces)
        except (self._ray.exceptions.RayError, ValueError):
            return False
        if not self._has_told:
            with suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.get(member.handle.clear.remote(), timeout=ANSWER_S)
        return True

    def _in_thread(self, name: str, body: Any) -> None:
        threading.Thread(target=body, name=name, daemon=True).start()

    def _expect(self, member: Member) -> None:
        """Say when Ray has found room for an actor."""

        def body() -> None:
            try:
                self._settle(member, limit_s=None)
            except UsageError as error:
                complain(f"{member.task} cannot join: {error}")
                return
            except (self._ray.exceptions.RayError, ClusterError, OSError) as error:
                if not self._is_closed:
                    complain(f"{member.task} cannot join: {why(error, self._ray)}")
                return
            self.children.arrive(member.task)

        self._in_thread(f"expect-{member.task}", body)

    def _live(self, remote: Remote, member: Member, start: Start) -> None:
        """One start, from 1. to 3."""
        code = EXIT_CLUSTER
        try:
            code = self._lived(remote, member, start)
        except (self._ray.exceptions.RayError, PacelineError, OSError) as error:
            self._note(member.task, f"its Ray actor could not go on: {sentence(error)}")
            remote.signal_all(SIGKILL)  # nobody watches it any more
        finally:
            remote.end(code)

    def _lived(self, remote: Remote, member: Member, start: Start) -> int:
        settings = start.assignment.settings
        place = self._settle(member, settings.wait_s)
        if place.life != member.known_life:
            self._hand_over(member)
            self._bring_checkpoint(member)
            if start.task.job == "ps":
                self._find(member, place)
                self._bring_to_all()
            member.known_life = place.life
        if remote.is_unwanted:
            return -SIGKILL
        number = self._ray.get(member.handle.start.remote(*self._order(member, start)), timeout=settings.wait_s)
        member.is_empty = False
        remote.arrive()
        while True:
            news = self._news(member, number)
            if news is None:
                member.is_there = member.has_memory = False
                self._note(member.task, "its Ray actor is gone, or its machine; Ray starts it again, if it can")
                return -SIGKILL
            member.has_memory = news.has_memory
            if news.code is not None:
                return news.code

    def _settle(self, member: Member, limit_s: float | None) -> Place:
        """1. Where the actor is, and where it writes to."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        place = self._place(member, deadline)
        self._compare(place)
        where = (str(self._run.paths.root), str(member.task), self._away.token)
        member.is_shared = self._ask(member.handle.settle, where, deadline)
        if member.place is None or member.place.life != place.life:
            member.seen = 0
        member.place, member.is_there = place, True
        return place

    def _compare(self, place: Place) -> None:
        """Ray may put an actor on a machine that nobody has looked at yet."""
        check_version(place)
        if place.torch != (own := torch_version()) and not self._has_compared:
            self._has_compared = True
            print(f"Note: {place.machine} has torch {place.torch}, and this machine {own}", flush=True)

    def _place(self, member: Member, deadline: float | None) -> Place:
        port = member.place.port if member.place is not None else self._port(member.task)
        return msgspec.json.decode(self._ask(member.handle.place, (self._away.host, port), deadline), type=Place)

    def _hand_over(self, member: Member) -> None:
        """A new actor goes on behind what the task has told before."""
        if not member.is_shared:
            self._bring(member, mirror.told_by(self._run.paths, member.task))

    def _find(self, member: Member, place: Place) -> None:
        """Where Ray has put a ps, everybody must look for it."""
        known = self._moves.get(member.task, self._run.cluster.address(member.task))
        if place.address == known:
            return
        self._moves[member.task] = place.address
        moved.write(self._run.paths.root, {member.task: place.address})
        for each in self._members.values():
            if each is not member and each.place is not None and not each.is_shared:
                each.handle.move.remote({str(member.task): place.address})

    def _bring(self, member: Member, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._ray.get(member.handle.keep.remote([carried(piece)]), timeout=REST_S)

    def _ask(self, method: Any, args: tuple[object, ...], deadline: float | None) -> Any:
        """Call until the actor is there; what Ray says of one that will not come back is raised."""
        while True:
            left_s = None if deadline is None else max(0.1, deadline - time.monotonic())
            try:
                return self._ray.get(method.remote(*args), timeout=left_s)
            except self._ray.exceptions.ActorUnavailableError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
                time.sleep(AGAIN_S)  # Ray tells nobody when it is there again
            except self._ray.exceptions.GetTimeoutError:
                raise ClusterError(f"gave up after {left_s:.0f} s: Ray has no room for it") from None

    def _port(self, task: Task) -> int:
        return int(self._run.cluster.address(task).rpartition(":")[2])

    def _order(self, member: Member, start: Start) -> tuple[bytes, bytes, dict[str, bytes]]:
        """2. What an actor is told; the secret goes beside, where Ray neither keeps nor shows it."""
        run, settings = self._run, start.assignment.settings
        if not member.is_shared and settings.resume != "none":
            settings = msgspec.structs.replace(settings, resume="auto")  # it has the checkpoint in its own folder
        order = Order(
            cluster=start.assignment.cluster.as_dict(),
            task=start.task,
            incarnation=start.assignment.incarnation,
            settings=settings,
            program=run.program if member.is_shared else self._away.program,
            threads=run.threads,
            cwd=os.getcwd(),
            moves={str(task): address for task, address in self._moves.items()},
            is_empty=member.is_empty,
        )
        names = (PRIVATE_KEY, CERTIFICATE) if settings.tls else ()
        keys = {name: (run.paths.root / name).read_bytes() for name in names}
        return msgspec.json.encode(order), bytes(start.assignment.secret), keys

    def _news(self, member: Member, number: int) -> News | None:
        """3. How the task fares; None: its actor is gone. All that it has written comes before the news of its end."""
        while True:
            try:
                told, pieces = self._await(member.handle.news.remote(number, NEWS_S, member.seen))
            except self._ray.exceptions.RayActorError:
                if self._is_same(member):
                    continue
                return None
            news = msgspec.json.decode(told, type=News)
            self._keep(member, pieces)
            member.seen = news.batch
            self._losses.extend(news.losses)
            if news.code is None or not pieces:
                return news

    def _await(self, answer: Any) -> Any:
        """An answer that takes long is waited for, and not asked for once more."""
        while True:
            try:
                return self._ray.get(answer, timeout=ANSWER_S)
            except self._ray.exceptions.GetTimeoutError:
                continue

    def _is_same(self, member: Member) -> bool:
        """Whether an actor that did not answer has only been out of reach."""
        assert member.place is not None
        try:
            return self._place(member, time.monotonic() + REACH_S).life == member.place.life
        except (self._ray.exceptions.RayError, ClusterError):
            return False

    def _tell_once(self, text: str) -> None:
        """What costs no more than a file must not cost the run."""
        if not self._has_told:
            self._has_told = True
            complain(f"{text}; the run goes on, and its folder will lack some of its files.")

    def _keep(self, member: Member, pieces: Sequence[Carried]) -> None:
        paths = self._run.paths
        with self._keeping:
            for piece in pieces:
                try:
                    if keep(paths.root, Piece(*piece), str(member.task)) is not None:
                        retain(paths.checkpoints, self._run.settings.keep)
                except (PacelineError, OSError) as error:
                    self._tell_once(f"a piece of {piece[0]} could not be kept: {sentence(error).rstrip('.')}")

    def _bring_to_all(self) -> None:
        """A ps that begins without memory is filled by the workers; none of them keeps it from its start."""
        for member in self._members.values():
            with suppress(self._ray.exceptions.RayError):
                self._bring_checkpoint(member)

    def _bring_checkpoint(self, member: Member) -> None:
        """A worker gets the newest checkpoint, once, however many starts ask for it; one that is gone gets it when it
        is there again."""
        source = resumed(self._run.settings.resume, self._run.paths.checkpoints)
        if source is None or member.task.job == "ps" or not member.is_there or member.is_shared:
            return
        with member.bringing, suppress(self._ray.exceptions.RayActorError):
            manifest = read.examine(source).manifest
            assert member.place is not None
            new = (member.place.life, manifest.sha256 if manifest is not None else "")
            if new != member.brought:
                self._bring(member, mirror.whole(source, mirror.name_of(source)))
                member.brought = new

    def _note(self, task: Task, text: str) -> None:
        paths = self._run.paths
        with self._keeping, suppress(OSError), files.appending(paths.root, paths.logs(task)) as log:
            log.write(f"{ERROR}{text}\n".encode(errors="backslashreplace"))


def check_version(place: Place) -> None:
    """Tasks of one run speak one language."""
    if place.version != VERSION:
        raise UsageError(
            f"{place.machine} has paceline {place.version}, and this is {VERSION}; "
            "install the same on all machines of the Ray cluster."
        )


def resumed(resume: str, own: Path) -> Path | None:
    """The checkpoint to go on from: the run's newest, else what --resume names."""
    newest = read.newest_whole(own)
    if newest is not None or resume in ("auto", "none"):
        return newest.path.absolute() if newest is not None else None
    return read.named(Path(resume))
