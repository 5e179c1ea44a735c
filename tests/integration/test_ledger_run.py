"""I1 on real processes: every shard's ledger names the same contributors for a round, whoever was late or died."""

from itertools import groupby
from pathlib import Path

import pytest
from processes import Processes

from paceline.telemetry import ledger
from paceline.telemetry.ledger import Applied

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]
ROUNDS = [
    pytest.param(["--workers=3", "--replicas-to-aggregate=2", "--lane=shm"], 2, id="2 of 3, shm"),
    pytest.param(["--workers=2", "--replicas-to-aggregate=3", "--lane=tcp"], 3, id="3 of 2, tcp"),
    pytest.param(
        ["--workers=3", "--replicas-to-aggregate=2", "--grace-ms=20%", "--lane=tcp"], 2, id="2 of 3 and a grace, tcp",
    ),
]  # fmt: skip


def rounds(path: Path) -> dict[int, list[Applied]]:
    return {version: list(records) for version, records in groupby(ledger.read(path), key=lambda r: r.version)}


@pytest.mark.parametrize(("flags", "wanted"), ROUNDS)
@pytest.mark.parametrize("kill", [pytest.param("", id="nobody dies"), pytest.param("1:20", id="worker 1 is killed")])
def test_I1_every_ledger_has_the_same_contributors(
    flags: list[str], wanted: int, kill: str, processes: Processes, train: Path, tmp_path: Path
) -> None:
    script = [train, f"--kill-at={kill}"] if kill else [train]
    run = processes.paceline("run", "--mode=sync", "--ps=3", "--ledger", *flags, "--run-dir=made", *script)
    run.ends_with(1 if kill else 0)
    first, *others = [rounds(tmp_path / "made" / "ledger" / f"ps-{index}.bin") for index in range(3)]
    assert list(first) == list(range(1, len(first) + 1)), "every version once, in order"
    assert all(other == first for other in others)
    whole = [version for version, records in first.items() if sum(r.gradients for r in records) >= wanted]
    assert len(whole) > len(first) / 2, "most rounds have their K"
    pushed = [(r.worker, r.incarnation, r.push_id) for records in first.values() for r in records]
    assert len(set(pushed)) == len(pushed), "no push is in two rounds"


def test_async_writes_down_every_push_on_every_shard(processes: Processes, train: Path, tmp_path: Path) -> None:
    processes.paceline("run", "--ps=2", "--ledger", "--run-dir=made", train).ends_with(0)
    for index in range(2):
        records = ledger.read(tmp_path / "made" / "ledger" / f"ps-{index}.bin")
        pushed = sorted((r.worker, r.push_id) for r in records)
        assert pushed == [(worker, push_id) for worker in (0, 1) for push_id in range(1, 41)]
