"""HOW do tests start a cluster by hand over hosts? Each task with `paceline serve` on the host it is placed on.

Used by tests/hosts. The run folder is on storage that all hosts share, as a network file system is.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from processes import Process
from running_hosts import RunningHost

from paceline.checkpoint.read import load_newest

PS_PORT, WORKER_PORT = 2222, 3333


class Placed:
    """Tasks on hosts: `ps` and `workers` say on which host each one is."""

    def __init__(
        self, folder: Path, ps: Sequence[RunningHost], workers: Sequence[RunningHost], flags: Sequence[object] = ()
    ) -> None:
        self.run = folder / "run"
        self._at = {("ps", i): host for i, host in enumerate(ps)}
        self._at |= {("worker", i): host for i, host in enumerate(workers)}
        self.ps_hosts = ",".join(host.at(PS_PORT + i) for i, host in enumerate(ps))
        self.worker_hosts = ",".join(host.at(WORKER_PORT + i) for i, host in enumerate(workers))
        self._flags = ["--run-dir", self.run, "--ledger", *flags]

    def start(
        self,
        job: str,
        index: int,
        *script: object,
        place: Sequence[object] = (),
        flags: Sequence[object] = (),
        on: RunningHost | None = None,
    ) -> Process:
        """Become this task there; `place`: TF1's flags in another form than usual."""
        usual = (f"--job_name={job}", f"--task_index={index}")
        usual += (f"--ps_hosts={self.ps_hosts}", f"--worker_hosts={self.worker_hosts}")
        host = on or self._at[job, index]
        return host.paceline("serve", *(place or usual), *self._flags, *flags, *script, name=f"{job}:{index}")

    def start_all(self, *script: object) -> dict[str, Process]:
        return {f"{j}:{i}": self.start(j, i, *(script if j == "worker" else ())) for j, i in self._at}

    def summary(self) -> dict[str, object]:
        found: dict[str, object] = json.loads((self.run / "summary.json").read_text())
        return found

    def lanes(self) -> dict[tuple[str, str], str]:
        """How each worker spoke with each ps in the end."""
        pairs = self.summary()["pairs"]
        assert isinstance(pairs, list)
        return {(pair["worker"], pair["ps"]): pair["lane"] for pair in pairs}


def end(tasks: Mapping[str, Process]) -> None:
    """All end well, workers first."""
    for name in sorted(tasks, reverse=True):
        tasks[name].ends_with(0)


def saved_step(run: Path) -> int:
    """Of the newest checkpoint, once there is one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if list((run / "checkpoints").glob("step-*/MANIFEST.json")):
            found = load_newest(run / "checkpoints")
            if found is not None:
                return found.state.global_step
        time.sleep(0.02)  # a thread of the chief writes it
    raise AssertionError("no checkpoint was written")
