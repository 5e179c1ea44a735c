"""A good run verifies, and no record of it can be dropped, doubled, moved or changed without being told.

The good runs are real ones, in this process; then their ledgers are doctored. Doctored records are numbered anew where
the point is that the *story* gives them away, not their numbers.
"""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import paceline
from paceline.cli import main
from paceline.errors import UsageError
from paceline.launchers.local import held
from paceline.modes.spec import ModeSpec
from paceline.telemetry import ledger, verify_ps, verify_worker
from paceline.telemetry import ledger as led
from paceline.telemetry.ledger import Kind, Ledger, Record
from paceline.telemetry.ledgers import note_cut, set_aside, verdict_of
from paceline.telemetry.paths import RunPaths
from paceline.telemetry.verify import Verdict, check
from paceline.wire.frames import Flag, Outcome

Run = dict[str, list[Record]]  # by the name of the file
LOCK = threading.Lock()
STEPS = 8
RUNS: dict[str, dict[str, Any]] = {
    "sync": {"ps": 2, "workers": 2, "mode": "sync"},
    "2 of 3": {"ps": 2, "workers": 3, "mode": "sync", "replicas_to_aggregate": 2},
    "3 of 2": {"ps": 2, "workers": 2, "mode": "sync", "replicas_to_aggregate": 3},
    "async": {"ps": 2, "workers": 2, "mode": "async"},
    "bounded": {"ps": 1, "workers": 2, "mode": "bounded", "staleness": 1},
}
# What nobody can change in secret. (Elsewhere one witness alone tells: why a worker left, or how new an answer was.)
PINNED = {
    "ps": {
        Kind.APPLY: {"other", "incarnation", "push_id", "version", "amount"},
        Kind.ROUND: {"push_id", "version", "amount"},
        Kind.ADD: {"other", "incarnation", "push_id", "version", "amount"},
        Kind.MODE: {"outcome", "version", "amount"},
        Kind.ENTER: {"other", "incarnation", "version"},
    },
    "worker": {
        Kind.START: {"other", "lineage"},
        Kind.PUSH: {"other", "push_id", "version", "lineage"},
        Kind.ANSWER: {"outcome", "other", "push_id"},
    },
}


def work(ctx: paceline.Context) -> None:
    with LOCK:
        torch.manual_seed(1)
        model = nn.Linear(4, 2)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for step in range(STEPS):
        optimizer.zero_grad()
        scale = float("nan") if (ctx.worker_index, step) == (1, 3) else 1.0
        (model(torch.ones(1, 4)).sum() * scale).backward()
        optimizer.step()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    made = {}
    for name, flags in RUNS.items():
        folder = tmp_path_factory.mktemp("run")
        paceline.launch(work, **flags, run_dir=str(folder), ledger=True, save_every="none")
        made[name] = {path.stem: ledger.read(path) for path in (folder / "ledger").glob("*.bin")}
    return made


def spec(name: str) -> ModeSpec:
    flags = {k: v for k, v in RUNS[name].items() if k in ("replicas_to_aggregate", "staleness")}
    return ModeSpec(name=RUNS[name]["mode"], **flags)


def verdict(run: Run, first_mode: ModeSpec | None = None) -> Verdict:
    by_job = {job: {int(n.split("-")[1]): r for n, r in run.items() if n.startswith(job)} for job in ("ps", "worker")}
    return check(by_job["ps"], by_job["worker"], first_mode)


def numbered(records: list[Record]) -> list[Record]:
    return [record._replace(number=number) for number, record in enumerate(records, 1)]


def told(found: Verdict, what: str) -> bool:
    return any(what in violation.what for violation in found.violations)


