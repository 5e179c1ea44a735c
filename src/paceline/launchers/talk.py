"""HOW is a host asked? Its probe, started through ssh: a question goes to stdin, an answer comes from stdout.

Called by launchers/preflight. Must never wait without a limit, nor leave a process here or there: the probe ends with
its stdin.
"""

import queue
import secrets
import subprocess
import threading
import time

import msgspec

from paceline.cluster.hosts import Host
from paceline.errors import ClusterError
from paceline.launchers import ssh
from paceline.launchers.links import TOKEN_BYTES
from paceline.launchers.probe import MARK, Answer, Ask
from paceline.version import VERSION

VERSION_OF = "from paceline.version import VERSION; print(VERSION)"


class Talk:
    """One host's probe, through ssh: a question, an answer, until it is closed."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._begun_s = time.monotonic()
        self._process = ssh.start(host, ssh.python_line(host, "-m", "paceline.launchers.probe"))
        self._answers: queue.Queue[bytes | None] = queue.Queue()
        self._errors: list[bytes] = []
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def ask(self, question: Ask, timeout_s: float) -> Answer:
        """Raise ClusterError with one sentence where the host does not answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(question) + b"\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=timeout_s)
        except (OSError, queue.Empty):
            line = None
        if line is None:
            raise ClusterError(self._failure())
        try:
            return msgspec.json.decode(line, type=Answer)
        except msgspec.MsgspecError:
            raise ClusterError(
                f"{self.host.name} answers as another paceline than this one would; install the same there: "
                f"{ssh.pip_line(self.host)}."
            ) from None

    def close(self) -> None:
        """End the probe, and wait for its end."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=1.0)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def _failure(self) -> str:
        try:
            code: int | None = self._process.wait(timeout=0.5)
            self._readers[1].join(timeout=0.5)
        except subprocess.TimeoutExpired:
            code = None
        text = ssh.text_of(b"".join(self._errors))
        if code and ssh.missing_module(text).startswith("paceline."):
            return _older(self.host)
        return ssh.told(self.host, code, text, time.monotonic() - self._begun_s)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._answers.put(line.removeprefix(MARK))
        self._answers.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors.append(line)


def _older(host: Host) -> str:
    """A paceline without a probe: which one is it?"""
    line = ssh.python_line(host, "-c", VERSION_OF)
    [answer] = ssh.run_on_all({host.name: line}, [host], timeout_s=5.0)
    version = ssh.last_line(ssh.text_of(answer.stdout)) if answer.code == 0 else "of an unknown version"
    return f"{host.name} has paceline {version}, here is {VERSION}; install the same: {ssh.pip_line(host)}."
