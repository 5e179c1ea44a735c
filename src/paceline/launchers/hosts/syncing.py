"""HOW does a script get to other hosts? `--sync-code`: its folder is copied to each host's own, all hosts at once.

Called by hosts/many. By rsync, where both have it, else by tar through ssh. Must never remove anything there,
write into the folder that it reads (a host that sees the same folder needs no copy), nor copy a key.

What is copied: the script's folder, to where the script is found from the host's folder; a module's: this folder.
"""

import os
import secrets
import shlex
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec

from paceline.cluster.hosts import Host
from paceline.errors import ClusterError, UsageError
from paceline.launchers.entry import Program
from paceline.launchers.hosts import ssh
from paceline.launchers.private import for_rsync, private_below

EXCLUDED = ("runs", ".git", ".venv", "__pycache__")
COPY_S = 600.0
SAID_S = 1.0  # for what a copy says last
SAME, RSYNC, TAR = "same", "rsync", "tar"
Copy = subprocess.Popen[bytes]


class Code(msgspec.Struct, frozen=True):
    """What is copied, and where it goes: below a host's folder; the program as it is called there."""

    source: Path
    below: str
    program: Program


class Way(msgspec.Struct, frozen=True):
    """How a host gets it, and its folder there."""

    host: Host
    how: str
    folder: str = ""


def code_of(program: Program, cwd: Path) -> Code:
    """The script's folder, where it lies below this one, else with the script at the top.

    >>> code_of(Program(script="src/train.py"), Path("/work")).below
    'src'
    >>> code_of(Program(script="/else/train.py"), Path("/work")).program.script
    'train.py'
    """
    if program.is_module:
        return Code(cwd, ".", program)
    script = Path(os.path.normpath(cwd / program.script))
    if script.is_relative_to(cwd):
        relative = script.relative_to(cwd)
        return Code(script.parent, str(relative.parent), msgspec.structs.replace(program, script=str(relative)))
    return Code(script.parent, ".", msgspec.structs.replace(program, script=script.name))


def sync(code: Code, hosts: Sequence[Host]) -> list[Way]:
    """Copy it to all hosts; ClusterError with a sentence for each that did not get it."""
    if code.source in (Path.home(), Path("/")):
        raise UsageError(f"--sync-code would copy all of {code.source}; put the script into a folder of its own.")
    with token_in(code.source) as token:
        ways = look(code, hosts, token)
    copies: list[Copy] = []
    try:
        failures = ssh.at_once(lambda way: copy(code.source, way, copies), [way for way in ways if way.how != SAME])
    finally:
        for process in copies:  # after Ctrl+C they run
            ssh.end(process)
    if any(failures):
        raise ClusterError(" ".join(failure for failure in failures if failure))
    return ways


@contextmanager
def token_in(folder: Path) -> Iterator[str]:
    """A file by whose name a folder is known again from another host."""
    token = f".paceline-{secrets.token_hex(8)}"
    try:
        (folder / token).touch()
    except OSError:  # then no host can have it as its own, either
        yield token
        return
    try:
        yield token
    finally:
        with suppress(OSError):
            (folder / token).unlink()


def sees(folder: Path | str, token: str) -> bool:
    """Whether this is the folder of that token, from wherever one looks, and can be written to from here."""
    return Path(folder, token).exists() and os.access(folder, os.W_OK)


def look(code: Code, hosts: Sequence[Host], token: str) -> list[Way]:
    """Make the folder on every host, and see how it can be filled."""
    has_rsync = shutil.which("rsync") is not None
    lines = {}
    for host in hosts:
        folder = f"{ssh.quoted_path(host.folder)}/{shlex.quote(code.below)}"
        how = f"[ -e {token} ] && echo {SAME} || {{ command -v rsync >/dev/null && echo {RSYNC} || echo {TAR}; }}"
        lines[host.name] = f"mkdir -p {folder} && cd {folder} && pwd && {how}"
    answers = ssh.run_on_all(lines, hosts)
    ssh.check(answers)
    ways = []
    for answer in answers:
        folder, how = ssh.text_of(answer.stdout).splitlines()[-2:]
        ways.append(Way(answer.host, TAR if how == RSYNC and not has_rsync else how, folder))
    return ways


def copy(source: Path, way: Way, copies: list[Copy]) -> str:
    """One sentence when it failed; "" when it did not. What is started for it is among `copies`."""
    name = way.host.name
    try:
        process = _rsync(source, way) if way.how == RSYNC else _tar(way)
        copies.append(process)
        code, said = _copied(process, source)
    except OSError as error:
        return f"The code could not be copied to {name}: {error}."
    return f"The code could not be copied to {name}: {ssh.last_line(said) or f'{way.how} failed'}." if code else ""


def _copied(process: Copy, source: Path) -> tuple[int, str]:
    """Its exit code, and what it said; a tar gets the folder through its stdin. Killed when it takes too long."""
    said = bytearray()
    readers = [ssh.listen(pipe, said) for pipe in (process.stdout, process.stderr) if pipe is not None]
    limit = threading.Timer(COPY_S, ssh.end, [process])
    limit.daemon = True
    limit.start()
    try:
        if process.stdin is not None:
            with suppress(BrokenPipeError), process.stdin:
                pack(source, process.stdin)
        code = process.wait()
    finally:
        limit.cancel()
        ssh.end(process)
    for reader in readers:
        reader.join(SAID_S)
    return code, ssh.text_of(bytes(said))


def _rsync(source: Path, way: Way) -> Copy:
    there = way.folder if way.host.is_here else f"{_bracketed(way.host.target)}:{way.folder}"
    excluded = [f"--exclude={name}" for name in [*EXCLUDED, *map(for_rsync, private_below(source, EXCLUDED))]]
    command = ["rsync", "-az", "--protect-args", *excluded, "-e", shlex.join([*ssh.words(), *ssh.OPTIONS])]
    return subprocess.Popen(
        [*command, "--", f"{source}/", f"{there}/"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _tar(way: Way) -> Copy:
    return ssh.start(way.host, f"cd {shlex.quote(way.folder)} && tar -x --no-same-owner -f -")


def pack(source: Path, stream: IO[bytes]) -> None:
    """A folder as a tar, without what is no code and what is private."""

    private = {f"./{path}" for path in private_below(source, EXCLUDED)}

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if Path(member.name).name in EXCLUDED or member.name in private else member

    with tarfile.open(fileobj=stream, mode="w|") as tar:
        tar.add(source, arcname=".", filter=kept)


def told(code: Code, ways: Sequence[Way]) -> str:
    """What the user reads about it."""
    parts = [f"{way.host.name} ({'the same folder' if way.how == SAME else way.how})" for way in ways]
    return f"Code: {code.source} copied to {', '.join(parts)}"


def _bracketed(target: str) -> str:
    """For rsync, whose colons are others."""
    user, at, name = target.rpartition("@")
    return f"{user}{at}[{name}]" if ":" in name else target