# --- good runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
def test_a_good_run_has_no_violation(name: str, runs: dict[str, Run]) -> None:
    found = verdict(runs[name], spec(name))
    assert found.violations == [] and found.lost == [] and found.missing == []
    assert found.records == sum(len(records) for records in runs[name].values())
    kinds = {record.kind for records in runs[name].values() for record in records}
    assert {Kind.START, Kind.MODE, Kind.ENTER, Kind.APPLY, Kind.PUSH, Kind.ANSWER, Kind.PULL, Kind.LEAVE} <= kinds
    assert (Kind.ROUND in kinds) == (RUNS[name]["mode"] == "sync")
    discarded = {(r.other, r.push_id): r.outcome for r in runs[name]["ps-0"] if r.kind == Kind.DISCARD}
    may_be_late = "replicas_to_aggregate" in RUNS[name]
    why = (Outcome.NOT_FINITE, Outcome.DISCARDED) if may_be_late else (Outcome.NOT_FINITE,)
    assert discarded[1, 4] in why, "the NaN"


def test_a_run_that_ended_anywhere_has_no_violation(runs: dict[str, Run]) -> None:
    """As after kill -9 of everything: the ps wrote first, so any later end of it fits any earlier end of a worker."""
    for name, run in runs.items():
        for worker in (n for n in run if n.startswith("worker")):
            for end in range(1, len(run[worker]), 7):
                cut = {**run, worker: run[worker][:end]}
                found = [v for v in verdict(cut).violations if "which it never pushed" not in v.what]
                found = [v for v in found if "which it never was" not in v.what]
                assert found == [], (name, worker, end)


# --- doctored runs --------------------------------------------------------------------------------------------------


def places(runs: dict[str, Run], kinds: set[Kind]) -> list[tuple[str, str, int]]:
    return [
        (name, file, index)
        for name, run in runs.items()
        for file, records in sorted(run.items())
        for index, record in enumerate(records)
        if record.kind in kinds
    ]


def kind_at(runs: dict[str, Run], place: tuple[str, str, int]) -> Kind:
    name, file, index = place
    return Kind(runs[name][file][index].kind)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_dropped_doubled_or_moved_record_is_told(runs: dict[str, Run], data: st.DataObject) -> None:
    name, file, index = data.draw(st.sampled_from(places(runs, set(Kind))))
    records = list(runs[name][file])
    how = data.draw(st.sampled_from(["drop", "double", "swap", "move"]))
    other = data.draw(st.integers(0, len(records) - 1))
    if how == "drop":
        if index == len(records) - 1:
            return  # as if it had never been written: the end of a ledger is where its task died
        del records[index]
    elif how == "double":
        records.insert(index, records[index])
    elif how == "swap":
        records[index], records[other] = records[other], records[index]
    else:
        records.insert(other, records.pop(index))
    if records != runs[name][file]:
        assert not verdict({**runs[name], file: records}).is_ok, (how, index, other)


def test_a_changed_record_is_told(runs: dict[str, Run]) -> None:
    """Every record, every pinned field, its neighbours and the ends: what chance draws once in a hundred runs, too."""
    for name, file, index in places(runs, set(Kind)):
        record = runs[name][file][index]
        for field in sorted(PINNED[file.split("-")[0]].get(Kind(record.kind), ())):
            was = getattr(record, field)
            for value in {0, max(0, was - 1), was + 1, 255} - {was}:
                records = list(runs[name][file])
                records[index] = record._replace(**{field: value})
                told = f"{name}: {file} record {index + 1}: {Kind(record.kind).name}.{field} {was} -> {value}"
                assert not verdict({**runs[name], file: records}, spec(name)).is_ok, told


def test_the_story_tells_every_record_that_was_dropped_though_the_numbers_fit(runs: dict[str, Run]) -> None:
    for name, file, index in places(runs, {Kind.APPLY, Kind.ROUND, Kind.PUSH, Kind.START}):
        records = list(runs[name][file])
        dropped = records.pop(index)
        if index == len(records):
            continue  # as if its task had died right before
        assert not verdict({**runs[name], file: numbered(records)}).is_ok, (name, file, dropped)


