"""HOW is a host asked? Its probe, started through ssh: a question goes to stdin, an answer comes from stdout.

Called by hosts/preflight. Must never wait without a limit, nor leave a process here or there: the probe ends with
its stdin.
"""

import queue
import re
import secrets
import subprocess
import threading
import time
from contextlib import suppress

import msgspec

from paceline.cluster.hosts import Host
from paceline.errors import ClusterError
from paceline.launchers.hosts import ssh
from paceline.launchers.hosts.links import TOKEN_BYTES
from paceline.launchers.hosts.probe import MARK, Answer, Ask
from paceline.version import VERSION

OLDEST = (3, 11)  # python that paceline runs on; older ones know no -P, which keeps the user's modules out
VERSIONS = """
import sys
sys.path[:] = [path for path in sys.path if path]
print(sys.version.split()[0])
try:
    from paceline.version import VERSION
    print(VERSION)
except Exception:
    print("none")
"""


class Talk:
    """One host's probe, through ssh: a question, an answer, until it is closed."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._begun_s = time.monotonic()
        self._process = ssh.start(host, ssh.python_line(host, "-P", "-m", "paceline.launchers.hosts.probe"))
        self._answers: queue.Queue[bytes | None] = queue.Queue()
        self._errors = bytearray()
        self._broken = ""  # why it is not asked again: a late answer would be taken for the next one
        assert self._process.stderr is not None
        self._listener = ssh.listen(self._process.stderr, self._errors)
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, question: Ask, timeout_s: float) -> Answer:
        """Raise ClusterError with one sentence where the host does not answer."""
        assert self._process.stdin is not None
        if self._broken:
            raise ClusterError(self._broken)
        try:
            self._process.stdin.write(msgspec.json.encode(question) + b"\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=timeout_s)
        except (OSError, queue.Empty):
            line = None
        if line is None:
            self._broken = self._failure()
            raise ClusterError(self._broken)
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
        with suppress(OSError):
            self._process.stdin.close()
        ssh.end(self._process, patience_s=1.0)

    def _failure(self) -> str:
        try:
            code: int | None = self._process.wait(timeout=0.5)
            self._listener.join(timeout=0.5)
        except subprocess.TimeoutExpired:
            code = None
        text = ssh.text_of(bytes(self._errors))
        is_python = code not in (None, ssh.NO_FOLDER, ssh.NO_PYTHON, ssh.SSH_FAILED)
        return (of_versions(self.host) if is_python else "") or ssh.told(
            self.host, code, text, time.monotonic() - self._begun_s
        )

    def _read(self) -> None:
        assert self._process.stdout is not None
        with suppress(OSError, ValueError), self._process.stdout as stream:
            while line := stream.readline(ssh.LINE_BYTES):
                if line.startswith(MARK):
                    self._answers.put(line.removeprefix(MARK))
        self._answers.put(None)


def of_versions(host: Host) -> str:
    """What is wrong with its python or its paceline, where those cannot answer; "" where both are as here."""
    line = ssh.python_line(host, "-c", VERSIONS)
    [answer] = ssh.run_on_all({host.name: line}, [host], timeout_s=5.0)
    found = ssh.text_of(answer.stdout).split()[-2:]
    if answer.code != 0 or len(found) != 2:
        return ""
    python, paceline = found
    if tuple(int(part) for part in re.findall(r"[0-9]+", python)[:2]) < OLDEST:
        return (
            f"{host.name} has python {python} at {ssh.python_of(host)}, and paceline needs {OLDEST[0]}.{OLDEST[1]} or "
            'newer; name another: python = "/path" in a cluster.toml.'
        )
    if paceline in ("none", VERSION):
        return ""
    return f"{host.name} has paceline {paceline}, here is {VERSION}; install the same: {ssh.pip_line(host)}."
