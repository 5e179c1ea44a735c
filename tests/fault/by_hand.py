"""HOW do tests lose a ps? Two ps and two workers started by hand, so that nobody holds a ps's memory: one that is
killed and started again has nothing.

Used by test_host_lost and test_ps_moved.
"""

import json
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from processes import Gate, Process, Processes

from paceline.checkpoint.read import load_newest
from paceline.launchers.ports import Reserved

STEPS, STOP = 60, 20
WITHIN_S = 150.0  # of a task: it may be started before the others, and three more import torch meanwhile


class ByHand:
    """Two ps and two workers with one run folder; worker 0 stands at the gate after its step 20, or as `stops` say."""

    def __init__(
        self,
        processes: Processes,
        ports: Reserved,
        train: Path,
        gate: Gate,
        *flags: str,
        stops: Sequence[str] = (f"0:{STOP}",),
    ) -> None:
        ps, workers = ports.addresses(2), ports.addresses(2)
        self.run = processes.folder / "run"
        hosts = [f"--ps_hosts={','.join(ps)}", f"--worker_hosts={','.join(workers)}"]
        self._common = [*hosts, "--run-dir", self.run, "--ledger", *flags]
        self._processes, self._train = processes, train
        self._gates = [word for stop in stops for word in ("--gate", f"{stop}:{gate.path}")]
        self.ps = [self.start("ps", index) for index in (0, 1)]
        self.workers = [self.start("worker", index) for index in (0, 1)]

    def start(self, job: str, index: int, *flags: str) -> Process:
        words = [f"--job_name={job}", f"--task_index={index}", *self._common, *flags]
        script = [self._train, "--epochs", "3", "--batches", "20", *self._gates]
        program = script if job == "worker" else []
        return self._processes.start("paceline", "serve", *words, *program, name=f"{job}:{index}", within_s=WITHIN_S)

    def saved_step(self) -> int:
        """Of the newest checkpoint, once there is one."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if list((self.run / "checkpoints").glob("step-*/MANIFEST.json")):
                found = load_newest(self.run / "checkpoints")
                if found is not None:
                    return found.state.global_step
            time.sleep(0.02)  # a thread of the chief writes it
        raise AssertionError("no checkpoint was written")

    def lose(self, index: int) -> None:
        """Kill a ps, and start it again with nothing."""
        self.ps[index].signal(signal.SIGKILL)
        self.ps[index].end()
        self.ps[index] = self.start("ps", index)
        self.ps[index].wait_for("^Started server")

    def lose_with_chief(self, *indices: int) -> None:
        """Kill ps and the chief together, and start all of them again."""
        lost = [*(self.ps[index] for index in indices), self.workers[0]]
        for each in lost:
            each.signal(signal.SIGKILL)
        for each in lost:
            each.end()
        self._gates = []
        for index in indices:
            self.ps[index] = self.start("ps", index)
        self.workers[0] = self.start("worker", 0)

    def end(self) -> str:
        """All end well; what the workers said comes back."""
        for each in (*self.workers, *self.ps):
            each.ends_with(0)
        return "\n".join([*self.workers[0].lines, *self.workers[1].lines])

    def events(self, kind: str) -> list[dict[str, object]]:
        told = [json.loads(line) for line in (self.run / "telemetry" / "worker-0.jsonl").read_text().splitlines()]
        told += [json.loads(line) for line in (self.run / "telemetry" / "worker-1.jsonl").read_text().splitlines()]
        return [each for each in told if each.get("event") == kind or each.get("kind") == kind]


def went_back(said: str, lost: int, lineage: int = 1) -> list[int]:
    """To which global steps this ps was brought, by the checkpoints of the workers that said this."""
    line = rf"ps:{lost} lost its memory: it goes on from the checkpoint .*, at global step (\d+), lineage {lineage}"
    return [int(step) for step in re.findall(line, said)]


def served(process: Process) -> int:
    match = re.fullmatch(r"ps:\d+ served (\d+) updates", process.lines[-1])
    assert match, process.lines[-5:]
    return int(match[1])
