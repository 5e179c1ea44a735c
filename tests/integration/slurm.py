"""HOW do tests get a real Slurm? Its controller and two of its hosts, 127.0.0.2 and 127.0.0.3, all on this machine.

Used through the fixture `slurm`, which needs root and the packages slurm-wlm and munge, and says so without them.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.launchers.ports import Reserved

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo")
READY_S = 60.0
CONFIG = """
ClusterName=paceline
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1
SlurmdParameters=config_overrides
{hosts}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A running cluster; `environ` lets Slurm's commands find it."""

    def __init__(self, folder: Path, ports: list[int]) -> None:
        self.folder = folder
        self.environ = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._started: list[subprocess.Popen[bytes]] = []
        host = socket.gethostname().partition(".")[0]
        hosts = "\n".join(
            f"NodeName=127.0.0.{last} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 State=UNKNOWN"
            for last, port in zip((2, 3), ports[1:], strict=True)
        )
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, host=host, control_port=ports[0], hosts=hosts))
        for name in ("munge", "state", "spool-127.0.0.2", "spool-127.0.0.3"):
            (folder / name).mkdir(mode=0o700)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)

    def start(self) -> None:
        munge = self.folder / "munge"
        places = [f"--{what}-file={munge / what}" for what in ("key", "pid", "log", "seed")]
        self._start("munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *places)
        self._wait_for("munge's socket", (munge / "socket").exists)
        self._start("slurmctld", "-D")
        for last in (2, 3):
            self._start("slurmd", "-D", "-N", f"127.0.0.{last}")
        self._wait_for("two idle hosts", self._is_idle)

    def stop(self) -> None:
        for process in reversed(self._started):
            process.terminate()
        for process in self._started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(60)

    def _start(self, *command: str) -> None:
        environ = {**os.environ, **self.environ}
        with (self.folder / f"{command[0]}.output").open("ab") as output:
            self._started.append(subprocess.Popen(command, env=environ, stdout=output, stderr=output))

    def _is_idle(self) -> bool:
        environ = {**os.environ, **self.environ}
        told = subprocess.run(["sinfo", "-h", "-o", "%D %T"], env=environ, capture_output=True, text=True, timeout=120)
        return told.stdout.split() == ["2", "idle"]

    def _wait_for(self, what: str, is_there: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + READY_S
        while not is_there():
            logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log"))
            assert time.monotonic() < deadline_s, f"Slurm has no {what} after {READY_S:.0f} s:\n{logs}"
            assert all(process.poll() is None for process in self._started), f"a part of Slurm ended:\n{logs}"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"Slurm is not installed ({', '.join(missing)}): apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("a Slurm of the tests' own needs root")
    with tempfile.TemporaryDirectory(prefix="paceline-slurm-") as folder, Reserved() as reserved:
        ports = [int(address.rpartition(":")[2]) for address in reserved.addresses(3)]
        made = Slurm(Path(folder), ports)
        try:
            made.start()
            yield made
        finally:
            made.stop()
