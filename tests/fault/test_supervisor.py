"""Tasks that fail are started again, and the run says so; what would only repeat is told at once, with its cause."""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import Gate, Processes

from paceline.cluster.membership import first_incarnation

pytestmark = pytest.mark.timeout(180)

# A worker's lives are told apart by the incarnation that the launcher gave it.
SCRIPT = """
import json, os, signal, sys
import torch
from torch.nn.functional import mse_loss
import paceline

ctx = paceline.init()
life = json.loads(os.environ["PACELINE_TASK"])["incarnation"] >> 16
def fault(where):
    for each in sys.argv[1:]:
        worker, lives, at, what = each.split(":")
        if (int(worker), at) == (ctx.worker_index, where) and life < int(lives):
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(what)
fault("start")
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = ctx.prepare(model, optimizer)
for step in range(20):
    optimizer.zero_grad()
    mse_loss(model(torch.ones(2, 4)), torch.ones(2, 1)).backward()
    optimizer.step()
    fault(f"step{step}")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


LOOPING = """
import sys
import torch
from torch.utils.data import DataLoader
import paceline

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 30:
            raise IndexError("sample 30 is damaged")
        return torch.ones(4)

ctx = paceline.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = DataLoader(Samples(), batch_size=2)
model, optimizer, data = ctx.prepare(model, optimizer, data)
def step(batch):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
if sys.argv[1] == "batches":
    for epoch in ctx.epochs(2):
        for batch in data:
            step(batch)
else:
    for number in range(20):
        step(torch.ones(2, 4) if number != 5 or ctx.worker_index != 1 else Samples()[30])