def test_the_story_tells_every_record_that_was_doubled_though_the_numbers_fit(runs: dict[str, Run]) -> None:
    for name, file, index in places(runs, {Kind.APPLY, Kind.ROUND, Kind.ADD, Kind.PUSH, Kind.ANSWER}):
        records = list(runs[name][file])
        records.insert(index, records[index])
        assert not verdict({**runs[name], file: numbered(records)}).is_ok, (name, file, records[index])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_story_tells_what_was_moved_though_the_numbers_fit(runs: dict[str, Run], data: st.DataObject) -> None:
    telling = {Kind.APPLY, Kind.ROUND, Kind.PUSH, Kind.ANSWER}
    name, file, index = data.draw(st.sampled_from(places(runs, telling)))
    records = list(runs[name][file])
    one = records[index]
    same = [i for i, r in enumerate(records) if (r.kind, r.other) == (one.kind, one.other) and r != one]
    if not same:
        return  # the only one of its kind
    with_ = data.draw(st.sampled_from(same))
    records[index], records[with_] = records[with_], one
    assert not verdict({**runs[name], file: numbered(records)}).is_ok, (name, file, one, records[index])


# --- one invariant each, by name ------------------------------------------------------------------------------------


def changed(run: Run, file: str, kind: Kind, nth: int, **fields: int) -> Run:
    """The n-th record of that kind with other fields."""
    index = [i for i, record in enumerate(run[file]) if record.kind == kind][nth]
    records = list(run[file])
    records[index] = records[index]._replace(**fields)
    return {**run, file: records}


def without(run: Run, file: str, is_gone: Callable[[Record], bool]) -> Run:
    return {**run, file: numbered([record for record in run[file] if not is_gone(record)])}


def test_I1_another_contributor_set_on_one_shard(runs: dict[str, Run]) -> None:
    found = verdict(changed(runs["2 of 3"], "ps-1", Kind.APPLY, 2, other=9))
    assert told(found, "I1: round 1 has other contributors than on ps:0")


def test_I1_a_round_that_one_shard_never_made(runs: dict[str, Run]) -> None:
    found = verdict(without(runs["sync"], "ps-1", lambda r: r.kind in (Kind.APPLY, Kind.ROUND) and r.version == 4))
    assert told(found, "I1: round 3 was decided by ps:0")
    assert told(found, "I5: made version 5 of version 3")


def test_I1_the_last_round_may_be_on_its_way(runs: dict[str, Run]) -> None:
    """All died after ps:0 had decided it: the other shard has it staged, and nobody has read it there."""
    run = runs["sync"]
    last = max(record.version for record in run["ps-1"])
    run = {**run, "ps-1": [r for r in run["ps-1"] if r.version < last and r.kind != Kind.LEAVE]}
    for worker in ("worker-0", "worker-1"):
        first = next(i for i, r in enumerate(run[worker]) if (r.kind, r.other, r.version) == (Kind.PULL, 1, last))
        run = {**run, worker: run[worker][:first]}
    assert verdict(run).violations == []


def test_I1_a_shard_that_added_up_what_ps_0_had_not_counted(runs: dict[str, Run]) -> None:
    """Also in a round that never closed: nobody else tells of it."""
    last = next(r for r in reversed(runs["3 of 2"]["ps-1"]) if r.kind == Kind.ADD)
    found = verdict(changed(runs["3 of 2"], "ps-1", Kind.ADD, -1, push_id=99))
    assert told(found, f"I1: push 99 of worker:{last.other} incarnation 1 was added up, and ps:0 had not counted it")


def test_I2_a_push_counted_again_in_a_later_round(runs: dict[str, Run]) -> None:
    run = runs["3 of 2"]
    first = next(r for r in run["ps-0"] if r.kind == Kind.ADD)
    later = next(i for i, r in enumerate(run["ps-0"]) if r.kind == Kind.ADD and r.version > first.version)
    again = first._replace(version=run["ps-0"][later].version)
    doctored = numbered([*run["ps-0"][:later], again, *run["ps-0"][later:]])
    told_ = f"I2: push {first.push_id} of worker:{first.other} was counted and applied already"
    assert told(verdict({**run, "ps-0": doctored}), told_)


