"""I7 at run time: the audit hook that watches the ps of every test on real processes sees what it must see."""

import sys
from pathlib import Path

import pytest
from processes import Processes

AS_PS = '{"task": {"job": "ps", "index": 0}}'
RUNS_DATA = {
    "pickle.find_class": "import pickle; pickle.loads(b'cbuiltins\\nlen\\n.')",
    "marshal.loads": "import marshal; marshal.loads(marshal.dumps(1))",
    "exec": "exec('1')",
}


def run_as(processes: Processes, task: str, code: str) -> list[str]:
    processes.start(sys.executable, "-c", code, name=code, PACELINE_TASK=task).ends_with(0)
    found = processes.executed_data()
    (processes.folder / "audit.txt").unlink(missing_ok=True)  # or the fixture would fail, as it should
    return found


@pytest.mark.parametrize("event", RUNS_DATA)
def test_I7_a_ps_that_executes_data_is_found_out(event: str, processes: Processes) -> None:
    found = run_as(processes, AS_PS, f"def received():\n    {RUNS_DATA[event]}\nreceived()")
    assert any(event in line and "in received" in line for line in found), found


def test_what_is_imported_is_no_data_and_a_workers_script_may_do_as_it_likes(processes: Processes) -> None:
    found = run_as(processes, AS_PS, "import dataclasses, typing, json.tool")
    assert not [line for line in found if "<string>" not in line], found
    assert run_as(processes, AS_PS.replace("ps", "worker"), "exec('1')") == []


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_whole_run_executes_nothing(processes: Processes, train: Path) -> None:
    processes.paceline("run", "--mode=sync", "--ps=2", "--lane=tcp", "--ema=0.9", train, "--optimizer=Adam").ends_with(
        0
    )
    assert processes.executed_data() == []
