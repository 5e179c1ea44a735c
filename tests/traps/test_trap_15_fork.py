"""Trap 15: fork after OpenMP ran hangs. Tasks are forked by a process that has run nothing, whatever we have."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

PREAMBLE = """
import os, select, sys, torch
torch.set_num_threads(2)
torch.ones(2_000_000).add(1).sum()  # OpenMP has its threads now
"""
FORKS = """
child = os.fork()
if child == 0:
    torch.ones(2_000_000).add(1).sum()
    os._exit(0)
ended, _, _ = select.select([os.pidfd_open(child)], [], [], 1.0)
print("ended" if ended else "hangs")
if not ended:
    os.kill(child, 9)
"""
STARTS = """
from pathlib import Path
from paceline.cluster.discovery import Assignment, encode_for_child
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.launchers.children import Children, Exited
from paceline.launchers.entry import Program
from paceline.launchers.nursery import Nursery

cluster = ClusterSpec({"ps": ["localhost:1"], "worker": ["localhost:2", "localhost:3"]})
base = {**os.environ, "OMP_NUM_THREADS": "2"}
nursery = Nursery(base) if sys.argv[3] == "nursery" else None
children = Children(nursery)
for task in cluster.workers:
    made = Assignment(cluster, task, 1, Settings(run_id="r"), b"1" * 32, "launcher")
    children.start(task, Program(script=sys.argv[1]), base | encode_for_child(made), Path(sys.argv[2]))
events = [children.next_event(50) for _ in cluster.workers]
print(*("ended" if isinstance(event, Exited) and event.code == 0 else f"{event}" for event in events))
children.kill()
if nursery:
    assert nursery.is_alive, "the tasks were started in another way"
    nursery.close()
"""
COMPUTES = """
import numpy, torch
torch.set_num_threads(2)
torch.ones(2_000_000).add(1).sum()
numpy.ones((500, 500)) @ numpy.ones((500, 500))
"""


def run(code: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code, *args], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
def test_a_fork_of_what_has_computed_hangs() -> None:
    assert run(FORKS) == "hangs"


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize("way", ["nursery", pytest.param("exec", marks=pytest.mark.slow)])
def test_tasks_start_and_compute_whatever_the_launcher_has_computed(way: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(COMPUTES)
    log = tmp_path / "log"
    assert run(STARTS, str(script), str(log), way) == "ended ended", log.read_text()


def test_only_the_nursery_forks() -> None:
    """It has imported, and run nothing."""
    for file in Path(paceline.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                assert node.attr not in ("fork", "forkpty") or file.name == "forking.py", file