def test_I2_an_update_that_names_another_than_the_last_of_its_gradients(runs: dict[str, Run]) -> None:
    """Push 7 and then push 8 were counted, and the update says that 7 came last."""
    entered = [Record(Kind.START), Record(Kind.MODE, led.MODE_ROUNDS), Record(Kind.ENTER, 0, 1, 1)]
    adds = [Record(Kind.ADD, 0, 1, 1, push_id, 0, 1) for push_id in (7, 8)]
    closed = [Record(Kind.APPLY, 0, 1, 1, 7, 1, 2), Record(Kind.ROUND, version=1, amount=1)]
    found = check({0: numbered([*entered, *adds, *closed])}, {})
    assert told(found, "push 7 is called worker:1's last, and 8 was")


def test_I2_an_answer_to_one_who_was_never_in(runs: dict[str, Run]) -> None:
    run = without(runs["async"], "ps-1", lambda r: r.kind in (Kind.ENTER, Kind.LEAVE) and r.other == 1)
    assert told(verdict(run), "was answered, and the ps says that this worker was never in")


def test_I2_a_push_applied_twice(runs: dict[str, Run]) -> None:
    run = runs["async"]
    records = [r for r in run["ps-0"] if r.kind == Kind.APPLY]
    again = records[-1]._replace(version=records[-1].version + 1)
    at = run["ps-0"].index(records[-1]) + 1
    doctored = {**run, "ps-0": numbered([*run["ps-0"][:at], again, *run["ps-0"][at:]])}
    assert told(verdict(doctored), "was applied already")


def test_I2_a_push_that_nobody_pushed(runs: dict[str, Run]) -> None:
    assert told(verdict(changed(runs["async"], "ps-0", Kind.APPLY, -1, push_id=99)), "which it never pushed")


def test_I2_a_fenced_incarnation(runs: dict[str, Run]) -> None:
    run = runs["async"]
    first = next(i for i, r in enumerate(run["ps-0"]) if r.kind == Kind.APPLY)
    worker = run["ps-0"][first].other
    newer = [Record(Kind.LEAVE, led.LEFT_GONE, worker, 1), Record(Kind.ENTER, 0, worker, 2)]
    doctored = {**run, "ps-0": numbered([*run["ps-0"][:first], *newer, *run["ps-0"][first:]])}
    assert told(verdict(doctored), f"I2: worker:{worker} incarnation 1 was applied and is not in")


def test_I3_one_who_ran_ahead(runs: dict[str, Run]) -> None:
    """Of one worker all but the first push are gone: the other one went on without it."""
    run = runs["bounded"]
    run = without(run, "ps-0", lambda r: r.kind in (Kind.APPLY, Kind.DISCARD) and r.other == 0 and r.push_id > 1)
    found = verdict(run)
    assert told(found, "I3: worker:1 was 2 steps ahead of the slowest, and 1 is the bound")


def test_I5_acknowledged_and_never_applied(runs: dict[str, Run]) -> None:
    run = runs["async"]
    last = [r for r in run["ps-1"] if r.kind == Kind.APPLY][-1]
    found = verdict(without(run, "ps-1", lambda r: r == last))
    assert told(found, f"I5: push {last.push_id} to ps:1 was acknowledged and never applied")


def test_I5_versions_go_back(runs: dict[str, Run]) -> None:
    run = runs["async"]
    back = numbered([*run["ps-0"], Record(Kind.START, led.START_KEPT, version=3)])
    assert told(verdict({**run, "ps-0": back}), "I5: came back at version 3")
    nothing = numbered([*run["ps-0"], Record(Kind.START), Record(Kind.MODE), Record(Kind.ENTER, 0, 0, 1)])
    went_on = [*nothing, Record(Kind.APPLY, 0, 0, 1, 99, 1, 1, 0, len(nothing) + 1)]
    assert told(verdict({**run, "ps-0": went_on}), "I5: went on without the 15 updates")


