"""HOW do tests start real processes? Each with a deadline, its output read as it comes, and none left behind.

Used through the fixture `processes` by tests/integration and tests/fault. Must never sleep: it waits for lines,
for ends and for arrivals at a gate.
"""

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

from paceline.telemetry.ledgers import verdict_of

MARK = "PACELINE_TEST_MARK"
BIN = Path(sys.executable).parent
AUDIT = Path(__file__).with_name("audit")
DEADLINE_S = 150.0  # far more than any of them takes: the machine may be busy
GONE_S = 30.0
OURS = ("PACELINE_", "TF_CONFIG", "OMP_NUM_THREADS", "CI", "COLUMNS", "FORCE_COLOR", "NO_COLOR")
OURS += ("SLURM_", "OMPI_", "PMI_", "RANK", "WORLD_SIZE", "JOBSET_")  # the tests themselves may run under a scheduler


class Process:
    """One process that a test has started, and what it has printed so far."""

    def __init__(
        self, command: list[str], cwd: Path, environ: dict[str, str], name: str, in_terminal: bool, within_s: float
    ) -> None:
        self.name = name
        self._within_s = within_s
        self._deadline = time.monotonic() + within_s
        self._news = threading.Condition()
        self._lines: list[str] = []
        self._is_read = False
        ours, theirs = pty.openpty() if in_terminal else os.pipe()
        self.popen = subprocess.Popen(
            command,
            cwd=cwd,
            env=environ,
            stdin=theirs if in_terminal else subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._output = open(ours, encoding="utf-8", errors="replace")  # noqa: SIM115 (the thread closes it)
        threading.Thread(target=self._read, daemon=True, name=f"read-{name}").start()

    def _read(self) -> None:
        with self._output, suppress(OSError):  # Linux: EIO when the last process has left the terminal
            for line in self._output:
                with self._news:
                    self._lines.append(line.rstrip("\n"))
                    self._news.notify_all()
        with self._news:
            self._is_read = True
            self._news.notify_all()

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def lines(self) -> list[str]:
        with self._news:
            return list(self._lines)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str) -> str:
        """The first line in which the pattern is found, as soon as it is there."""
        seen = 0
        with self._news:
            while True:
                for line in self._lines[seen:]:
                    if re.search(pattern, line):
                        return line
                seen = len(self._lines)
                if self._is_read or not self._news.wait(self._left_s()):
                    raise AssertionError(f"{self.name} never said {pattern!r}, but:\n" + "\n".join(self._lines))

    def end(self) -> int:
        """Its exit code, once it has ended and everything it printed has been read."""
        try:
            code = self.popen.wait(self._left_s())
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.name} did not end within {self._within_s:g} s, it said:\n{self.text}"
            ) from None
        with self._news:
            self._news.wait_for(lambda: self._is_read, self._left_s())
        return code

    def ends_with(self, code: int) -> "Process":
        """Wait for the end, and want this exit code."""
        assert self.end() == code, f"{self.name} ended with {self.popen.returncode}, it said:\n{self.text}"
        return self

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())


