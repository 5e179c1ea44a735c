"""HOW does a command run on another host? The system's own `ssh`, with the user's keys, agent and ~/.ssh/config.

Called by hosts/talk, hosts/preflight, hosts/syncing, hosts/many and hosts/far_host.
PACELINE_SSH holds another command and its options (`ssh -F my_config`). Must never ask for a password, nor put a secret
into a command line: secrets go to stdin. A host that is this machine (localhost) takes the same command without ssh.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, TypeVar

import msgspec

from paceline.cluster.hosts import Host
from paceline.errors import ClusterError, UsageError
from paceline.version import VERSION

SSH = "PACELINE_SSH"
CONNECT_S = 8
OPTIONS = (
    "-T",  # no terminal there
    "-x",  # no windows
    "-oBatchMode=yes",
    f"-oConnectTimeout={CONNECT_S}",
    "-oConnectionAttempts=1",
    "-oServerAliveInterval=5",  # a host that went away is noticed within 15 s
    "-oServerAliveCountMax=3",
    "-oControlMaster=no",  # ours neither ends with a shared connection of the user's, nor keeps one
    "-oControlPath=none",
    "-oClearAllForwardings=yes",  # two connections to a host cannot have the same ones
    "-oRemoteCommand=none",
)
LINE_BYTES = 1 << 20  # of what a host says, in a line
SAID_BYTES = 16 << 10  # of what it says beside: the end of it
GONE_S = 5.0  # what was killed is gone then
REST_S = 1.0  # and what it said is here
NO_FOLDER, NO_PYTHON, SSH_FAILED = 97, 98, 255  # exit codes of the line that we send, and ssh's own
OVER = "--force-reinstall --no-deps "  # else pip finds nothing to do where the version is the same

A = TypeVar("A")
B = TypeVar("B")


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one host said to a command."""

    host: Host
    code: int | None  # None: it was not done within its time
    stdout: bytes = b""
    stderr: str = ""
    seconds: float = 0.0

    @property
    def failure(self) -> str:
        """One sentence about what went wrong; "" where nothing did."""
        return "" if self.code == 0 else told(self.host, self.code, self.stderr, self.seconds)


def words() -> list[str]:
    """The ssh command of PACELINE_SSH and its options; `ssh` where nothing is said."""
    given = os.environ.get(SSH, "").strip() or "ssh"
    try:
        return shlex.split(given)
    except ValueError as error:
        raise UsageError(f"{SSH} is {given!r}, which is no command ({error}); write it as for a shell.") from None


def config_file() -> str:
    """Where the user's settings of ssh are: what PACELINE_SSH says (`ssh -F my_config`), or the usual file."""
    said = words()
    return said[said.index("-F") + 1] if "-F" in said[:-1] else "~/.ssh/config"


def command(host: Host, line: str, options: Sequence[str] = ()) -> list[str]:
    """The command that runs a line of `sh` on a host; options are further ones of ssh.

    >>> command(Host(name="localhost", target="localhost"), "echo yes")
    ['sh', '-c', 'echo yes']
    """
    if host.is_here:
        return ["sh", "-c", line]
    return [*words(), *OPTIONS, *options, "--", host.target, f"exec sh -c {shlex.quote(line)}"]


def python_line(host: Host, *arguments: str, environ: Mapping[str, str] | None = None) -> str:
    """The line that runs the host's python with these arguments, in its folder; never put a secret into it.

    >>> print(python_line(Host(name="a", target="a", python="/opt/python"), "-m", "paceline"))
    p=/opt/python; command -v "$p" >/dev/null 2>&1 || { echo "no $p" >&2; exit 98; }; exec "$p" -m paceline
    """
    parts = []
    if host.folder:
        folder = quoted_path(host.folder)
        parts.append(f"cd {folder} 2>/dev/null || {{ echo no {folder} >&2; exit {NO_FOLDER}; }}")
    if host.python:
        parts.append(f"p={quoted_path(host.python)}")
    else:
        parts.append(f'p={shlex.quote(sys.executable)}; [ -x "$p" ] || p=python3')
    parts.append(f'command -v "$p" >/dev/null 2>&1 || {{ echo "no $p" >&2; exit {NO_PYTHON}; }}')
    settled = "".join(f" {name}={shlex.quote(value)}" for name, value in (environ or {}).items())
    parts.append(f'exec{" env" if settled else ""}{settled} "$p" {shlex.join(arguments)}')
    return "; ".join(parts)


def quoted_path(path: str) -> str:
    """A path for a shell; a leading ~ is the home folder there.

    >>> quoted_path("~/my project"), quoted_path("/opt/a")
    ('"$HOME"/\\'my project\\'', '/opt/a')
    """
    if path == "~" or path.startswith("~/"):
        rest = path[2:]
        return '"$HOME"' + (f"/{shlex.quote(rest)}" if rest else "")
    return shlex.quote(path)


