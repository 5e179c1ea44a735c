"""Trap 15: fork after OpenMP ran hangs. Tasks are started by exec, so whatever the launcher has run does not matter."""

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

cluster = ClusterSpec({"ps": ["localhost:1"], "worker": ["localhost:2"]})
task = Task("worker", 0)
environ = dict(os.environ) | encode_for_child(Assignment(cluster, task, 1, Settings(run_id="r"), b"1" * 32, "launcher"))
children = Children()
children.start(task, Program(script=sys.argv[1]), environ, Path(sys.argv[2]))
event = children.next_event(50)
print("ended" if isinstance(event, Exited) and event.code == 0 else f"{event}")
children.kill()
"""


def run(code: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code, *args], capture_output=True, text=True, timeout=55, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
def test_a_task_starts_whatever_the_launcher_has_computed(tmp_path: Path) -> None:
    assert run(FORKS) == "hangs"
    script = tmp_path / "script.py"
    script.write_text("import torch\ntorch.set_num_threads(2)\ntorch.ones(2_000_000).add(1).sum()\n")
    log = tmp_path / "log"
    assert run(STARTS, str(script), str(log)) == "ended", log.read_text()


def test_nothing_in_the_package_forks() -> None:
    """A nursery, when there is one, must fork before torch has run anything; until then nobody forks."""
    for file in Path(paceline.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                assert node.attr not in ("fork", "forkpty"), file