class Processes:
    """Everything one test starts. A mark in the environment finds also what those processes have started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mark = uuid.uuid4().hex
        self._started: list[Process] = []
        self._is_verified = True

    @property
    def mark(self) -> dict[str, str]:
        """For the environment of whatever is started for this test by somebody else."""
        return {MARK: self._mark}

    def environ(self, **extra: str) -> dict[str, str]:
        """This process's environment without what would change a run, with the mark and a secret of the test's own."""
        plain = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        path = f"{BIN}{os.pathsep}{plain.get('PATH', '')}"
        own = {"PATH": path, "XDG_CONFIG_HOME": str(self.folder / "config"), MARK: self._mark, "OMP_NUM_THREADS": "1"}
        own["PACELINE_LEDGER"] = "1"
        given = [plain["PYTHONPATH"]] if plain.get("PYTHONPATH") else []  # where the tree is not installed
        audit = {
            "PYTHONPATH": os.pathsep.join([str(AUDIT), *given]),
            "PACELINE_TEST_AUDIT": str(self.folder / "audit.txt"),
        }
        return {**plain, **own, **audit, **extra}

    def leave_unverified(self, reason: str) -> None:
        """The runs of this test are not to be verified at its end; it must say why."""
        assert reason
        self._is_verified = False

    def violations(self) -> dict[str, list[str]]:
        """What `paceline verify` says against the runs of this test, by folder."""
        found: dict[str, list[str]] = {}
        if not self._is_verified:
            return found
        for folder in {path.parent.parent for path in self.folder.rglob("ledger/*.bin")}:
            verdict = verdict_of(folder)
            if not verdict.is_ok:
                found[folder.name] = [str(violation) for violation in verdict.violations[:20]]
        return found

    def executed_data(self) -> list[str]:
        """What a ps has executed besides what it imports (I7): a line each, by tests/integration/audit."""
        path = self.folder / "audit.txt"
        return path.read_text().splitlines() if path.exists() else []

    def start(
        self,
        *command: object,
        name: str = "",
        cwd: Path | None = None,
        in_terminal: bool = False,
        within_s: float = DEADLINE_S,
        **extra: str,
    ) -> Process:
        """Start a command that ends within so many seconds; `extra` goes into its environment."""
        words = [str(word) for word in command]
        name = name or " ".join(words[:3])
        process = Process(words, cwd or self.folder, self.environ(**extra), name, in_terminal, within_s)
        self._started.append(process)
        return process

    def paceline(self, *words: object, name: str = "", in_terminal: bool = False, **extra: str) -> Process:
        name = name or f"paceline {words[0] if words else ''}"
        return self.start(BIN / "paceline", *words, name=name, in_terminal=in_terminal, **extra)

    def bash(self, text: str, cwd: Path | None = None, **extra: str) -> Process:
        """A script of the documents, as they print it."""
        return self.start("bash", "-c", text, name="bash", cwd=cwd, **extra)

    def print_all(self) -> None:
        """What every process has said; pytest shows it when the test has failed."""
        for process in self._started:
            print(f"--- {process.name} (exit code {process.popen.returncode})\n{process.text}")

    def alive(self) -> list[psutil.Process]:
        """Every process with our mark that still runs."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def task(self, job: str, index: int) -> psutil.Process:
        """The process that the launcher has started for a task: the one that writes to its log."""
        for process in self.alive():
            with suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/fd/1").endswith(f"/logs/{job}-{index}.log"):
                    return process
        raise AssertionError(f"no process is {job}:{index}")

    def survivors(self) -> list[str]:
        """What is left after the time in which everything should be gone; it is killed."""
        _, left = psutil.wait_procs(self.alive(), timeout=GONE_S)
        return self.kill(left)

    def kill(self, left: list[psutil.Process] | None = None) -> list[str]:
        told = {}
        for process in self.alive() if left is None else left:
            try:
                told[process.pid] = f"{process.pid}: {' '.join(process.cmdline())}"
                process.kill()
            except psutil.Error:
                continue
        for started in self._started:
            try:
                started.popen.wait(GONE_S)
            except subprocess.TimeoutExpired:  # sshd writes its title over the mark
                told[started.pid] = f"{started.pid}: {started.name}"
                started.popen.kill()
                started.popen.wait(60)
        return list(told.values())


class Arrival:
    """A worker that stands at the gate; it goes on when released, or when the test ends."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.settimeout(DEADLINE_S)
        with self._connection.makefile("r") as said:
            self.text = said.readline().strip()
        self.pid = int(self.text.split()[-1])

    def release(self) -> None:
        self._connection.close()


class Gate:
    """Where programs/train.py stops at a given step, so that a test can act at a logical time."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gate"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(os.path.relpath(self.path))  # a Unix path may have 107 bytes only
        self._listener.listen()
        self._listener.settimeout(DEADLINE_S)
        self._arrivals: list[Arrival] = []

    def arrival(self) -> Arrival:
        """The next worker that comes; text is like `worker:1 step 5 pid 4711`."""
        self._arrivals.append(Arrival(self._listener.accept()[0]))
        return self._arrivals[-1]

    def arrivals(self, count: int) -> dict[str, Arrival]:
        """So many workers, by the name of their task."""
        came = [self.arrival() for _ in range(count)]
        return {each.text.split()[0]: each for each in came}

    def open(self) -> None:
        """Nobody need stand here any more: who does goes on, and so does who comes."""
        self.path.unlink()
        self.close()

    def close(self) -> None:
        for each in self._arrivals:
            each.release()
        self._listener.close()


def is_listening(address: str) -> bool:
    """Whether somebody accepts connections at host:port."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
