"""WHAT runs inside a Ray actor? The machine's side of one task: its port, its process, a ps's memory, its files.

Made by ray/on_ray, called by ray/team. The task itself is a child process, as `paceline run` starts it, so
that a killed one comes back where it was; it ends with the actor, by the kernel. Must never hand anything but small
pieces of files to Ray: tensors travel on our own lanes. The secret comes as an argument of a call, and not of the
actor: Ray writes those down, and shows them.
"""

import os
import shutil
import signal
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.cluster import moved
from paceline.cluster.certificate import remove_certificate, write_certificate
from paceline.cluster.discovery import Assignment
from paceline.cluster.hosts import joined
from paceline.cluster.pinning import VISIBLE
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import EXIT_CLUSTER, ClusterError
from paceline.launchers.children import Children, Exited
from paceline.launchers.entry import Program
from paceline.launchers.here import Here, Start, environ
from paceline.launchers.hosts.syncing import sees
from paceline.launchers.mirror import Mirror
from paceline.launchers.pieces import Piece
from paceline.telemetry.losses import Loss
from paceline.telemetry.paths import RunPaths
from paceline.transport.security import Secret
from paceline.transport.tls import CERTIFICATE, PRIVATE_KEY
from paceline.version import VERSION

FOLDER = ".paceline"  # below the copy of the user's folder, which Ray keeps for other jobs: clear() removes it
CONCURRENT = 4  # calls: one that waits for news, one that starts, signals
LOOK_S = 0.2
KILLED_S = 10.0
PIECES_BYTES = 512 << 10


Carried = tuple[str, int, bytes, bool]  # a Piece on its way


def carried(piece: Piece) -> Carried:
    """As Ray takes it."""
    return piece.path, piece.offset, piece.data, piece.is_last


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where an actor is, and what it has there."""

    host: str
    port: int
    machine: str  # its name, for people
    life: str  # another one after Ray has started the actor again
    version: str
    torch: str
    cards: str  # CUDA_VISIBLE_DEVICES, as Ray has set it

    @property
    def address(self) -> str:
        """Where its task listens."""
        return joined(self.host, self.port)


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to start; the secret comes beside it."""

    cluster: dict[str, list[str]]
    task: Task
    incarnation: int
    settings: Settings
    program: Program  # what workers run
    threads: str
    cwd: str
    moves: dict[str, str]  # where ps are now that are elsewhere than the cluster says
    is_empty: bool = False  # a ps: without its old memory


class News(msgspec.Struct, frozen=True):
    """What has happened in an actor."""

    code: int | None  # None: the task runs
    has_memory: bool
    batch: int = 0  # the number of the pieces that come with it
    losses: list[Loss] = []