"""


@pytest.fixture
def looping(tmp_path: Path) -> Path:
    path = tmp_path / "looping.py"
    path.write_text(LOOPING)
    return path


def summary_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "made" / "summary.json").read_text()))


def told(launcher_lines: list[str]) -> list[str]:
    """Without the lines of progress."""
    return [line for line in launcher_lines if not re.match(r"\[ *\d+ s\]", line)]


def events(folder: Path, task: str) -> list[dict[str, Any]]:
    lines = (folder / "made" / "telemetry" / f"{task}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line]


@pytest.mark.parametrize(
    ("mode", "killed"),
    [
        ("sync", 0),
        pytest.param("sync", 1, marks=pytest.mark.nightly("in sync, a second worker that is not counted again")),
        pytest.param("async", 1, marks=pytest.mark.slow),
    ],
    ids=["sync, the chief", "sync", "async"],
)
def test_a_killed_worker_comes_back_and_the_run_is_well(
    mode: str, killed: int, processes: Processes, script: Path, tmp_path: Path
) -> None:
    flags, task = (f"--mode={mode}", "--run-dir=made"), f"worker:{killed}"
    launcher = processes.paceline("run", *flags, script, f"{killed}:1:step5:kill").ends_with(0)
    said = f"{task} was killed by SIGKILL; its log: made/logs/worker-{killed}.log; starting it again (1 of 3)"
    assert launcher.lines.count(said) == 1 and f"Started again: {task} 1x" in launcher.lines
    assert "failed" not in launcher.text and "Root cause" not in launcher.text
    summary = summary_of(tmp_path)
    assert (summary["ok"], summary["lost"], summary["error"]) == (True, [], None)
    assert (summary["restarts"], summary["restarts_by_task"]) == (1, {task: 1})
    assert not any(row["lost"] for row in summary["workers"])
    assert list((tmp_path / "made" / "checkpoints").glob("step-*/MANIFEST.json")), "it, or the chief, saves at the end"
    mine = events(tmp_path, f"worker-{killed}")
    starts = [event["incarnation"] for event in mine if event["kind"] == "start"]
    assert starts == [first_incarnation(1), first_incarnation(2)]
    assert [(e["number"], e["code"], e["is_empty"]) for e in mine if e["kind"] == "restart"] == [(1, -9, False)]


@pytest.mark.slow
def test_the_same_error_before_any_step_is_not_tried_a_third_time(
    processes: Processes, script: Path, tmp_path: Path
) -> None:
    launcher = processes.paceline("run", "--run-dir=made", script, "1:9:start:typo").ends_with(1)
    lines = told(launcher.lines)
    head = "worker:1 failed with exit code 1; its log: made/logs/worker-1.log"
    first = lines.index(f"{head}; starting it again (1 of 3)")
    second = lines.index(f"{head}; not started again: it failed twice in the same way without a step in between")
    cause = lines.index(f"Root cause: {head}")
    assert first < second < cause
    assert lines[first + 1] == lines[second + 1] == "  ValueError: typo"
    assert lines[cause + 1] == "  Traceback (most recent call last):" and launcher.text.count("Traceback") == 1
    assert lines[second + 2] == lines[cause], "nothing of the last block before it"
    summary = summary_of(tmp_path)
    assert (summary["lost"], summary["restarts_by_task"]) == (["worker:1"], {"worker:1": 1})
    assert summary["workers"][0]["steps"] == 20


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("async", marks=pytest.mark.slow),
        pytest.param("sync", marks=pytest.mark.nightly("in sync, an error tried again and again")),
    ],
)
def test_the_same_error_at_the_same_step_is_not_tried_a_third_time(
    mode: str, processes: Processes, looping: Path, tmp_path: Path
) -> None:
    """Whether the loop goes on after a restart, batch by batch, or begins anew."""
    for loop in ("batches", "range"):
        flags = ["--lane=shm", f"--mode={mode}", f"--run-dir={loop}", "--log-every=1"]
        launcher = processes.paceline("run", *flags, looping, loop).ends_with(1)
        lines = told(launcher.lines)
        head = f"worker:1 failed with exit code 1; its log: {loop}/logs/worker-1.log"
        assert lines.count(f"{head}; starting it again (1 of 3)") == 1
        assert lines.count(f"{head}; not started again: it failed twice in the same way at the same step") == 1
        assert launcher.text.count("Traceback") == 1 and launcher.text.count("  IndexError: sample 30 is damaged") >= 3
        assert len([line for line in lines if line.startswith("  Failed after ")]) == 1, "where, below the traceback"
        assert any("once that is put right" in line for line in lines)


@pytest.mark.slow
def test_an_error_at_other_steps_is_tried_as_often_as_allowed(
    processes: Processes, script: Path, tmp_path: Path
) -> None:
    faults = ["1:1:step3:bad", "1:2:step5:bad", "1:3:step7:bad"]
    launcher = processes.paceline("run", "--max-restarts=2", "--run-dir=made", script, *faults).ends_with(1)
    assert "; not started again: it was started again 2 times already (--max-restarts)" in launcher.text
    assert "; starting it again (2 of 2)" in launcher.text
    assert summary_of(tmp_path)["restarts_by_task"] == {"worker:1": 2}


@pytest.mark.slow
def test_what_follows_comes_after_the_cause(processes: Processes, script: Path, tmp_path: Path) -> None:
    launcher = processes.paceline("run", "--run-dir=made", "--mode=sync", script, "0:9:start:typo").ends_with(1)
    lines = told(launcher.lines)
    cause = lines.index("Root cause: worker:0 failed with exit code 1; its log: made/logs/worker-0.log")
    then = lines.index("Then: worker:1 failed with exit code 3; its log: made/logs/worker-1.log")
    assert cause < then and "the chief ended before it had initialised the model" in lines[then + 1]
    assert any(line.startswith("Training failed: worker:0 failed with exit code 1") for line in lines[then:])
    assert summary_of(tmp_path)["lost"] == ["worker:0", "worker:1"]


@pytest.mark.slow
def test_a_worker_comes_back_though_the_nursery_is_gone(
    processes: Processes, gate: Gate, train: Path, tmp_path: Path
) -> None:
    gates = [f"--gate={i}:5:{gate.path}" for i in (0, 1)]
    launcher = processes.paceline("run", "--run-dir=made", train, *gates)
    waiting = gate.arrivals(2)
    nursery = [p for p in processes.alive() if "paceline.launchers.forking" in p.cmdline()]
    assert len(nursery) == 1
    nursery[0].kill()
    psutil.wait_procs(nursery, timeout=10)
    processes.task("worker", 1).kill()
    again = gate.arrival()
    assert again.text.startswith("worker:1 step 5"), "it is there again"
    assert "paceline.launchers.entry" in psutil.Process(again.pid).cmdline()
    again.release()
    for arrival in waiting.values():
        arrival.release()
    launcher.ends_with(0)
    assert summary_of(tmp_path)["restarts_by_task"] == {"worker:1": 1}


@pytest.mark.slow
def test_tasks_on_their_way_back_do_not_outlive_an_interrupt(
    processes: Processes, script: Path, tmp_path: Path
) -> None:
    launcher = processes.paceline("run", "--max-restarts=99", "--run-dir=made", script, "1:99:step3:kill")
    launcher.wait_for(r"starting it again \(3 of 99\)")
    os.kill(launcher.pid, 2)
    launcher.ends_with(130)
    assert summary_of(tmp_path)["error"] == "interrupted"
    assert not processes.survivors()


LEAVES = f"""{SCRIPT}
ctx.barrier()  # all steps are made before anybody ends
if ctx.worker_index in map(int, os.environ["LEAVE"].split(",")):
    os._exit(0)
