"""WHO is measured? The processes of one scenario: started once, idle on a pipe until told to run, ended together.

Called by lab/measuring/repetitions and lab/measuring/whole_runs; the lab's one door to other processes.
Must never leave a process behind, nor wait without a limit.

The protocol, which peers speak too: a process says `{}` on stdout when it is ready (or `{"missing": why}`), reads
`UNTIMED TIMED` lines from stdin, answers each with `{"us": time of a step}` (and `"parts"` of it by name, if it has
any), and ends at the end of its stdin.
One that runs along begins with a line, ends with the next one, and answers then.
"""

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.errors import ClusterError, WaitTimeout
from paceline.launchers import closing


class Failed(ClusterError):
    """A scenario cannot be measured (any further); says why."""


class Reply(msgspec.Struct, frozen=True):
    """A line from a process that is measured."""

    us: float | None = None
    missing: str | None = None
    parts: dict[str, float] = {}  # of `us`, where a process knows them


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """The step time of every worker that is measured, and of those that only ran along."""

    us: list[float]
    along_us: list[float] = []
    parts: dict[str, float] = {}  # of the first one's time


class Process:
    """One process. Only those that `speaks` have pipes: a ps is spoken to by its workers alone."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: Path,
        *,
        speaks: bool,
        runs_along: bool = False,
        only_serves: bool = False,
    ) -> None:
        self.name = name
        self.log = log
        self.speaks = speaks
        self.runs_along = runs_along
        self.only_serves = only_serves  # until SIGTERM: nobody whom it serves may end it
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            # A group of its own: Ctrl+C in a terminal reaches only the lab, which then ends all of it.
            self._popen = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE if speaks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if speaks else output,
                stderr=output,
                env=dict(environ),
                process_group=0,
                bufsize=0,
            )
        self._pending = b""

    @property
    def pid(self) -> int:
        return self._popen.pid

    def tell(self, untimed: int, timed: int) -> None:
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(f"{untimed} {timed}\n".encode())
        except OSError:
            raise Failed(self.cause()) from None

    def reply(self, deadline_s: float) -> Reply:
        """The next line; blocks without using the processor."""
        assert self._popen.stdout is not None
        descriptor = self._popen.stdout.fileno()
        while b"\n" not in self._pending:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
                raise WaitTimeout(f"{self.name} did not answer in time; its log: {closing.shown(self.log)}")
            data = os.read(descriptor, 4096)
            if not data:
                raise Failed(self.cause())
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        try:
            return msgspec.json.decode(line, type=Reply)
        except msgspec.MsgspecError:
            raise Failed(f"{self.name} said {line[:80]!r} where a number belongs") from None

    def cause(self) -> str:
        """Why it ended, in a sentence; for the table, the log has the rest."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(5.0)
        code = self._popen.poll()
        how = closing.how(code) if code else "ended early"
        reason = closing.reason(self.log)
        why = closing.gist(reason) or (reason[-1] if reason else "")
        return f"{self.name} {how}{f' ({why})' if why else ''}; its log: {closing.shown(self.log)}"

    def let_go(self) -> None:
        """The end of its stdin: it leaves its cluster and ends."""
        if self._popen.stdin is not None:
            with suppress(OSError):
                self._popen.stdin.close()

    def terminate(self) -> None:
        """As a supervisor ends a server."""
        if self.code is None:
            self._popen.terminate()

    def is_gone(self, within_s: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(max(0.0, within_s))
        return self._popen.poll() is not None

    @property
    def code(self) -> int | None:
        return self._popen.poll()

    def interrupt(self, within_s: float) -> None:
        """As Ctrl+C does: it ends what it has started itself; if that takes too long, it is killed."""
        if self.code is None:
            self._popen.send_signal(signal.SIGINT)
            self.is_gone(within_s)
        self.kill()

    def signal_group(self, number: signal.Signals) -> None:
        """To it, and to everything in its group."""
        if self.code is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, number)

    def kill(self) -> None:
        """Now, with everything it has started itself in its group; tasks of a cluster die with their launcher."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


class Group:
    """The processes of one scenario; those that speak are told and asked together.

    With `is_stopped_between` nothing of it runs from one order to the next, nor before the first one.
    """

    def __init__(self, is_stopped_between: bool = False) -> None:
        self.processes: list[Process] = []
        self._is_stopped_between = is_stopped_between

    def _signal(self, number: signal.Signals) -> None:
        if self._is_stopped_between:
            for process in self.processes:
                process.signal_group(number)

    @property
    def speakers(self) -> list[Process]:
        return [process for process in self.processes if process.speaks]

    def await_ready(self, deadline_s: float) -> None:
        for process in self.speakers:
            reply = process.reply(deadline_s)
            if reply.missing is not None:
                raise Failed(f"missing: {reply.missing}")
        self._signal(signal.SIGSTOP)

    def run(self, untimed: int, timed: int, limit_s: float) -> Times:
        """Everybody runs at the same time; those that run along do so until all others are done."""
        self._signal(signal.SIGCONT)
        deadline_s = time.monotonic() + limit_s
        along = [process for process in self.speakers if process.runs_along]
        for process in self.speakers:
            process.tell(untimed, timed)
        replies = [self._timed(process, deadline_s) for process in self.speakers if not process.runs_along]
        for process in along:
            process.tell(0, 0)
        along_us = [self._timed(process, deadline_s)[0] for process in along]
        self._signal(signal.SIGSTOP)
        return Times(us=[us for us, _ in replies], along_us=along_us, parts=replies[0][1] if replies else {})

    def _timed(self, process: Process, deadline_s: float) -> tuple[float, dict[str, float]]:
        reply = process.reply(deadline_s)
        if reply.us is None:
            raise Failed(f"{process.name} answered without a number")
        return reply.us, reply.parts

    def end(self, within_s: float) -> list[str]:
        """Let them end by themselves, then kill; the names of those that had to be killed come back."""
        self._signal(signal.SIGCONT)
        deadline_s = time.monotonic() + within_s
        for process in self.speakers:
            process.let_go()
        late = []
        for process in sorted(self.processes, key=lambda each: each.only_serves):  # first those whom they serve
            if process.only_serves:
                process.terminate()
            if not process.is_gone(deadline_s - time.monotonic()):
                late.append(process.name)
        self.kill()
        return late

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


def output_of(command: Sequence[str]) -> str | None:
    """What a short command prints; None when it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
