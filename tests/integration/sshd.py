"""HOW do tests have hosts without any? Real ssh servers on loopback, with keys of the test's own.

Used by tests/integration/test_preflight.py and test_doctor.py; tests/hosts has hosts with a network of their own. Must
never read or change the user's own keys: everything is in the test's folder.
"""

import getpass
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from processes import Process, Processes

from paceline.launchers.ports import Reserved

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
CONFIG = """
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
{more}
"""
CLIENT = """
Host {name}
  HostName 127.0.0.1
  Port {port}
  User {user}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking yes
"""


class Servers:
    """Ssh servers of one test; `environ` makes `paceline` reach them by their names."""

    def __init__(self, processes: Processes, ports: Reserved, folder: Path) -> None:
        self._processes, self._ports, self.folder = processes, ports, folder
        self.started: list[Process] = []
        folder.mkdir()
        for name in ("key", "host_key", "other_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True, timeout=60)
        (folder / "authorized_keys").write_bytes((folder / "key.pub").read_bytes())
        (folder / "ssh_config").write_text("")
        (folder / "known_hosts").write_text("")

    def start(self, *names: str, **environ: object) -> None:
        """A server that is all of these hosts; whoever comes finds these variables there."""
        address = self._ports.addresses(1)[0]
        self.alias(*names, port=int(address.rpartition(":")[2]))
        more = "SetEnv " + " ".join(f'"{name}={value}"' for name, value in environ.items()) if environ else ""
        path = self.folder / f"sshd_config_{names[0]}"
        path.write_text(CONFIG.format(address=address, folder=self.folder, more=more))
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        server = self._processes.start(SSHD, "-D", "-e", "-f", path, name=f"sshd of {names}")
        server.wait_for("Server listening")
        self.started.append(server)

    def alias(self, *names: str, port: int) -> None:
        """Names in the client's configuration, and the key that is known for them."""
        key = (self.folder / "host_key.pub").read_text().split()
        with (self.folder / "ssh_config").open("a") as config, (self.folder / "known_hosts").open("a") as known:
            for name in names:
                config.write(CLIENT.format(name=name, port=port, user=getpass.getuser(), folder=self.folder))
            known.write(f"[127.0.0.1]:{port} {key[0]} {key[1]}\n")

    @property
    def environ(self) -> dict[str, str]:
        return {"PACELINE_SSH": f"ssh -F {self.folder / 'ssh_config'}"}

    def close(self) -> None:
        for server in self.started:
            server.popen.terminate()
            server.end()


def need_sshd() -> None:
    """Skip loudly where there is none."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("NOT TESTED: there is no sshd here; install openssh-server")
