"""WHAT goes on with another host? Its agent behind ssh, what it says, and the tasks that it runs.

Called by hosts/far. Threads of its own read and write, so that nobody ever waits for a host that hangs. Must never
leave ssh behind here, nor, as its stdin ends with it, an agent there.
"""

import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue
from signal import SIGKILL, Signals
from typing import IO

from paceline.cluster.hosts import Host
from paceline.cluster.spec import Task
from paceline.errors import PacelineError
from paceline.launchers.hosts import frames as f
from paceline.launchers.hosts import ssh
from paceline.launchers.hosts.frames import Ready, Told
from paceline.launchers.pieces import Piece
from paceline.launchers.restart import LOST
from paceline.telemetry.losses import Loss
from paceline.telemetry.output import complain

AGENT = ("-P", "-m", "paceline.launchers.hosts.agent")
END_S = 5.0
EXIT_S = 1.0
RUNNING = "running"


class FarProcess:
    """A task's process on another host."""

    def __init__(self, task: Task, host: "FarHost") -> None:
        self.pid = 0  # which says nothing here
        self._task = task
        self._host = host
        self._code = LOST
        self._is_over = threading.Event()

    def wait(self) -> int:
        self._is_over.wait()
        return self._code

    def end(self, code: int) -> None:
        """It has ended so, or its host is gone."""
        self._code = code
        self._is_over.set()

    def reap(self) -> None:
        """Its own host does that."""

    def signal(self, number: Signals) -> None:
        self._host.say(f.Signal(self._task, number))

    def signal_all(self, number: Signals) -> None:
        self._host.say(f.Signal(self._task, number, is_all=True))
        if number == SIGKILL and self._host.is_lost:
            self.end(LOST)

    def status(self) -> str | None:
        return None if self._is_over.is_set() else self._host.states.get(str(self._task), RUNNING)