class TaskActor:
    """One task of a run on one machine of a Ray cluster."""

    def __init__(self) -> None:
        self._life = uuid.uuid4().hex
        self._holder: socket.socket | None = None
        self._paths: RunPaths | None = None
        self._mirror: Mirror | None = None  # None: the driver sees the files themselves
        self._here: Here | None = None
        self._task: Task | None = None
        self._number = 0  # of starts
        self._code: int | None = None
        self._looking = threading.Lock()  # of who takes exits from the queue
        self._carrying = threading.Lock()  # of who reads the folder, or writes to it
        self._batch, self._unseen = 0, list[Carried]()  # the last pieces, kept until they are known to have come
        self._starter = ThreadPoolExecutor(1, "start", _hear_signals)  # a task ends with the thread that started it

    def place(self, host: str, port: int) -> bytes:
        """Take a port here, if possible this one, and say where that is; `host` "": at the machine's address."""
        import ray.util

        if self._holder is None:
            self._holder = held(host or ray.util.get_node_ip_address(), port)
        at = self._holder.getsockname()
        told = Place(
            host=at[0],
            port=at[1],
            machine=os.uname().nodename,
            life=self._life,
            version=VERSION,
            torch=torch_version(),
            cards=os.environ.get(VISIBLE, ""),
        )
        return msgspec.json.encode(told)

    def settle(self, run_dir: str, task: str, token: str) -> bool:
        """Find the folder to write to; True: it is the driver's own, on this machine or on shared storage."""
        is_shared = sees(run_dir, token)
        if self._paths is None:
            own = Path(FOLDER, Path(run_dir).name, f"{task}-{self._life[:8]}").absolute()
            self._paths = RunPaths(run_dir if is_shared else own)
            self._paths.create()
            self._mirror = None if is_shared else Mirror(self._paths.root)
        return is_shared

    def keep(self, pieces: list[Carried]) -> None:
        """Files of the driver's run folder that a task needs here, to go on behind them, or from them."""
        with self._carrying:
            for piece in pieces:
                if self._mirror is not None:
                    self._mirror.put(Piece(*piece))

    def start(self, order: bytes, secret: bytes, keys: Mapping[str, bytes]) -> int:
        """Start the task; the number of this start comes back, for which news() tells."""
        return self._starter.submit(self._start, msgspec.json.decode(order, type=Order), secret, keys).result()

    def _start(self, order: Order, secret: bytes, keys: Mapping[str, bytes]) -> int:
        task, paths = order.task, self._folder
        settings = msgspec.structs.replace(order.settings, run_dir=str(paths.root))
        if self._here is None:
            if self._mirror is None and os.path.isdir(order.cwd):
                os.chdir(order.cwd)  # the user's folder itself, not Ray's copy
            self._here = Here(
                environ(os.environ, order.threads), order.program, settings, [task] if task.job == "ps" else []
            )
        if order.is_empty:
            self._here.forget(task)
        self.move(order.moves)
        if keys and self._mirror is not None:  # who sees the driver's folder has them there
            write_certificate(paths.root, keys[CERTIFICATE], keys[PRIVATE_KEY])
        known = Secret(secret, paths.root if keys else None)
        with self._looking:
            end_all(self._here.children)
            self._task, self._number, self._code = task, self._number + 1, None
        cluster, at = ClusterSpec(order.cluster), order.moves.get(str(task))
        assignment = Assignment(cluster, task, order.incarnation, settings, known, "launcher", at)
        self._here.start(Start(assignment, None if task.job == "ps" else order.program, paths.logs(task)))
        return self._number

    def move(self, moves: Mapping[str, str]) -> None:
        """Some ps are elsewhere now; who sees the driver's folder finds that there."""
        if self._mirror is not None and moves:
            moved.write(self._folder.root, {Task.parse(name): address for name, address in moves.items()})

    def news(self, number: int, wait_s: float, seen: int) -> tuple[bytes, list[Carried]]:
        """How the number-th start fares, and what is new of its files; waits for either. `seen`: the last batch that
        has come."""
        deadline = time.monotonic() + wait_s
        while True:
            is_known = self._here is not None and number == self._number
            if is_known and self._code is None:
                self._look()
            batch, pieces = self._pieces(seen)
            code = self._code if is_known else EXIT_CLUSTER
            if code is not None or pieces or time.monotonic() >= deadline:
                has_memory = self._task is not None and self._here is not None and self._here.has_memory(self._task)
                losses = self._here.losses() if self._here is not None else []
                return msgspec.json.encode(News(code, has_memory, batch, losses)), pieces

    def _look(self) -> None:
        assert self._here is not None
        with self._looking:
            event = self._here.children.next_event(LOOK_S)
            if isinstance(event, Exited):
                self._code = event.code

    def rest(self, seen: int) -> tuple[int, list[Carried]]:
        """The task has ended for good: what is left of its files; asked until there is nothing."""
        with self._carrying:
            if self._mirror is not None:
                remove_certificate(self._folder.root)  # no key stays behind, whatever else must
                self._mirror.finish()
        return self._pieces(seen)

    def clear(self) -> None:
        """All that this task has written here, in this life and in earlier ones, is with the driver now; what cannot be
        sent (links, hidden files) stays."""
        if self._mirror is None or self._mirror.left():
            return
        own = self._folder.root
        for folder in own.parent.glob(f"{own.name.rpartition('-')[0]}-*"):
            shutil.rmtree(folder, ignore_errors=True)
        for above in (own.parent, own.parent.parent):
            with suppress(OSError):  # others still have something there
                above.rmdir()

    def _pieces(self, seen: int) -> tuple[int, list[Carried]]:
        """The next batch, and its number; the last one again, if its answer was lost on the way."""
        with self._carrying:
            if seen >= self._batch and self._mirror is not None:
                found = self._mirror.pieces(PIECES_BYTES)
                self._unseen = [carried(piece) for piece in found]
                self._batch += 1 if found else 0
            return self._batch, self._unseen

    def send(self, number: int, to_all: bool) -> None:
        """A signal for the task."""
        if self._here is not None and self._task is not None:
            children = self._here.children
            (children.signal_all if to_all else children.signal)(self._task, signal.Signals(number))

    def status(self) -> str | None:
        """What the system says of the task's process."""
        return self._here.children.status(self._task) if self._here is not None and self._task is not None else None

    @property
    def _folder(self) -> RunPaths:
        assert self._paths is not None  # settle() comes before all that writes
        return self._paths


def end_all(children: Children) -> None:
    """A driver that could not reach us starts its task again: the one that still runs must not go on beside it."""
    children.kill()
    if not children.wait_until_gone(None, KILLED_S):
        raise ClusterError(f"its last process did not end within {KILLED_S:g} s of being killed.")


def held(host: str, port: int) -> socket.socket:
    """A port that nobody else gets, the wanted one if it is free; our own listeners may share it."""
    for wanted in dict.fromkeys((port, 0)):
        holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((host, wanted))
            return holder
        except OSError:
            holder.close()
            if wanted == 0:
                raise
    raise AssertionError("unreachable")


def _hear_signals() -> None:
    """A process inherits which signals its starter does not hear; Ray's threads hear none."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, set(signal.Signals))


def torch_version() -> str:
    """Of this machine; "none": it has none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch").partition("+")[0]
    except PackageNotFoundError:
        return "none"
