"""WHO starts and watches the tasks of another host? `python -m paceline.launchers.hosts.agent`, started there by ssh.

Started by hosts/far, one a host. It gets the run, its secret and every order on stdin, starts tasks as the launcher
does on its own host (launchers/here), and tells on stdout what ends and what the run folder has that is new. Decides
nothing. Must never outlive the launcher: where stdin ends, or is silent for too long, all tasks end, and so does it;
tasks end with it in their turn (launchers/kernel).

Threads: the main one obeys, because the kernel ends a task with the thread that started it; others read stdin, wait for
exits, report, and see to it that silence is the end even where somebody hangs.
"""

import os
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import BinaryIO

import msgspec

from paceline import files
from paceline.cluster import moved
from paceline.cluster.certificate import remove_certificate, write_certificate
from paceline.cluster.cores import usable_cores
from paceline.cluster.discovery import Assignment
from paceline.cluster.pinning import VISIBLE, visible
from paceline.cluster.secret import Secret
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import EXIT_CLUSTER, EXIT_OK, PacelineError, ProtocolError, UsageError
from paceline.launchers import gpus, here, ports
from paceline.launchers.children import Exited
from paceline.launchers.entry import THREADS, check_program
from paceline.launchers.hosts import frames as f
from paceline.launchers.hosts.frames import Heard, Hello, Told
from paceline.launchers.hosts.syncing import sees
from paceline.launchers.mirror import Mirror
from paceline.launchers.nursery import open_log
from paceline.telemetry.output import keep_printing
from paceline.telemetry.paths import RunPaths
from paceline.version import VERSION

REPORT_S = 0.2
BEAT_S = 1.0
LOOK_S = 0.05
STOP_S = 3.0  # how long tasks may take to end by themselves when the launcher is gone
Order = Told | Exited | None  # None: the launcher is gone


class Speech:
    """What the agent says; from several threads, a whole message at a time."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            self._stream.write(f.MAGIC)
            self._stream.flush()

    def say(self, message: Heard) -> None:
        """To nobody, when the launcher is gone: stdin tells that."""
        with self._lock, suppress(OSError, ValueError):
            self._stream.write(f.frame(message))
            self._stream.flush()


class Folder:
    """The run folder on this host, and what of it the launcher has yet to see."""

    def __init__(self, hello: Hello) -> None:
        self.is_shared = sees(hello.run_dir, hello.token)
        is_private = Path(hello.run_dir).is_absolute() and not self.is_shared  # the launcher's path means nothing here
        root = f"runs/{hello.settings.run_id}" if is_private else hello.run_dir
        own = f".{hello.host}" if hello.host and not self.is_shared else ""  # hosts may share a home, and no run folder
        self.paths = RunPaths(f"{root}{own}")
        self.aside = ""  # where a folder of another run of this name is now
        self._made: list[Path] = []
        self._has_kept = False  # checkpoints that a launcher which died has left
        self._mirror = Mirror(self.paths.root)
        self._lock = threading.Lock()

    def make(self, hello: Hello) -> None:
        """Have it here; whatever fails from now on, hide() and remove() come."""
        was_left = not self.is_shared and self.paths.root.exists()  # then its parent may be ours, too
        if not self.is_shared:
            self._make_room(hello.is_going_on)
        self._made = [path for path in (self.paths.root, self.paths.root.parent) if not path.exists()]
        if was_left and not self.aside:
            self._made.append(self.paths.root.parent)
        self.paths.create()
        if not self.is_shared:
            if self._kept.exists():  # they may be newer than the launcher's, which gets them
                self.paths.checkpoints.rmdir()
                self._kept.rename(self.paths.checkpoints)
                self._has_kept = True
            self.paths.config.write_bytes(files.as_json(hello.settings))
        if hello.certificate and not self.is_shared:
            write_certificate(self.paths.root, hello.certificate, hello.key)

    def _make_room(self, is_going_on: bool) -> None:
        """A launcher that died left this folder: of the same run its checkpoints count, another one is set aside."""
        root = self.paths.root
        if not is_going_on:
            for old in (root, self._kept):
                if old.exists():
                    remove_certificate(old)
                    self.aside = free_name(f"{root}.old")
                    old.rename(self.aside)
        elif root.exists():
            if self.paths.checkpoints.is_dir():
                shutil.rmtree(self._kept, ignore_errors=True)
                self.paths.checkpoints.rename(self._kept)
            shutil.rmtree(root)

    @property
    def _kept(self) -> Path:
        """Checkpoints of the same run, until its folder is new."""
        return Path(f"{self.paths.root}.checkpoints")

    def put(self, order: f.Put) -> None:
        """A file that the launcher wants to be here. Where the disk is full it is not: the task that needs it says so,
        and those that train here go on."""
        if not self.is_shared:
            with self._lock, suppress(OSError):
                self._mirror.put(order.piece)

    def report(self, speech: Speech, with_large: bool) -> bool:
        """Send what is new, as much as a moment allows; whether there was anything."""
        if self.is_shared:
            return False
        with self._lock:
            pieces = self._mirror.pieces(with_large=with_large)
            for piece in pieces:
                speech.say(f.News(piece))
        return bool(pieces)

    def finish(self, speech: Speech) -> None:
        """Send everything; whether it arrives is for the launcher to say."""
        with self._lock:
            self._mirror.finish()
        while self.report(speech, with_large=True):
            pass

    def left(self) -> list[str]:
        """What cannot be sent, and stays."""
        return [] if self.is_shared or self.paths.root not in self._made else self._mirror.left()

    def remove(self) -> None:
        """Nothing is left here that was not here before; never before all of it lies at the launcher's."""
        if not self.is_shared and self.paths.root in self._made:
            shutil.rmtree(self.paths.root, ignore_errors=True)
        with suppress(OSError):  # others may have runs there
            for folder in self._made[1:]:
                folder.rmdir()

    def give_up(self) -> None:
        """No task was started: nothing stays, but what was there before."""
        if self._has_kept and self.paths.checkpoints.is_dir():
            self.paths.checkpoints.rename(self._kept)
        self.remove()

    def hide(self) -> None:
        """No key stays behind, whatever happens."""
        if not self.is_shared:
            remove_certificate(self.paths.root)


