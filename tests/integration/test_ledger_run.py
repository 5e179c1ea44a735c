"""I1, I2, I5 on real processes: what every task wrote down agrees, whoever was late, died or came back.

Every test here ends with `paceline verify` on its runs (fixture `processes`); these also look at what was written.
"""

import json
from itertools import groupby
from pathlib import Path

import pytest
from processes import Processes

from paceline.telemetry import ledger
from paceline.telemetry import ledger as led
from paceline.telemetry.ledger import Kind, Record

pytestmark = pytest.mark.timeout(180)
ROUNDS = [
    pytest.param(["--workers=3", "--replicas-to-aggregate=2", "--lane=shm"], 2, id="2 of 3, shm"),
    pytest.param(["--workers=2", "--replicas-to-aggregate=3", "--lane=tcp"], 3, id="3 of 2, tcp"),
    pytest.param(
        ["--workers=3", "--replicas-to-aggregate=2", "--grace-ms=20%", "--lane=tcp"], 2, id="2 of 3 and a grace, tcp",
    ),
]  # fmt: skip


def written(folder: Path, task: str) -> list[Record]:
    return ledger.read(folder / "made" / "ledger" / f"{task}.bin")


NIGHTLY = pytest.mark.nightly("a ledger that is wrong in one kind of round only, or when a worker dies in it")


def of_kind(records: list[Record], kind: Kind) -> list[Record]:
    return [record for record in records if record.kind == kind]


def rounds(records: list[Record]) -> dict[int, list[tuple[int, ...]]]:
    applied = [(r.version, r.other, r.incarnation, r.push_id, r.amount) for r in of_kind(records, Kind.APPLY)]
    return {version: [each[1:] for each in made] for version, made in groupby(applied, key=lambda each: each[0])}


@pytest.mark.parametrize(
    ("flags", "wanted", "kill"),
    [
        pytest.param(
            *each.values,
            kill,
            marks=pytest.mark.slow if (at % 2 == 0) == bool(kill) else NIGHTLY,
            id=f"{each.id}, {'worker 1 is killed' if kill else 'nobody dies'}",
        )
        for at, each in enumerate(ROUNDS)
        for kill in ("", "1:20")
    ],
)
def test_I1_every_ledger_has_the_same_contributors(
    flags: list[str], wanted: int, kill: str, processes: Processes, train: Path, tmp_path: Path
) -> None:
    script = [train, f"--kill-at={kill}"] if kill else [train]
    own = ["--mode=sync", "--ps=3", "--max-restarts=0", *flags, "--run-dir=made"]
    processes.paceline("run", *own, *script).ends_with(1 if kill else 0)
    first, *others = [rounds(written(tmp_path, f"ps-{index}")) for index in range(3)]
    assert list(first) == list(range(1, len(first) + 1)), "every version once, in order"
    last = len(first)
    decided = {version: parts for version, parts in first.items() if version < last}
    for other in others:  # one that died alone may have left the last round on its way
        assert {version: parts for version, parts in other.items() if version < last} == decided
        assert other.get(last, first[last] if kill else None) == first[last]
    whole = [version for version, parts in first.items() if sum(part[-1] for part in parts) >= wanted]
    assert len(whole) > len(first) / 2, "most rounds have their K"


@pytest.mark.slow  # quick, and in rounds: test_run
def test_what_each_side_wrote_down_is_the_same(processes: Processes, train: Path, tmp_path: Path) -> None:
    processes.paceline("run", "--ps=2", "--run-dir=made", train).ends_with(0)
    for worker in range(2):
        mine = written(tmp_path, f"worker-{worker}")
        for ps in range(2):
            applied = [r.push_id for r in of_kind(written(tmp_path, f"ps-{ps}"), Kind.APPLY) if r.other == worker]
            assert applied == [r.push_id for r in of_kind(mine, Kind.PUSH) if r.other == ps] == list(range(1, 41))
    told = processes.paceline("verify", "made", "--json").ends_with(0)
    proof = json.loads(told.lines[-1])
    assert proof["ok"] and proof["violations"] == proof["missing"] == []
    size = sum(path.stat().st_size for path in (tmp_path / "made" / "ledger").iterdir())
    assert proof["records"] == size / led.RECORD_BYTES


@pytest.mark.slow
def test_a_doctored_ledger_is_told(processes: Processes, train: Path, tmp_path: Path) -> None:
    processes.paceline("run", "--mode=sync", "--run-dir=made", train).ends_with(0)
    path = tmp_path / "made" / "ledger" / "ps-0.bin"
    records = ledger.read(path)
    at = next(i for i, record in enumerate(records) if (record.kind, record.version) == (Kind.APPLY, 7))
    left = [r._replace(number=place) for place, r in enumerate([*records[:at], *records[at + 1 :]], 1)]
    path.write_bytes(b"".join(map(ledger.pack, left)))
    told = processes.paceline("verify", "made").ends_with(1)
    assert "ps:0 record" in told.text and "I1: a round of 2 workers, and these are in it" in told.text
    assert "I5: push 7 to ps:0 was acknowledged and never applied" in told.text
    processes.leave_unverified("this test has doctored the ledger, and has seen that it is told")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", *(pytest.param(mode, marks=NIGHTLY) for mode in ("sync", "bounded"))])
def test_a_worker_that_came_back_goes_on_in_its_ledger(
    mode: str, processes: Processes, train: Path, tmp_path: Path
) -> None:
    own = [f"--mode={mode}", "--ps=2", "--max-restarts=1", "--run-dir=made"]
    processes.paceline("run", *own, train, "--kill-at=1:10").end()  # both of its lives die there
    starts = [r.incarnation for r in of_kind(written(tmp_path, "worker-1"), Kind.START)]
    assert len(starts) == 2 and starts[1] > starts[0]
    entered = {r.incarnation for r in of_kind(written(tmp_path, "ps-0"), Kind.ENTER) if r.other == 1}
    assert entered == set(starts)