def start(host: Host, line: str, options: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Begin a line on a host, with pipes for all three; Ctrl+C does not reach it: the caller ends it, by its stdin."""
    try:
        return subprocess.Popen(
            command(host, line, options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd=os.path.expanduser("~") if host.is_here and host.folder else None,  # where ssh would begin
        )
    except OSError as error:
        name = command(host, line)[0]
        raise UsageError(f"{name!r} cannot be run ({error.strerror}); install OpenSSH, or set {SSH}.") from None


def run_on_all(
    lines: Mapping[str, str], hosts: Sequence[Host], inputs: Mapping[str, bytes] | None = None, timeout_s: float = 15.0
) -> list[Answer]:
    """Run a line on every host at once, by the host's name; `inputs` go to stdin. Answers come in the hosts' order."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    begun_s = time.monotonic()

    def finish(host: Host) -> Answer:
        process = started[host.name]
        try:
            out, err = process.communicate((inputs or {}).get(host.name, b""), timeout=timeout_s)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            out, err = _rest(process)
            code = None
        seconds = time.monotonic() - begun_s
        return Answer(host=host, code=code, stdout=out, stderr=text_of(err), seconds=seconds)

    try:
        for host in hosts:
            started[host.name] = start(host, lines[host.name])
        return at_once(finish, hosts)
    finally:
        for process in started.values():
            end(process)


def end(process: subprocess.Popen[bytes], patience_s: float = 0.0) -> None:
    """Nothing of it runs here any more: it may take so long by itself, then it is killed, with all that it started.
    Its pipes are closed by whoever reads them."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    if process.poll() is None:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GONE_S)


def _rest(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """End it; what it had said so far. Somebody who has left its process group may hold its pipes for ever."""
    end(process)
    try:
        return process.communicate(timeout=REST_S)
    except subprocess.TimeoutExpired as late:
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        return late.output or b"", late.stderr or b""


def listen(stream: IO[bytes], said: bytearray) -> threading.Thread:
    """Read to the end, so that nobody ever waits for us, and keep the last part in `said`."""

    def read() -> None:
        with suppress(OSError, ValueError), stream:
            while data := stream.read1(SAID_BYTES):  # type: ignore[attr-defined]
                said.extend(data)
                del said[:-SAID_BYTES]

    thread = threading.Thread(target=read, daemon=True, name="listen")
    thread.start()
    return thread


def at_once(call: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """Call with every item at the same time; results in their order, and the first error that was raised, if any.

    >>> at_once(lambda number: number + 1, [1, 2])
    [2, 3]
    """
    results: dict[int, B] = {}
    errors: list[BaseException] = []

    def one(number: int, item: A) -> None:
        try:
            results[number] = call(item)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=each, daemon=True) for each in enumerate(items)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(items))]


def addresses(hosts: Sequence[Host], timeout_s: float = 5.0) -> dict[str, str]:
    """Where tasks of other hosts reach each: its own word, else the hostname that `ssh -G` resolves its target to."""
    asked: dict[str, subprocess.Popen[bytes]] = {}
    found = {}
    try:
        for host in hosts:
            if not host.address and not host.is_here:
                asked[host.name] = _asked(host)
        for host in hosts:
            found[host.name] = host.address or "127.0.0.1"
            if (process := asked.get(host.name)) is not None:
                try:
                    out, _ = process.communicate(timeout=timeout_s)
                except subprocess.TimeoutExpired:
                    out, _ = _rest(process)
                found[host.name] = hostname_of(text_of(out)) or _bare(host)
    finally:
        for process in asked.values():
            end(process)
    return found


def _asked(host: Host) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [*words(), "-G", "--", host.target],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise UsageError(f"{words()[0]!r} cannot be run ({error.strerror}); install OpenSSH, or set {SSH}.") from None


def hostname_of(text: str) -> str:
    """The hostname in what `ssh -G` prints; "" where there is none.

    >>> hostname_of("user me\\nhostname 10.0.0.1\\nport 22\\n")
    '10.0.0.1'
    """
    return next((line.split()[1] for line in text.splitlines() if line.startswith("hostname ")), "").strip("[]")


def told(host: Host, code: int | None, stderr: str, seconds: float = 0.0) -> str:
    """One sentence for a command that failed on a host: what to do about it.

    >>> told(Host(name="b", target="me@b"), 255, "me@b: Permission denied (publickey).")[:57]
    'b takes none of your keys (Permission denied (publickey))'
    >>> told(Host(name="b", target="b"), 255, "ssh: Could not resolve hostname b: Name or service not known")
    'b is not known: `ssh b` finds no such host; check its spelling, or name its HostName in ~/.ssh/config.'
    """
    name, said = host.name, last_line(stderr)
    if code is None:
        return f"{name} did not answer within {seconds:.0f} s; look with `{by_hand(host)}` what it waits for."
    if code == NO_FOLDER:
        return f"{name} has no folder {host.folder!r}; make it there, or copy the script's with `run --sync-code`."
    if code == NO_PYTHON:
        return f'{name} has no python at {python_of(host)}; say where it is: python = "/path" in a cluster.toml.'
    if code == SSH_FAILED and not host.is_here:
        return _ssh_failed(host, stderr)
    if (module := missing_module(stderr)).startswith("paceline."):
        return (
            f"{name} has another paceline than this one in {python_of(host)}, without {module}; install this one over "
            f"it, even where both have one number: {pip_line(host, OVER)} (or pip install a copy of its folder there)."
        )
    if module:
        lacks = "no paceline" if module == "paceline" else f"no package {module}, which paceline needs,"
        return f"{name} has {lacks} in {python_of(host)}; install it there: {pip_line(host)}."
    return f"{name}: the command there ended with code {code}: {said or 'it said nothing'}."


def _ssh_failed(host: Host, stderr: str) -> str:
    name, by, said, config = host.name, by_hand(host), last_line(stderr), config_file()
    for sign, sentence in (
        ("REMOTE HOST IDENTIFICATION HAS CHANGED",
         f"The key of {name} has changed since you last connected; if that is right, run `ssh-keygen -R {_bare(host)}` "
         f"and then `{by}`."),
        ("Host key verification failed",
         f"The key of {name} is not known yet; connect once by hand to accept it: `{by}`."),
        ("Could not resolve hostname",
         f"{name} is not known: `{by}` finds no such host; check its spelling, or name its HostName in {config}."),
        ("UNPROTECTED PRIVATE KEY FILE",
         f"Your key for {name} is open to others, so ssh does not use it; run chmod 600 on it."),
        ("Too many authentication failures",
         f"{name} was offered too many keys; name the right one in {config} (IdentityFile, IdentitiesOnly yes)."),
        ("Permission denied",
         f"{name} takes none of your keys ({_reason(said)}), and no password is asked for; run `ssh-copy-id "
         f"{host.target}`, add the key to the agent (`ssh-add`), or name it in {config} (IdentityFile)."),
        ("Connection refused",
         f"{name} is there, and no ssh server listens (connection refused); start sshd there, or name its Port in "
         f"{config}."),
        ("timed out",
         f"{name} did not answer within {CONNECT_S} s; is it on, and may this machine reach it? Try `{by}`."),
        ("No route to host", f"There is no way to {name} (no route to host); is it on, and in this network?"),
        ("not responding",
         f"{name} does not answer any more ({said}); is it still on, and in this network?"),
        ("Network is unreachable",
         f"There is no way to {name} (network is unreachable); check this machine's network."),
    ):  # fmt: skip
        if sign in stderr:
            return sentence
    return f"ssh to {name} failed: {said or 'it said nothing'}; try `{by}`."


def missing_module(stderr: str) -> str:
    """The module that Python did not find; "" where that was not the matter.

    >>> missing_module("/usr/bin/python3: No module named paceline.launchers.hosts.probe")
    'paceline.launchers.hosts.probe'
    """
    found = re.search(r"No module named '?([\w.]+)", stderr)
    return found[1] if found else ""


def by_hand(host: Host) -> str:
    """What a person types to see the same."""
    return shlex.join([*words(), host.target])


def python_of(host: Host) -> str:
    """The python of a host, as far as it is known here."""
    return host.python or "python3"


def pip_line(host: Host, options: str = "") -> str:
    """What a person types to have there the paceline that is here; `options`: further ones of pip."""
    install = f"{host.python or 'python3'} -m pip install {options}paceline=={VERSION}"
    return f"`{install}`" if host.is_here else f"`{by_hand(host)} {install}`"


def last_line(text: str) -> str:
    """The last line that says something, without its end."""
    said = [line.strip() for line in text.splitlines() if line.strip()]
    return said[-1].rstrip(".") if said else ""


def text_of(raw: bytes) -> str:
    """What a process said, as far as it is text."""
    return raw.decode(errors="replace")


def check(answers: Sequence[Answer]) -> None:
    """Raise ClusterError with a sentence for each host that failed."""
    failures = [answer.failure for answer in answers if answer.failure]
    if failures:
        raise ClusterError(" ".join(failures))


def _reason(said: str) -> str:
    found = said.find("Permission denied")
    return said[found:] if found >= 0 else said


def _bare(host: Host) -> str:
    return host.target.rpartition("@")[2]
