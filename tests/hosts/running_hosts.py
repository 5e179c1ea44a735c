"""HOW do tests get hosts? Network namespaces at a switch, with an sshd in each, commands that run there, and cables
that can be limited, cut and mended.

Made by the fixture `hosts`. A host has a folder of its own, where ssh puts whoever comes, and an environment of its
own; the file system is the machine's. Must never touch the machine's own network, nor leave anything running.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from processes import AUDIT, BIN, GONE_S, Process, Processes

from paceline.lab.measuring import hosts as namespaces

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
PRIVILEGES = Path("/run/sshd")  # sshd wants it, and a machine whose sshd never ran does not have it
SSH = "PACELINE_SSH"  # the ssh command, with its options, that the launcher uses
HOURS_S = 3600.0
WITHIN_S = 150.0  # of a task: it may be started before the others, and they import torch meanwhile
NOT_A_TASK = ("sshd", "sshd-session", "sshd-auth")

SSHD_CONFIG = """
ListenAddress {address}:22
HostKey {folder}/host_key
AuthorizedKeysFile {keys}/client.pub
PidFile none
StrictModes no
UsePAM no
UseDNS no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
MaxStartups 100
SetEnv {environ}
ForceCommand cd {folder} && exec "$SHELL" -c "$SSH_ORIGINAL_COMMAND"
"""
SSH_CONFIG = """
{aliases}
Host *
  User root
  IdentityFile {keys}/client
  IdentitiesOnly yes
  UserKnownHostsFile {keys}/known_hosts
  StrictHostKeyChecking yes
"""


def lacking() -> str:
    """Why there can be no such hosts here; nothing when there can."""
    missing = [] if SSHD else ["sshd"]
    missing += [tool for tool in ("ssh", "ssh-keygen", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} cannot be found"
    return namespaces.lacking()


class RunningHost:
    """One host. `name` is how ssh knows it besides its address; `folder` is where ssh puts whoever comes."""

    def __init__(self, name: str, host: namespaces.Host, folder: Path, processes: Processes) -> None:
        self.name = name
        self.address = host.address
        self.folder = folder
        self.ssh = ""
        self.enter = host.enter
        self.limit, self.cut, self.mend = host.limit, host.cut, host.mend
        self._pid = host.pid
        self._processes = processes
        self._sshd: Process | None = None

    def at(self, port: int) -> str:
        return f"{self.address}:{port}"

    def start(self, *words: object, name: str = "", **options: Any) -> Process:
        """Start a command here, as `Processes.start` does."""
        name = name or " ".join(str(word) for word in words[:3])
        return self._processes.start(*self.enter, *words, name=name, **{SSH: self.ssh, "within_s": WITHIN_S, **options})

    def paceline(self, *words: object, name: str = "", **options: Any) -> Process:
        return self.start(BIN / "paceline", *words, name=name or f"paceline {words[0]} on {self.name}", **options)

    def ssh_to(self, other: "RunningHost", command: str) -> Process:
        """One command on another host, by ssh from here."""
        return self.start(*self.ssh.split(), other.name, command, name=f"ssh {other.name}")

    def running(self, with_ssh: bool = False) -> list[psutil.Process]:
        """What runs here, besides what keeps the namespace, and sshd, unless it is asked for."""
        here = self._namespace(self._pid)
        return [
            each
            for each in psutil.process_iter(["name"])
            if self._namespace(each.pid) == here
            and each.pid != self._pid
            and (with_ssh or each.info["name"] not in NOT_A_TASK)
        ]

    @staticmethod
    def _namespace(pid: int) -> int | None:
        with suppress(OSError):
            return os.stat(f"/proc/{pid}/ns/net").st_ino
        return None

    def serve_ssh(self, keys: Path) -> None:
        """Have an sshd listen, with a key of its own."""
        self.folder.mkdir(parents=True)
        make_key(self.folder / "host_key")
        own = {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": self.folder, "XDG_CONFIG_HOME": self.folder / "config"}
        audit = {"PYTHONPATH": AUDIT, "PACELINE_TEST_AUDIT": self._processes.folder / "audit.txt"}
        told = {**own, **audit, "OMP_NUM_THREADS": "1", **self._processes.mark}
        config = SSHD_CONFIG.format(
            address=self.address, folder=self.folder, keys=keys, environ=" ".join(f'"{k}={v}"' for k, v in told.items())
        )
        (self.folder / "sshd_config").write_text(config)
        command = [*self.enter, str(SSHD), "-D", "-e", "-f", str(self.folder / "sshd_config")]
        self._sshd = Process(command, self.folder, dict(os.environ), f"sshd on {self.name}", False, HOURS_S)
        self._sshd.wait_for("Server listening")

    def stop_ssh(self) -> None:
        """End sshd, and whatever it serves: as if the host had lost its power, for the others."""
        if self._sshd is not None:
            self._sshd.popen.kill()
        self.kill(with_ssh=True)  # what it serves holds its output open
        if self._sshd is not None:
            self._sshd.end()

    def kill(self, with_ssh: bool = False) -> None:
        """End everything that runs here, at once; what sshd is for those who are logged in only if asked."""
        for each in self.running(with_ssh):
            with suppress(psutil.Error):
                each.kill()


def make_key(path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=120)


@contextmanager
def running_hosts(count: int, folder: Path, processes: Processes) -> Iterator[list[RunningHost]]:
    """So many hosts, h0 first; at the end nothing of them is left, and whoever left something running is told so."""
    folder.mkdir()
    PRIVILEGES.mkdir(exist_ok=True)
    make_key(folder / "client")
    with ExitStack() as stack:
        made = stack.enter_context(namespaces.hosts(count, is_switched=True))
        found = [RunningHost(f"h{i}", host, folder / f"h{i}", processes) for i, host in enumerate(made)]
        for host in found:
            stack.callback(host.stop_ssh)
            host.serve_ssh(folder)
        config = ssh_config(found, folder)
        for host in found:
            host.ssh = f"ssh -F {config}"
        yield found
        left = left_running(found)
    assert not left, f"these processes were left running: {left}"


def ssh_config(found: Sequence[RunningHost], keys: Path) -> Path:
    """What ssh needs to know, by each host's name or address."""
    known = [f"{host.address} {(host.folder / 'host_key.pub').read_text()}" for host in found]
    (keys / "known_hosts").write_text("".join(known))
    aliases = "\n".join(f"Host {host.name}\n  HostName {host.address}" for host in found)
    path = keys / "ssh_config"
    path.write_text(SSH_CONFIG.format(aliases=aliases, keys=keys))
    return path


def left_running(found: Sequence[RunningHost]) -> list[str]:
    """What runs on them after the time in which everything should be gone; stop_ssh kills it."""
    _, left = psutil.wait_procs([each for host in found for each in host.running()], timeout=GONE_S)
    told = []
    for each in left:
        with suppress(psutil.Error):
            told.append(f"{each.pid}: {' '.join(each.cmdline())}")
    return told