class Agent:
    """The tasks of this host, as the launcher orders them."""

    def __init__(self, hello: Hello, speech: Speech, folder: Folder) -> None:
        self._hello = hello
        self.folder = folder
        self._speech = speech
        self._orders: SimpleQueue[Order] = SimpleQueue()
        self._heard_s = time.monotonic()
        self._is_over = threading.Event()
        self._has_started = False
        self._held = ports.Reserved()
        self._settings = msgspec.structs.replace(hello.settings, run_dir=str(self.folder.paths.root))
        self._secret = Secret(hello.secret, self.folder.paths.root if hello.settings.tls else None)
        self._cores = usable_cores()
        share = str(max(1, self._cores // max(1, hello.num_workers)))
        self._threads = hello.threads or os.environ.get(THREADS) or share
        environ = environ_of(hello, self._threads)
        self._cards = gpus.cards(environ)
        self._here = here.Here(environ, hello.program, hello.settings, hello.ps)
        self.children = self._here.children

    def ready(self) -> f.Ready:
        """Hold the ports of the tasks to come, and say what this host has."""
        self._held.hold(self._hello.ports)
        return f.Ready(
            host=os.uname().nodename,
            cores=self._cores,
            threads=self._threads,
            cards=self._cards,
            run_dir=str(self.folder.paths.root),
            is_shared=self.folder.is_shared,
            spare_ports=self._held.anywhere(self._hello.num_spare_ports, self._hello.between),
            aside=self.folder.aside,
        )

    def obey(self, stdin: BinaryIO) -> bool:
        """Until the launcher says that the run is over (True), or is gone."""
        threading.Thread(target=self._listen, args=(stdin,), daemon=True, name="listen").start()
        for target in (self._wait, self._report, self._watch):
            threading.Thread(target=target, daemon=True, name=target.__name__).start()
        while True:
            order = self._orders.get()
            if order is None:
                return False
            if isinstance(order, f.End):
                return True
            self._do(order)

    def leave(self) -> None:
        """As if the launcher were gone; safe in a signal handler."""
        self.children.is_interrupted = True  # it reaches a task, too, that is being born just now
        self._orders.put(None)

    def _do(self, order: Told | Exited) -> None:
        if isinstance(order, Exited):
            while self.folder.report(self._speech, with_large=False):
                pass
            self._tell_losses()
            self._speech.say(f.Exited(order.task, order.code))
        elif isinstance(order, f.Start):
            self._start(order)
        elif isinstance(order, f.Signal):
            send = self.children.signal_all if order.is_all else self.children.signal
            send(order.task, signal.Signals(order.number))
        elif isinstance(order, f.Forget):
            self._here.forget(order.task)
        elif isinstance(order, f.Put):
            self.folder.put(order)
        elif isinstance(order, f.Moved) and not self.folder.is_shared:
            moves = {Task.parse(name): address for name, address in order.addresses.items()}
            moved.write(self.folder.paths.root, moves)

    def _start(self, order: f.Start) -> None:
        settings, self._has_started = self._settings, True
        if order.resume:
            settings = msgspec.structs.replace(settings, resume=str(self.folder.paths.root / order.resume))
        cluster = ClusterSpec(order.cluster)
        made = Assignment(cluster, order.task, order.incarnation, settings, self._secret, "launcher", order.at)
        program = None if order.task.job == "ps" else self._hello.program
        log = self.folder.paths.logs(order.task)
        try:
            self._here.start(here.Start(made, program, log))
        except OSError as error:
            with open_log(log) as file:
                file.write(f"paceline: error: no process could be started: {error}\n".encode(errors="backslashreplace"))
            self._orders.put(Exited(order.task, EXIT_CLUSTER))

    def _listen(self, stdin: BinaryIO) -> None:
        while True:
            try:
                order = f.read_told(stdin)
            except (OSError, ProtocolError):
                order = None
            self._heard_s = time.monotonic()
            if order is None:
                self.leave()
                return
            if not isinstance(order, f.Beat):
                self._orders.put(order)

    def _watch(self) -> None:
        """Silence is the end; and if nobody can hear that either, by force."""
        while time.monotonic() - self._heard_s <= self._hello.silence_s:
            if self._is_over.wait(BEAT_S):
                return
        self.leave()
        if not self._is_over.wait(4 * STOP_S):
            self.children.kill()
            with suppress(OSError):
                self.folder.hide()
            os._exit(EXIT_CLUSTER)

    def _wait(self) -> None:
        while True:
            event = self.children.next_event(BEAT_S)
            if isinstance(event, Exited):
                self._orders.put(event)

    def _report(self) -> None:
        beat_s, has_more = 0.0, False
        while not self._is_over.wait(0.0 if has_more else REPORT_S):
            if time.monotonic() - beat_s >= BEAT_S:
                beat_s = time.monotonic()
                states = {str(task): self.children.status(task) or "" for task in self.children.running()}
                self._speech.say(f.Beat(states))
            self._tell_losses()
            has_more = self.folder.report(self._speech, with_large=True)

    def _tell_losses(self) -> None:
        if losses := self._here.losses():
            self._speech.say(f.Lost(losses))

    def end(self, is_over: bool) -> None:
        """Nothing runs any more; what is left to tell is told, if somebody listens."""
        if not is_over:
            self.children.send(self.children.running(), signal.SIGTERM)
            self._until_gone(STOP_S)
        self.children.kill()
        self._until_gone(STOP_S)
        self._here.close()
        self._tell_losses()
        self._held.release()
        if is_over:
            self.folder.finish(self._speech)
            left = self.folder.left()
            self._speech.say(f.Over(left))
            if self._is_received() and not left:
                self.folder.remove()
        elif not self._has_started:
            self.folder.give_up()
        self._is_over.set()

    def _is_received(self) -> bool:
        """Whether the launcher says, by a second End, that all has come; this may be the only copy else."""
        deadline = time.monotonic() + self._hello.silence_s
        with suppress(Empty):
            while (order := self._orders.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
                if isinstance(order, f.End):
                    return True
        return False

    def _until_gone(self, seconds: float) -> None:
        """Exits are taken by another thread."""
        deadline = time.monotonic() + seconds
        while self.children.running() and time.monotonic() < deadline:
            time.sleep(LOOK_S)


def environ_of(hello: Hello, threads: str) -> dict[str, str]:
    """What every task of this host finds around it: this host's own, what the launcher sent, so many cards."""
    around = {**os.environ, **hello.environ}
    if hello.gpus is not None:
        around[VISIBLE] = ",".join(visible(around.get(VISIBLE), gpus.present())[: hello.gpus])
    return here.environ(around, threads)


def main() -> int:
    """Be the agent of this host until the run is over."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the launcher's affair; a handler is not inherited
    stdin = sys.stdin.buffer
    speech = Speech(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # what anybody prints here is no message
    keep_printing(is_task=False)
    speech.begin()
    hello = f.read_told(stdin)
    if not isinstance(hello, Hello):
        return EXIT_OK
    folder, agent = None, None
    try:
        check_version(hello)
        check_script(hello)
        folder = Folder(hello)
        folder.make(hello)
        agent = Agent(hello, speech, folder)
        speech.say(agent.ready())
    except (PacelineError, OSError) as error:
        clean_up(folder, agent)
        speech.say(f.Refused(str(error)))
        return EXIT_CLUSTER
    signal.signal(signal.SIGTERM, lambda *_: agent.leave())
    try:
        agent.end(agent.obey(stdin))
    finally:
        agent.folder.hide()
    return EXIT_OK


def clean_up(folder: Folder | None, agent: Agent | None) -> None:
    """Of an agent that refuses nothing stays: no process, no key, no folder."""
    if agent is not None:
        agent.end(is_over=False)
    if folder is not None:
        folder.hide()
        folder.give_up()


def free_name(base: str) -> str:
    """The first of base-1, base-2, … that nobody has."""
    return next(name for number in range(1, 10_000) if not Path(name := f"{base}-{number}").exists())


def check_script(hello: Hello) -> None:
    """What runs here must be here."""
    try:
        check_program(hello.program)
    except UsageError as error:
        raise UsageError(f"{error} Its folder there is {os.getcwd()}; --sync-code copies the script.") from None


def check_version(hello: Hello) -> None:
    """Tasks of two versions would not understand each other."""
    if hello.version != VERSION:
        raise UsageError(f"it has paceline {VERSION}, and the launcher {hello.version}; install the same version.")


if __name__ == "__main__":
    os._exit(main())  # a thread that still reads stdin would abort a plain end