def restored(run: Run, version: int) -> Run:
    """As if ps:0 had lost its memory at the end, and had come back from a checkpoint."""
    lost = [
        Record(Kind.START),
        Record(Kind.MODE),
        Record(Kind.RESTORE, led.FROM_CHECKPOINT, version=version, lineage=1),
    ]
    return {**run, "ps-0": numbered([*run["ps-0"], *lost])}


def test_I5_what_went_with_a_restore_is_named(runs: dict[str, Run]) -> None:
    run = runs["async"]
    top = max(r.version for r in run["ps-0"])
    found = verdict(restored(run, top - 3))
    assert found.violations == [] and len(found.lost) == 3
    assert all("to ps:0" in lost and "went with a restore" in lost for lost in found.lost)


def test_I2_what_a_restore_kept_is_not_applied_again(runs: dict[str, Run]) -> None:
    run = restored(runs["async"], 4)
    kept = next(r for r in run["ps-0"] if r.kind == Kind.APPLY)
    enter = Record(Kind.ENTER, 0, kept.other, 1, version=4, lineage=1)
    again = [*run["ps-0"], enter, kept._replace(version=5, lineage=1)]
    assert told(verdict({**run, "ps-0": numbered(again)}), "was applied already")


def test_a_restored_ps_takes_the_mode_that_held_then(runs: dict[str, Run]) -> None:
    """It began with the mode that the run was started in, and that was changed several times before it was lost."""
    run = restored(runs["async"], 4)
    changes = Record(Kind.MODE, led.MODE_ROUNDS, push_id=3, version=4, lineage=1)
    assert verdict({**run, "ps-0": numbered([*run["ps-0"], changes])}).violations == []
    later = changes._replace(push_id=5)
    assert told(verdict({**run, "ps-0": numbered([*run["ps-0"], changes, later])}), "another mode for turn 5")


def test_a_restore_that_tells_no_new_lineage(runs: dict[str, Run]) -> None:
    run = restored(runs["async"], 4)
    run = changed(run, "ps-0", Kind.RESTORE, 0, lineage=0)
    assert told(verdict(run), "which is no new one")


def test_one_checkpoint_is_of_one_round(runs: dict[str, Run]) -> None:
    def copied(file: str, version: int) -> list[Record]:
        records = list(runs["sync"][file])
        at = next(i for i, r in enumerate(records) if (r.kind, r.version) == (Kind.ROUND, version))
        return numbered([*records[: at + 1], Record(Kind.CHECKPOINT, push_id=5, version=version), *records[at + 1 :]])

    good = {**runs["sync"], "ps-0": copied("ps-0", 5), "ps-1": copied("ps-1", 5)}
    assert verdict(good).violations == []
    bad = {**good, "ps-1": copied("ps-1", 6)}
    assert told(verdict(bad), "I1: the checkpoint of step 5 is of round 6, and on ps:0 of 5")


def test_another_mode_than_the_runs(runs: dict[str, Run]) -> None:
    assert told(verdict(runs["bounded"], ModeSpec(name="bounded", staleness=7)), "began in another mode")
    found = verdict(changed(runs["async"], "ps-1", Kind.MODE, 0, outcome=led.MODE_BOUNDED, amount=3))
    assert told(found, "not the one that ps:0 decided")


def test_a_full_disk_is_a_violation(runs: dict[str, Run]) -> None:
    for file in ("ps-0", "worker-1"):
        records = numbered([*runs["async"][file], Record(Kind.FULL)])
        assert told(verdict({**runs["async"], file: records}), "the disk was full")


