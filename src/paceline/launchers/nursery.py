"""HOW does a task start in milliseconds? A process that has imported everything forks it; this is the launcher's side.

Called by launchers/children. Raises NoNursery where there is none, or no more: then the caller starts tasks by exec.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from signal import Signals
from typing import BinaryIO

import msgspec
import psutil

from paceline import files
from paceline.errors import EXIT_TRAINING
from paceline.launchers.forking import COMPILER, Birth
from paceline.launchers.kernel import adopting
from paceline.telemetry import losses

VARIABLE = "PACELINE_NURSERY"  # 0: start every task by exec
BIRTH_S = 60.0  # the first one includes the import of torch
LOOK_S = 0.1
END_S = 5.0
NO_DRIVER = "PYTORCH_NVML_BASED_CUDA_CHECK"  # an import that asks whether there is CUDA must not start the driver
ROOM = "." * 200  # of its command line, for the names of tasks
PS_NEEDS = ["paceline.launchers.task", "paceline.launchers.serving"]
WORKER_NEEDS = ["paceline.launchers.task", "paceline.frameworks.torch.preparation"]


class NoNursery(Exception):
    """Tasks must be started in another way."""


class Forked:
    """A task's process: our child, though not by our own fork."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        """Its exit code, or minus the signal, once it has ended; the pid stays its own until reap()."""
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # somebody else has taken it
            ended = None
        if ended is None:
            return EXIT_TRAINING
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def reap(self) -> None:
        """Let the kernel forget it."""
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def signal(self, number: Signals) -> None:
        """To the process itself."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def signal_all(self, number: Signals) -> None:
        """To its group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def status(self) -> str | None:
        """In psutil's words; None: there is none."""
        with suppress(psutil.Error):
            return str(psutil.Process(self.pid).status())
        return None


class Nursery:
    """One nursery process; started by the first birth at the latest."""

    def __init__(self, environ: Mapping[str, str], compiles: bool = False) -> None:
        """Start it; what it imports is loaded with this environment, so the number of threads is in it.

        Workers that will need torch's compiler have it imported once for all of them; others never import it.
        """
        if not can_fork(environ):
            raise NoNursery("this system has no fork that we can use")
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._worker_needs = [*PS_NEEDS, *WORKER_NEEDS, *([COMPILER] if compiles else [])]
        self.is_wanted: Callable[[], bool] = lambda: True  # asked while a birth takes its time
        self._side = mine
        self._side.settimeout(LOOK_S)
        command = [sys.executable, "-P", "-m", "paceline.launchers.forking", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, ROOM],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**environ, NO_DRIVER: "1"},
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def birth(
        self,
        title: str,
        argv: Sequence[str],
        environ: Mapping[str, str],
        log: Path,
        named: Mapping[str, int],
        imports: Sequence[str] | None = None,
    ) -> Forked:
        """A new task; `named` descriptors get the variables of these names in it. NoNursery: there is none now.

        `imports` is what it needs beforehand; left out: what a ps, or a worker that trains with torch, needs.
        """
        if imports is None:
            imports = PS_NEEDS if title.startswith("paceline ps") else self._worker_needs
        birth = Birth(
            argv=list(argv),
            environ=dict(environ),
            cwd=os.getcwd(),
            title=title,
            imports=list(imports),
            named=list(named),
        )
        try:
            return Forked(self._ask(birth, log, list(named.values())))
        except (OSError, ValueError) as error:
            late = self._end_at_once()
            if late is not None:
                return late
            raise NoNursery(str(error)) from error

    def _ask(self, birth: Birth, log: Path, named: list[int]) -> int:
        with open(os.memfd_create("birth"), "w+b") as request, open_log(log) as output, open(os.devnull, "rb") as null:
            request.write(json.dumps(msgspec.to_builtins(birth)).encode())  # of names, some may be no UTF-8
            request.flush()
            with adopting():
                files = [request.fileno(), output.fileno(), null.fileno(), *named]
                socket.send_fds(self._side, [b"birth"], files)
                return self._hear()

    def _hear(self) -> int:
        """The pid of the new task; ValueError: the nursery has died, or nobody wants to wait for it any more."""
        deadline = time.monotonic() + BIRTH_S
        while self.is_wanted() and time.monotonic() < deadline:
            with suppress(TimeoutError):
                return int(self._side.recv(32))
        raise ValueError("it took too long")

    def _end_at_once(self) -> Forked | None:
        """Nothing is started twice: a task whose pid was not told never begins, and one whose pid was is ours."""
        self._process.kill()
        self._process.wait()
        self._side.settimeout(0)
        try:
            return Forked(int(self._side.recv(32)))
        except (OSError, ValueError):
            self._side.close()
            return None

    def close(self) -> None:
        """End it, and wait for that."""
        self._side.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:  # it imports
            self._process.kill()
            self._process.wait()


def open_log(log: Path) -> BinaryIO:
    """Open the log of a task; /dev/null if that fails, so that the task starts all the same."""
    try:
        return files.appending(log.parent.parent, log)
    except OSError as error:
        losses.tell(log, error, "what this task prints is lost; it runs all the same")
        return open(os.devnull, "ab", buffering=0)


def can_fork(environ: Mapping[str, str]) -> bool:
    """Where the kernel gives orphans to whom we name, and the user does not object."""
    has_all = sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(os, "waitid")
    return has_all and environ.get(VARIABLE, "1") != "0"