class FarHost:
    """One host: its agent, what it has said, and the tasks it runs. `on_piece` puts what it sends into the run folder;
    `on_lost` hears why it is gone."""

    def __init__(
        self, host: Host, on_piece: Callable[["FarHost", Piece], None], on_lost: Callable[["FarHost"], None]
    ) -> None:
        self.host = host
        self.ready: Ready | None = None
        self.states: dict[str, str] = {}
        self.is_lost = False
        self.has_said_over = False  # all that it had is here
        self.left: list[str] = []  # but for this
        self.is_short = False  # some of what it sent could not be kept here
        self.losses: deque[Loss] = deque()  # files that its tasks could not write, until somebody asks
        self.why = ""  # it is lost
        self.has: set[str] = set()  # checkpoints that are there, by the hashes of their manifests
        self._begun_s = self.heard_s = self.news_s = time.monotonic()
        self._on_piece, self._on_lost = on_piece, on_lost
        self._lock = threading.Lock()
        self._tasks: dict[Task, FarProcess] = {}
        self._outbox: SimpleQueue[Told | Iterator[Piece] | None] = SimpleQueue()  # None: nothing comes any more
        self._urgent: SimpleQueue[f.End | f.Signal] = SimpleQueue()  # goes before what is in the outbox
        self._starting: set[Task] = set()  # whose Start is in the outbox
        self._stderr = bytearray()
        self._answered, self._over = threading.Event(), threading.Event()
        self._is_agent, self._may_write = False, threading.Event()
        self._process = ssh.start(host, ssh.python_line(host, *AGENT))
        assert self._process.stderr is not None
        ssh.listen(self._process.stderr, self._stderr)
        for target in (self._read, self._write):
            threading.Thread(target=target, daemon=True, name=f"{target.__name__}-{host.name}").start()

    @property
    def tasks(self) -> list[Task]:
        """Those that run there."""
        with self._lock:
            return list(self._tasks)

    @property
    def is_shared(self) -> bool:
        """Whether it writes into the run folder itself."""
        return self.ready is not None and self.ready.is_shared

    def say(self, message: Told) -> None:
        """Send this, soon; nobody waits for it. The end, and a signal to who was started there, overtake files."""
        if isinstance(message, f.End) or (isinstance(message, f.Signal) and message.task not in self._starting):
            self._urgent.put(message)
            message = f.Beat()  # by which it is seen
        self._outbox.put(message)

    def put(self, pieces: Iterator[Piece]) -> None:
        """Have these in the run folder there before anything that is said from now on; nobody waits for it."""
        self._outbox.put(pieces)

    def wait_until_ready(self, deadline_s: float) -> Ready | None:
        """What the agent found; None when it refuses, or says nothing: then it is lost."""
        self._answered.wait(max(0.0, deadline_s - time.monotonic()))
        if self.ready is None:
            self.lose(
                f"The agent on {self.host.name} did not answer within {time.monotonic() - self._begun_s:.0f} s; look "
                "there whether its folder can be written to, and what keeps it busy."
            )
        return self.ready

    def start(self, order: f.Start) -> FarProcess:
        """A task there; one that ends at once, where the host is lost already."""
        process = FarProcess(order.task, self)
        with self._lock:
            if self.is_lost:
                process.end(LOST)
                return process
            self._tasks[order.task] = process
            self.states.pop(str(order.task), None)
            self._starting.add(order.task)
        self.say(order)
        return process

    def lose(self, why: str) -> None:
        """It is gone: its tasks are, for this run, and it gets no more orders."""
        with self._lock:
            if self.is_lost:
                return
            self.is_lost, self.why = True, why
        try:
            self._on_lost(self)
        except OSError as error:
            complain(f"what is known of {self.host.name} could not be written down: {error}")
        finally:
            with self._lock:
                gone, self._tasks = dict(self._tasks), {}
            for process in gone.values():
                process.end(LOST)
            self._answered.set()
            self._over.set()
            self._may_write.set()
            self._outbox.put(None)
            ssh.end(self._process)

    def wait_until_over(self, seconds: float) -> bool:
        """Whether its agent has said its last word, or is gone."""
        return self._over.wait(seconds)

    def close(self) -> None:
        """Nothing of it is left here; there, its agent sees the end of its stdin."""
        self._over.set()
        self._may_write.set()
        self._outbox.put(None)
        ssh.end(self._process, END_S)

    @property
    def said(self) -> str:
        """What ssh and the agent have printed beside their messages."""
        return bytes(self._stderr).decode(errors="replace")

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        why = ""
        try:
            self._is_agent = f.skip_noise(stream) is not None
            self._may_write.set()
            while self._is_agent and (message := f.read_heard(stream)) is not None:
                self.heard_s = inf  # it is not silent while we are busy with what it said, on a slow disk
                self._take(message)
                self.heard_s = time.monotonic()
        except (PacelineError, OSError, ValueError) as error:
            why = f"{self.host.name} is lost: {error}"
        if not self._over.is_set():
            self.lose(why or self._why_it_ended())

    def _take(self, message: f.Heard) -> None:
        if isinstance(message, f.News):
            self.news_s = time.monotonic()
            self._on_piece(self, message.piece)
        elif isinstance(message, f.Lost):
            self.losses.extend(message.losses)
        elif isinstance(message, f.Beat):
            self.states = message.states
        elif isinstance(message, f.Exited):
            with self._lock:
                process = self._tasks.pop(message.task, None)
            if process is not None:
                process.end(message.code)
        elif isinstance(message, f.Ready):
            self.ready = message
            self._answered.set()
        elif isinstance(message, f.Refused):
            self.lose(f"{self.host.name}: {message.why}")
        elif isinstance(message, f.Over):
            if not self.is_short:
                self.say(f.End())  # all of it is here: what is there may go
            self.has_said_over, self.left = not self.is_short, message.left
            self._over.set()

    def _why_it_ended(self) -> str:
        name, code = self.host.name, None
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(EXIT_S)
        if self.ready is None and code:
            return ssh.told(self.host, code, self.said)
        said = ssh.last_line(self.said)
        return f"{name} is lost: the connection to it, or its agent, has ended{f' ({said})' if said else ''}."

    def _write(self) -> None:
        stream = self._process.stdin
        assert stream is not None
        is_ending = False
        self._may_write.wait()  # whoever is no agent is told no secret
        with suppress(OSError, ValueError):
            while self._is_agent and (out := self._outbox.get()) is not None:
                for message in map(f.Put, out) if isinstance(out, Iterator) else [out]:
                    is_ending = self._write_urgent(stream) or is_ending
                    if is_ending and isinstance(message, f.Put):
                        break  # nobody needs it any more
                    stream.write(f.frame(message))
                    stream.flush()
                    if isinstance(message, f.Start):
                        self._starting.discard(message.task)
        with suppress(OSError, ValueError):
            stream.close()

    def _write_urgent(self, stream: IO[bytes]) -> bool:
        """What does not wait for files that are on their way; whether the end is among it."""
        is_end = False
        with suppress(Empty):
            while True:
                message = self._urgent.get_nowait()
                is_end = is_end or isinstance(message, f.End)
                stream.write(f.frame(message))
                stream.flush()
        return is_end