"""


@pytest.mark.slow
def test_who_leaves_without_an_end_is_named_and_a_model_that_is_not_saved_is_no_success(
    processes: Processes, script: Path, tmp_path: Path
) -> None:
    """os._exit(0) runs nothing of what comes at an end: of a chief the last checkpoint."""
    script.write_text(LEAVES)
    for who, code in (("0,1", 4), ("1", 0)):
        folder = f"left-{who}"
        told = processes.paceline("run", f"--run-dir={folder}", script, LEAVE=who, PACELINE_LEDGER="0").ends_with(code)
        for index in who.split(","):
            assert f"worker:{index} was gone before the end of its script, with exit code 0" in told.text
        not_saved = "Training done, but the final model could not be saved; global step 40"
        assert (not_saved in told.text, "Model: none was saved" in told.text) == (code == 4, code == 4), told.text
        assert bool(list((tmp_path / folder / "checkpoints").glob("step-*"))) == (code == 0)
    assert "ctx.close()" in told.text
    script.write_text(LEAVES.replace("    os._exit(0)", "    ctx.close()\n    os._exit(0)"))
    told = processes.paceline("run", "--run-dir=closed", script, LEAVE="0,1", PACELINE_LEDGER="0").ends_with(0)
    assert "was gone" not in told.text and "Model: closed/checkpoints/step-00000040" in told.text


# The folder of a run


@pytest.mark.slow
def test_the_last_block_has_the_command_to_resume_and_it_works(
    processes: Processes, train: Path, tmp_path: Path
) -> None:
    flags = ["--mode=sync", "--ps=2", "--placement=round_robin", "--run-dir=made"]
    launcher = processes.paceline("run", *flags, train, "--epochs", "1").ends_with(0)
    head = "To train further (more epochs or steps): "
    line = next(line for line in launcher.lines if line.startswith(head))
    command = shlex.split(line.removeprefix(head))
    want = "paceline run --run-dir made --resume auto --ps 2 --workers 2 --mode sync --ledger --placement round_robin"
    assert command == [*want.split(), str(train), "--epochs", "1"]
    assert launcher.lines[-1] == line
    first = summary_of(tmp_path)
    again = processes.paceline(*command[1:-1], "2").ends_with(0)
    assert summary_of(tmp_path)["global_step"] == 40 and first["global_step"] == 20, again.text
    assert (tmp_path / "made" / "telemetry" / "earlier-1" / "ps-0.jsonl").exists()


@pytest.mark.slow
def test_a_folder_is_not_used_twice_at_once_nor_by_mistake(
    processes: Processes, gate: Gate, train: Path, tmp_path: Path
) -> None:
    launcher = processes.paceline("run", "--run-dir=made", train, f"--gate=0:5:{gate.path}", name="first")
    arrival = gate.arrival()
    secret = (tmp_path / "made" / "secret").read_text()
    second = processes.paceline("run", "--run-dir=made", "--resume=auto", train, name="second").ends_with(2)
    assert "made is still on; wait for its end, or end it." in second.text
    third = processes.paceline("run", "--run-dir=made", train, name="third").ends_with(2)
    assert "made already holds a run; go on with it with --resume auto" in third.text
    assert (tmp_path / "made" / "secret").read_text() == secret, "they changed nothing"
    arrival.release()
    launcher.ends_with(0)
    assert processes.paceline("run", "--resume=auto", train, name="fourth").ends_with(2).text.endswith("--run-dir.")