def test_whoever_left_no_ledger_is_named(runs: dict[str, Run]) -> None:
    left = {name: records for name, records in runs["async"].items() if name not in ("ps-1", "worker-0")}
    found = verdict(left)
    assert found.violations == [] and found.missing == ["ps:1", "worker:0"]


def test_a_worker_that_did_not_get_what_it_was_told(runs: dict[str, Run]) -> None:
    run = runs["async"]
    bad = verdict(changed(run, "worker-1", Kind.PUSH, 0, outcome=int(Flag.NOT_FINITE)))
    assert told(bad, "was not finite and is in version")
    stale = verdict(changed(run, "worker-0", Kind.ANSWER, 3, outcome=Outcome.DISCARDED))
    assert told(stale, "I2: push") and told(stale, "was refused (DISCARDED) and is in version")


def test_every_kind_is_known_to_one_side() -> None:
    assert verify_ps.USED.keys() | verify_worker.USED.keys() == set(Kind)
    for record in (Record(Kind.PUSH, number=1), Record(99, number=1)):
        assert told(verdict({"ps-0": [record]}), "which this task does not write")


# --- the command ----------------------------------------------------------------------------------------------------


def written(run: Run, folder: Path) -> Path:
    """A run folder with these ledgers."""
    (folder / "cluster.json").write_text('{"ps": ["h:1", "h:2"], "worker": ["h:3", "h:4"]}')
    (folder / "summary.json").write_text("{}")
    for name, records in run.items():
        made = Ledger(folder / "ledger" / f"{name}.bin")
        for record in records:
            made.write(*record[:-1])
        made.close()
    return folder


