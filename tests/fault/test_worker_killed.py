"""kill -9 of a worker at every point of its step: the others finish, and what counts is what it had sent, once.

Each push adds exactly 1 (programs/count.py), so the weights say how many updates a shard has made, and its ledger says
of whom. After a kill the launcher starts the worker again, unless it may not.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from processes import Processes
from safetensors.numpy import load_file

from paceline.cluster.membership import first_incarnation
from paceline.launchers.ports import Reserved
from paceline.telemetry.ledger import Kind, read

pytestmark = pytest.mark.timeout(180)

COUNT = Path(__file__).parent / "programs" / "count.py"
STEPS, DIES_AT = 20, 8
LEASE = "--lease-s=2"  # the end of a connection is seen at once; a starved worker must not be evicted meanwhile
MODES = {
    "async": ["--mode=async"],
    "sync": ["--mode=sync"],
    "bounded": ["--mode=bounded", "--staleness=30"],
    "local": ["--mode=local", "--local-steps=1", "--outer-lr=1", "--outer-momentum=0"],
}
COUNTED = {"pulled": DIES_AT - 1, "backward": DIES_AT - 1, "half": DIES_AT - 1}  # later points: its last push too


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def nightly(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly("a point of a step that is wrong in one mode and lane only"))


class Told:
    """What a run has left behind: whose pushes each shard applied, and the weights that came of it."""

    def __init__(self, folder: Path, num_ps: int) -> None:
        self.summary = json.loads((folder / "summary.json").read_text())
        ledgers = [read(folder / "ledger" / f"ps-{index}.bin") for index in range(num_ps)]
        self.applied = [self._applied(ledger) for ledger in ledgers]
        self.updates = [max((r.version for r in ledger if r.kind == Kind.APPLY), default=0) for ledger in ledgers]
        newest = max(folder.glob("checkpoints/step-*"))
        weights = load_file(newest / "model.safetensors")
        self.weights = [set(weights[name].tolist()) for name in ("a", "b")]

    @staticmethod
    def _applied(ledger: list[Any]) -> dict[tuple[int, int], list[int]]:
        by_key: dict[tuple[int, int], list[int]] = defaultdict(list)
        for record in ledger:
            if record.kind == Kind.APPLY:
                by_key[record.other, record.incarnation].append(record.push_id)
        return by_key

    def shard_of(self, name: int) -> int:
        return name % len(self.applied)


def up_to(count: int) -> list[int]:
    return list(range(1, count + 1))


@pytest.mark.parametrize(
    ("mode", "lane", "num_ps", "point"),
    [
        ("sync", "shm", 1, "sent"),
        slow("sync", "shm", 1, "backward"),  # each mode on each lane, and each point
        slow("sync", "tcp", 2, "answered"),
        slow("async", "shm", 1, "pulled"),
        slow("async", "tcp", 2, "half"),
        slow("bounded", "shm", 2, "done"),
        slow("bounded", "tcp", 1, "answered"),
        slow("local", "shm", 1, "sent"),
        slow("local", "tcp", 2, "half"),
        *[nightly("async", "shm", 1, point) for point in ("backward", "sent", "answered", "done")],
        *[nightly("async", "tcp", 2, point) for point in ("pulled", "sent", "answered", "done")],
        *[nightly("sync", "shm", 1, point) for point in ("pulled", "answered", "done")],
        *[nightly("sync", "tcp", 2, point) for point in ("backward", "half", "sent", "done")],
        *[nightly("bounded", "shm", 2, point) for point in ("backward", "sent")],
        nightly("bounded", "tcp", 1, "half"),
        *[nightly("local", "shm", 1, point) for point in ("pulled", "done")],
        nightly("local", "tcp", 2, "sent"),
    ],
)
def test_I2_what_counts_is_what_had_left_it(
    mode: str, lane: str, num_ps: int, point: str, processes: Processes, tmp_path: Path
) -> None:
    flags = [
        *MODES[mode],
        f"--lane={lane}",
        f"--ps={num_ps}",
        "--placement=round_robin",
        "--ledger",
        "--max-restarts=0",
    ]
    script = [COUNT, f"--steps={STEPS}", f"--die=1:{point}:{DIES_AT}"]
    launcher = processes.paceline("run", *flags, LEASE, "--run-dir=made", *script).ends_with(1)
    assert "worker:1 was killed by SIGKILL; its log: made/logs/worker-1.log" in launcher.lines
    told = Told(tmp_path / "made", num_ps)
    assert told.summary["lost"] == ["worker:1"] and told.summary["workers"][0]["steps"] == STEPS
    counted = COUNTED.get(point, DIES_AT)
    is_each = mode in ("async", "bounded")
    for index, applied in enumerate(told.applied):
        # Half a frame to ps:0 leaves after the whole ones to the other shards.
        its = DIES_AT if point == "half" and index and is_each else counted
        assert applied == {(0, 1): up_to(STEPS), (1, 1): up_to(its)}
        assert told.updates[index] == (STEPS + its if is_each else STEPS)
    for name, weights in enumerate(told.weights):
        assert weights == {float(told.updates[told.shard_of(name)])}


@pytest.mark.parametrize("point", [nightly("backward"), slow("sent"), nightly("done")])
def test_I2_in_k_of_n_nothing_counts_twice_and_nobody_waits(point: str, processes: Processes, tmp_path: Path) -> None:
    flags = ["--mode=sync", "--replicas-to-aggregate=1", "--ps=2", "--placement=round_robin", "--ledger"]
    script = [COUNT, f"--steps={STEPS}", f"--die=1:{point}:{DIES_AT}"]
    processes.paceline("run", *flags, LEASE, "--max-restarts=0", "--run-dir=made", *script).ends_with(1)
    told = Told(tmp_path / "made", 2)
    assert told.applied[0] == told.applied[1], "I1"
    for key, pushes in told.applied[0].items():
        assert len(set(pushes)) == len(pushes) and max(pushes) <= (STEPS if key == (0, 1) else DIES_AT)
    assert told.weights == [{float(updates)} for updates in told.updates]


@pytest.mark.parametrize(
    ("killed", "mode"), [slow(0, "sync"), slow(1, "async"), nightly(0, "async"), nightly(1, "sync")]
)
def test_it_is_started_again_as_a_newer_one_and_the_others_go_on(
    killed: int, mode: str, processes: Processes, tmp_path: Path
) -> None:
    """The chief too. What its first life sent before it died counts once, and so does all of its second life."""
    flags = [f"--mode={mode}", "--ledger", LEASE, "--run-dir=made"]
    processes.paceline("run", *flags, COUNT, f"--steps={STEPS}", f"--die={killed}:sent:{DIES_AT}").ends_with(0)
    told = Told(tmp_path / "made", 1)
    assert told.summary["ok"] and told.summary["restarts"] == 1 and told.summary["lost"] == []
    (applied,) = told.applied
    assert applied.pop((killed, 1)) == up_to(DIES_AT)
    second = applied.pop((killed, first_incarnation(2)))
    assert second[-1] == STEPS and (second == up_to(STEPS) or mode == "sync")
    assert applied == {(1 - killed, 1): up_to(STEPS)}
    assert told.weights == [{float(told.updates[0])}] * 2


@pytest.mark.slow
def test_the_chief_is_lost_and_another_worker_writes_the_last_checkpoint(
    processes: Processes, train: Path, tmp_path: Path
) -> None:
    flags = ["--mode=sync", "--max-restarts=0", "--run-dir=made"]
    processes.paceline("run", *flags, train, "--kill-at=0:20").ends_with(1)
    summary = json.loads((tmp_path / "made" / "summary.json").read_text())
    assert summary["lost"] == ["worker:0"] and summary["workers"][1]["steps"] == 40
    assert (tmp_path / "made" / "checkpoints" / "step-00000040" / "MANIFEST.json").is_file()


@pytest.mark.slow
def test_by_hand_a_killed_worker_is_waited_for_and_then_given_up(
    processes: Processes, ports: Reserved, train: Path, tmp_path: Path
) -> None:
    workers = ",".join(ports.addresses(2))
    flags = [f"--ps_hosts={ports.addresses(1)[0]}", f"--worker_hosts={workers}", "--run_dir=made"]
    ps = processes.paceline("serve", "--job_name=ps", *flags, name="ps")
    tasks = [
        processes.paceline("serve", "--job_name=worker", f"--task_index={i}", *flags, train, "--kill-at=1:20")
        for i in (0, 1)
    ]
    tasks[1].ends_with(-9)
    tasks[0].ends_with(0)
    ps.ends_with(0)
    assert json.loads((tmp_path / "made" / "summary.json").read_text())["lost"] == ["worker:1"]


@pytest.mark.slow
def test_by_hand_a_worker_that_is_started_again_is_newer(
    processes: Processes, ports: Reserved, train: Path, tmp_path: Path
) -> None:
    """Its incarnation is the time of its start, so the ps knows which of two lives is the later one."""
    workers = ",".join(ports.addresses(2))
    flags = [f"--ps_hosts={ports.addresses(1)[0]}", f"--worker_hosts={workers}", "--run_dir=made", "--ledger"]
    ps = processes.paceline("serve", "--job_name=ps", *flags, name="ps")
    worker = ["serve", "--job_name=worker", *flags]
    dies = processes.paceline(*worker, "--task_index=1", train, "--kill-at=1:5")
    chief = processes.paceline(*worker, "--task_index=0", train, "--epochs=40")
    dies.ends_with(-9)
    processes.paceline(*worker, "--task_index=1", train).ends_with(0)
    chief.ends_with(0)
    ps.ends_with(0)
    lives = {r.incarnation for r in read(tmp_path / "made/ledger/ps-0.bin") if r.kind == Kind.APPLY and r.other == 1}
    first, second = sorted(lives)
    assert first < second
