"""`paceline ctl` on real processes: another mode in the middle of a run, and what is refused changes nothing."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from process_fixtures import PROGRAMS
from processes import Gate, Process, Processes

from paceline.cluster.spec import Task
from paceline.telemetry.paths import RunPaths
from paceline.telemetry.read import records
from paceline.worker.control import switch_mode

pytestmark = pytest.mark.timeout(180)

UNTIL = PROGRAMS / "until_mode.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "async_then_sync.py"
REFUSED = {
    "asinc": "Unknown mode 'asinc'",
    "sync --replicas-to-aggregate 0": "--replicas-to-aggregate is 0",
    "sync --replicas-to-aggregate 9 --extra-tokens 1": "give at most 4 gradients",
    "bounded --staleness -1": "--staleness is -1",
    "local --local-steps 0": "--local-steps is 0",
    "async --staleness 2": "--staleness only makes sense with mode bounded",
    "local --local-steps 4": "local",  # only ps:0 can say that this run cannot
}


def summary_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))


def refused(process: Process, sentence: str) -> None:
    process.ends_with(2)
    assert len(process.lines) == 1 and process.lines[0].startswith("paceline: "), process.text
    assert sentence in process.lines[0]


NIGHTLY = pytest.mark.nightly("a switch that is lost where there is one ps, or in the example")


@pytest.mark.slow  # in one process: test_join_while_switching
@pytest.mark.parametrize("num_ps", [pytest.param(1, marks=NIGHTLY), 2])
def test_start_async_finish_sync(num_ps: int, processes: Processes, gate: Gate, tmp_path: Path) -> None:
    gates = [f"--gate={worker}:10:{gate.path}" for worker in (0, 1)]
    launcher = processes.paceline("run", f"--ps={num_ps}", "--run-dir=made", UNTIL, *gates)
    waiting = gate.arrivals(2)
    asked = [processes.paceline("ctl", "mode", *words.split(), "made") for words in REFUSED] if num_ps == 1 else []
    shown = processes.paceline("ctl", "show", "made").ends_with(0)
    for process, sentence in zip(asked, REFUSED.values(), strict=False):
        refused(process, sentence)
    assert [shown.lines[0], shown.lines[2]] == ["mode: async", "live workers: worker:0, worker:1 (2 of 2)"]
    for arrival in waiting.values():
        arrival.release()
    ctl = processes.paceline("ctl", "mode", "sync", "made").ends_with(0)
    launcher.ends_with(0)

    said = re.fullmatch(r"mode async -> sync at global step (\d+); workers stood still for [\d.]+ ms", ctl.text)
    assert said, ctl.text
    told = summary_of(tmp_path / "made")
    (change,) = told["modes"]
    assert (change["at_step"], change["mode"]) == (int(said.group(1)), "sync")
    assert change["pause_ms"] >= 0
    assert (told["mode"], told["mode_spec"]) == ("async", "async")
    assert told["global_step"] == change["at_step"] + 20, "the last 20 updates are rounds of all"
    assert sum(told["staleness"][key] is None for key in ("mean", "max")) == 0
    assert launcher.text.count(f"ps:0: {ctl.text}") == 1
    events = [record for record in records(tmp_path / "made", Task("ps", 0)) if record.kind == "mode"]
    assert [event.fields["text"] for event in events] == [ctl.text]
    refused(processes.paceline("ctl", "mode", "async", "made"), "has ended")


@pytest.mark.slow
def test_from_python_and_back_again(processes: Processes, gate: Gate, tmp_path: Path) -> None:
    gates = [f"--gate={worker}:10:{gate.path}" for worker in (0, 1)]
    launcher = processes.paceline("run", "--mode=sync", "--run-dir=made", UNTIL, "--until=bounded", *gates)
    for arrival in gate.arrivals(2).values():
        arrival.release()
    one = switch_mode(tmp_path / "made", "sync", replicas_to_aggregate=1)
    two = switch_mode(tmp_path / "made", "bounded", staleness=1, staleness_scale=True)
    launcher.ends_with(0)
    assert (str(one.before), str(one.after)) == ("sync", "sync, 1 to aggregate")
    assert two.before == one.after and (two.after.staleness, two.after.staleness_scale) == (1, True)
    assert two.global_step >= one.global_step >= 10
    changes = summary_of(tmp_path / "made")["modes"]
    assert [change["at_step"] for change in changes] == [one.global_step, two.global_step]


@pytest.mark.slow
def test_whom_a_switch_waits_for_is_said(processes: Processes, gate: Gate, tmp_path: Path) -> None:
    launcher = processes.paceline("run", "--run-dir=made", UNTIL, f"--gate=1:10:{gate.path}")
    stands = gate.arrival()
    ctl = processes.paceline("ctl", "mode", "sync", "made")
    ctl.wait_for(r"Still waiting for response from worker: /job:worker/replica:0/task:1 \(\d+ s\)")
    stands.release()
    ctl.ends_with(0).wait_for("mode async -> sync at global step")
    launcher.ends_with(0)
    (change,) = summary_of(tmp_path / "made")["modes"]
    assert change["pause_ms"] > 1000, "worker:0 stood still while worker:1 was at the gate"


@NIGHTLY
def test_the_example_switches_by_itself(processes: Processes, tmp_path: Path) -> None:
    processes.paceline("run", "--run-dir=made", EXAMPLE, "--steps=200").ends_with(0)
    told = summary_of(tmp_path / "made")
    (change,) = told["modes"]
    assert change["mode"] == "sync" and 100 <= change["at_step"] < 200 == told["global_step"]
    log = RunPaths(tmp_path / "made").logs(Task("worker", 0)).read_text()
    found = re.findall(r"^(async|sync) up to global step (\d+): test accuracy (0\.\d+)$", log, re.MULTILINE)
    assert [mode for mode, _, _ in found] == ["async", "sync"] and found[1][1] == "200"
    assert float(found[1][2]) > 0.5