def paceline_verify(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.main(["verify", *words])
    return int(ended.value.code or 0)


def test_the_command_on_a_good_run(runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(runs["sync"], tmp_path)
    records = sum(len(r) for r in runs["sync"].values())
    assert paceline_verify(str(folder)) == 0
    assert capsys.readouterr().out == f"0 violations in {records} records\n"
    assert paceline_verify(str(folder), "--json") == 0
    expected = f'{{"ok":true,"records":{records},"violations":[],"lost":[],"missing":[],"damaged":[]}}\n'
    assert capsys.readouterr().out == expected


def test_the_command_on_a_bad_run(runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    applied = [r for r in runs["async"]["ps-0"] if r.kind == Kind.APPLY]
    bad = {**runs["async"], "ps-0": numbered([*runs["async"]["ps-0"], *(applied * 3)])}
    assert paceline_verify(str(written(bad, tmp_path))) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].endswith(f"in {sum(len(r) for r in bad.values())} records") and not out[0].startswith("0 ")
    assert len(out) == 22 and out[-1].startswith("  … and "), "20 of them, and how many more"
    assert all(line.startswith("  ps:0 record ") for line in out[1:-1])


def test_a_ledger_that_is_cut_or_damaged_is_named_and_not_compared(
    runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(runs["sync"], tmp_path)
    first, second = folder / "ledger" / "ps-1.bin", folder / "ledger" / "worker-1.bin"
    first.write_bytes(first.read_bytes()[: 32 * 7 + 5])
    content = bytearray(second.read_bytes())
    content[32 * 4 + 28] ^= 4  # of the number of its fifth record
    second.write_bytes(content)
    assert paceline_verify(str(folder)) == 1
    out = capsys.readouterr().out.splitlines()
    left = len(runs["sync"]["ps-0"]) + len(runs["sync"]["worker-0"])
    assert out == [
        "ps:1: its ledger is cut after record 7 (ps-1.bin); nothing is compared with it",
        "worker:1: its ledger is damaged at record 5 (worker-1.bin); nothing is compared with it",
        f"0 violations in {left} records",
        "Not compared, for want of a ledger: ps:1, worker:1",
    ]


def test_what_a_killed_task_leaves_is_whole(runs: dict[str, Run], tmp_path: Path) -> None:
    """Half a record, and the room that was made for others."""
    folder = written(runs["sync"], tmp_path)
    file = folder / "ledger" / "worker-0.bin"
    file.write_bytes(file.read_bytes() + b"\x0b" + bytes(31) + bytes(32 * 100))
    assert verdict_of(folder).is_ok


@pytest.mark.parametrize("is_on", [True, False])
def test_without_a_summary_it_says_why(
    is_on: bool, runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(runs["sync"], tmp_path)
    (folder / "summary.json").unlink()
    with held(RunPaths(folder)) if is_on else nullcontext():
        assert paceline_verify(str(folder)) == 0
    wanted = "This run is still on" if is_on else "was killed, or trains"
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("has_its_ledger", [True, False])
def test_a_job_chief_is_counted_before_the_workers(has_its_ledger: bool, runs: dict[str, Run], tmp_path: Path) -> None:
    """Its task is worker 0 of the run, and worker:0 is worker 1, whether or not the chief's own ledger is there."""
    run = runs["async"]
    named = {"ps-0": run["ps-0"], "ps-1": run["ps-1"], "chief-0": run["worker-0"], "worker-0": run["worker-1"]}
    folder = written({name: named[name] for name in named if has_its_ledger or name != "chief-0"}, tmp_path)
    (folder / "cluster.json").write_text('{"ps": ["h:1", "h:2"], "chief": ["h:3"], "worker": ["h:4"]}')
    found = verdict_of(folder)
    assert found.violations == [] and found.missing == ([] if has_its_ledger else ["worker:0"])


def test_the_command_without_a_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert paceline_verify(str(written({}, tmp_path))) == 2
    assert "has no ledger; one is written when the run is started with --ledger" in capsys.readouterr().err


def test_ledgers_that_were_set_aside_are_checked_too(runs: dict[str, Run], tmp_path: Path) -> None:
    folder = written(runs["async"], tmp_path)
    (folder / "ledger" / "earlier-1").mkdir()
    bad = numbered([*runs["sync"]["ps-0"], Record(Kind.FULL)])
    made = Ledger(folder / "ledger" / "earlier-1" / "ps-0.bin")
    for record in bad:
        made.write(*record[:-1])
    made.close()
    found = verdict_of(folder)
    assert [str(v.task) for v in found.violations] == ["earlier-1/ps:0"]
    assert found.records == len(bad) + sum(len(r) for r in runs["async"].values())


def test_no_folder_at_all() -> None:
    with pytest.raises(UsageError, match="No run folder"):
        partial(main.verify.verify, "nothere")()


def test_a_ledger_whose_end_was_lost_with_its_host_proves_nothing(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    worker = Ledger(paths.ledgers / "worker-0.bin")
    worker.write(Kind.PUSH, push_id=1)  # before any START
    worker.close()
    server = Ledger(paths.ledgers / "ps-0.bin")
    server.write(Kind.START)
    server.close()
    assert verdict_of(tmp_path).violations
    note_cut(paths.ledgers / "worker-0.bin")
    note_cut(paths.ledgers / "worker-1.bin")
    assert verdict_of(tmp_path).is_ok
    other = Ledger(paths.ledgers / "worker-1.bin")  # nothing of its first start came; this is the second
    other.write(Kind.PUSH, push_id=1)
    other.close()
    assert verdict_of(tmp_path).is_ok
    set_aside(tmp_path)
    names = sorted(path.name for path in paths.ledgers.rglob("*.*"))
    assert names == ["ps-0.bin", "worker-0.bin", "worker-0.cut", "worker-1.bin", "worker-1.cut"]


def test_a_ledger_of_which_nothing_came_switches_nothing_off_in_the_next_start(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.create()
    note_cut(paths.ledgers / "worker-0.bin")
    set_aside(tmp_path)
    worker = Ledger(paths.ledgers / "worker-0.bin")
    worker.write(Kind.PUSH, push_id=1)  # before any START
    worker.close()
    assert verdict_of(tmp_path).violations
