"""A ps whose memory is gone: the workers bring the newest checkpoint, or what they have, and go on by themselves.

Tasks are started by hand here, so that nobody holds a ps's memory: one that is killed and started again has nothing.
"""

import json
import re
import signal
import time
from pathlib import Path

import pytest
from processes import Gate, Process, Processes

from paceline.checkpoint.read import load_newest
from paceline.launchers.ports import Reserved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
STEPS, STOP = 60, 20


class ByHand:
    """Two ps and two workers with one run folder; worker 0 stands at the gate after its step 20."""

    def __init__(self, processes: Processes, ports: Reserved, train: Path, gate: Gate, *flags: str) -> None:
        ps, workers = ports.addresses(2), ports.addresses(2)
        self.run = processes.folder / "run"
        hosts = [f"--ps_hosts={','.join(ps)}", f"--worker_hosts={','.join(workers)}"]
        self._common = [*hosts, "--run-dir", self.run, "--ledger", *flags]
        self._processes, self._train, self._gate = processes, train, gate
        self.ps = [self.start("ps", index) for index in (0, 1)]
        self.workers = [self.start("worker", index) for index in (0, 1)]

    def start(self, job: str, index: int) -> Process:
        words = [f"--job_name={job}", f"--task_index={index}", *self._common]
        script = [self._train, "--epochs", "3", "--batches", "20", "--gate", f"0:{STOP}:{self._gate.path}"]
        return self._processes.paceline("serve", *words, *(script if job == "worker" else []), name=f"{job}:{index}")

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

    def events(self, kind: str) -> list[dict[str, object]]:
        told = [json.loads(line) for line in (self.run / "telemetry" / "worker-0.jsonl").read_text().splitlines()]
        told += [json.loads(line) for line in (self.run / "telemetry" / "worker-1.jsonl").read_text().splitlines()]
        return [each for each in told if each.get("event") == kind or each.get("kind") == kind]


def served(process: Process) -> int:
    match = re.fullmatch(r"ps:\d+ served (\d+) updates", process.lines[-1])
    assert match, process.lines[-5:]
    return int(match[1])


@pytest.mark.parametrize("lost", [0, 1])
def test_in_sync_all_shards_go_back_to_the_checkpoint(
    lost: int, processes: Processes, ports: Reserved, train: Path, gate: Gate
) -> None:
    cluster = ByHand(processes, ports, train, gate, "--mode", "sync", "--save-every", "5")
    arrival = gate.arrival()
    step = cluster.saved_step()
    cluster.lose(lost)
    arrival.release()
    for each in (*cluster.workers, *cluster.ps):
        each.ends_with(0)
    said = "\n".join([*cluster.workers[0].lines, *cluster.workers[1].lines])
    told = re.findall(
        rf"ps:{lost} lost its memory: it goes on from the checkpoint .*, at global step (\d+), lineage 1", said
    )
    assert told and int(told[0]) >= step
    back = int(told[0])
    # Each worker makes its 60 steps; the one that was on its way when the ps died may be void.
    counts = [served(each) for each in cluster.ps]
    assert counts[0] == counts[1]
    assert back + (STEPS - STOP) - 2 <= counts[0] <= back + (STEPS - STOP)
    (event,) = cluster.events("restore")
    assert (event["version"], event["lineage"]) == (back, 1)


@pytest.mark.parametrize("lost", [0, 1])
def test_in_async_only_the_lost_shard_goes_back(
    lost: int, processes: Processes, ports: Reserved, train: Path, gate: Gate
) -> None:
    cluster = ByHand(processes, ports, train, gate, "--mode", "async", "--save-every", "5")
    arrival = gate.arrival()
    cluster.saved_step()
    cluster.lose(lost)
    arrival.release()
    for each in (*cluster.workers, *cluster.ps):
        each.ends_with(0)
    said = "\n".join([*cluster.workers[0].lines, *cluster.workers[1].lines])
    told = re.findall(
        rf"ps:{lost} lost its memory: it goes on from the checkpoint .*, at global step (\d+), lineage 1", said
    )
    assert len(told) == 1
    kept = served(cluster.ps[1 - lost])
    assert 2 * STEPS - 2 <= kept <= 2 * STEPS  # nothing of the other shard is lost
    assert served(cluster.ps[lost]) < kept


def test_reseeded_from_a_worker(processes: Processes, ports: Reserved, train: Path, gate: Gate) -> None:
    cluster = ByHand(processes, ports, train, gate, "--mode", "sync", "--save-every", "none", "--reseed")
    arrival = gate.arrival()
    cluster.lose(1)
    arrival.release()
    for each in (*cluster.workers, *cluster.ps):
        each.ends_with(0)
    (event,) = cluster.events("reseed")
    assert STOP - 1 <= int(str(event["version"])) <= STOP + 1
    counts = [served(each) for each in cluster.ps]
    assert counts[0] == counts[1] and STEPS - 3 <= counts[0] <= STEPS + 1


def test_without_a_checkpoint_it_ends_with_the_reason(
    processes: Processes, ports: Reserved, train: Path, gate: Gate
) -> None:
    cluster = ByHand(processes, ports, train, gate, "--mode", "sync", "--save-every", "none", "--wait-s", "10")
    arrival = gate.arrival()
    cluster.lose(1)
    arrival.release()
    chief = cluster.workers[0].ends_with(3)
    assert "ps:1 lost its memory, and there is no checkpoint to go back to" in chief.text
    assert "--reseed" in chief.text
    for each in (cluster.workers[1], *cluster.ps):
        each.end()
