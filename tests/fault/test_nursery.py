"""Tasks that the nursery forks are what `python SCRIPT` would have made, and go on without it when it is gone."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cluster.discovery import Assignment, encode_for_child
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.launchers.children import Children, Exited
from paceline.launchers.entry import Program
from paceline.launchers.nursery import NoNursery, Nursery

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the nursery is Linux's"),
]

TASK = Task("worker", 0)
CLUSTER = ClusterSpec({"ps": ["localhost:1"], "worker": ["localhost:2"]})
BASE = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
PROBE = """
import faulthandler, gc, json, os, random, signal, sys, threading
import numpy
told = {
    "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path, "cwd": os.getcwd(),
    "environ": {k: v for k, v in os.environ.items() if k != "GIVEN"}, "flags": repr(sys.flags),
    "signals": {n: repr(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)},
    "mask": repr(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "faulthandler": faulthandler.is_enabled(),
    "threads": threading.active_count(), "main": threading.current_thread().name, "gc": gc.isenabled(),
    "descriptors": sorted(os.path.basename(os.readlink(f"/proc/self/fd/{n}")).split(":")[0]
                          for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")),
    "streams": [(s.name, s.mode, s.encoding, s.line_buffering, s.write_through) for s in (sys.stdout, sys.stderr)],
    "stdin": os.readlink("/proc/self/fd/0"), "group": os.getpgid(0) == os.getpid(), "parent": os.getppid(),
    "session": os.getsid(0), "umask": os.umask(0o22), "module": sys.modules["__main__"].__dict__["__file__"],
}
print(json.dumps(told))
print(json.dumps([random.random(), numpy.random.rand()]))
print(open("/proc/self/cmdline", "rb").read().split(b"\\0")[0].decode())
"""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery(BASE)
    yield made
    made.close()


class Stage:
    """Starts scripts as the launcher does, and tells how they ended and what they printed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"

    def start(self, children: Children, text: str, *args: str, named: dict[str, int] | None = None) -> int | None:
        script = self.folder / "script.py"
        script.write_text(text)
        made = Assignment(CLUSTER, TASK, 1, Settings(run_id="r"), b"1" * 32, "launcher")
        environ = {**BASE, "GIVEN": "1", **encode_for_child(made)}
        return children.start(TASK, Program(script=str(script), args=args), environ, self.log, named)

    def run(self, children: Children, text: str, *args: str, named: dict[str, int] | None = None) -> tuple[int, str]:
        before = self.log.stat().st_size if self.log.exists() else 0
        self.start(children, text, *args, named=named)
        event = children.next_event(50)
        assert isinstance(event, Exited), self.log.read_text()
        return event.code, self.log.read_bytes()[before:].decode()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_forked_task_sees_what_an_executed_one_sees(nursery: Nursery, stage: Stage) -> None:
    told = []
    for children in (Children(nursery), Children()):
        code, text = stage.run(children, PROBE, "--epochs", "3")
        assert code == 0, text
        told.append(text.splitlines())
    forked, executed = (json.loads(lines[0]) for lines in told)
    assert forked == executed
    assert forked["argv"][1:] == ["--epochs", "3"] and forked["parent"] == os.getpid() and forked["group"]
    assert told[0][2] == f"paceline worker:0 {stage.folder / 'script.py'} --epochs 3"


COMPILER = "import sys; sys.exit(7 if 'torch._dynamo' in sys.modules else 'torch' in sys.modules)"


def test_the_compiler_is_imported_once_for_those_who_will_compile(nursery: Nursery, stage: Stage) -> None:
    assert stage.run(Children(nursery), COMPILER)[0] == 1, "torch is there, its compiler is not"
    made = Nursery(BASE, compiles=True)
    try:
        assert stage.run(Children(made), COMPILER)[0] == 7
    finally:
        made.close()


def test_two_tasks_have_different_random_numbers(nursery: Nursery, stage: Stage) -> None:
    children = Children(nursery)
    first, second = (json.loads(stage.run(children, PROBE)[1].splitlines()[1]) for _ in range(2))
    assert first[0] != second[0] and first[1] != second[1]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 0),
        ("import sys; sys.exit(7)", 7),
        ("raise ValueError('no')", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.kill(os.getpid(), 15)", -15),
        ("import os; os.abort()", -6),
        ("import atexit; atexit.register(print, 'at exit')", 0),
    ],
)
def test_ends_are_told_as_they_were(text: str, code: int, nursery: Nursery, stage: Stage) -> None:
    assert stage.run(Children(nursery), text)[0] == code
    if "at exit" in text:
        assert "at exit" in stage.log.read_text()
    if "raise" in text:
        assert "forking.py" not in stage.log.read_text() and "ValueError: no" in stage.log.read_text()


def test_a_descriptor_is_passed_on_under_its_name(nursery: Nursery, stage: Stage) -> None:
    wait, tell = os.pipe()
    text = "import os; os.write(int(os.environ['HERE']), b'hello')"
    for children in (Children(nursery), Children()):
        assert stage.run(children, text, named={"HERE": tell})[0] == 0, stage.log.read_text()
        assert os.read(wait, 100) == b"hello"
    os.close(tell)
    assert os.read(wait, 1) == b"", "nobody else has it: not the nursery, no other task"
    os.close(wait)


@pytest.mark.parametrize(("line", "threads"), [("os.environ['OMP_NUM_THREADS'] = '2'", 2), ("", 1)])
def test_a_script_may_choose_its_threads_before_it_imports_torch(
    line: str, threads: int, nursery: Nursery, stage: Stage
) -> None:
    text = f"import os\n{line}\nimport paceline, torch\npaceline.init()\nprint(torch.get_num_threads())"
    told = [stage.run(children, text) for children in (Children(nursery), Children())]
    assert [text.splitlines()[-1] for _, text in told] == [str(threads)] * 2


def test_a_large_environment_is_no_matter(nursery: Nursery, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        monkeypatch.setitem(BASE, f"LARGE_{number}", "x" * 100_000)
    code, text = stage.run(Children(nursery), "import os; print(sum(map(len, os.environ.values())) > 2_000_000)")
    assert (code, text) == (0, "True\n")


def test_signals_reach_the_task_and_nobody_else(nursery: Nursery, stage: Stage) -> None:
    children = Children(nursery)
    os.mkfifo(stage.folder / "ready")
    text = "import signal, sys; open(sys.argv[1], 'w').close(); signal.pause()"
    pid = stage.start(children, text, str(stage.folder / "ready"))
    (stage.folder / "ready").open().close()
    assert children.pid(TASK) == pid and children.running("worker") == [TASK]
    assert children.signal(TASK, signal.SIGTERM)
    assert children.next_event(50) == Exited(TASK, -15)
    assert not children.signal(TASK, signal.SIGTERM) and children.pid(TASK) is None
    assert nursery.is_alive


def test_orphans_of_tasks_are_not_ours_for_longer_than_a_birth(nursery: Nursery, stage: Stage) -> None:
    """What a task leaves behind goes to the system, as ever; the launcher would have to bury it."""
    text = "import subprocess, sys; print(subprocess.Popen(['sleep', '300']).pid)"
    code, told = stage.run(Children(nursery), text)
    assert code == 0
    orphan = int(told)
    stat = Path(f"/proc/{orphan}/stat").read_text().rpartition(")")[2].split()
    os.kill(orphan, 9)
    assert int(stat[1]) != os.getpid()


def test_without_the_nursery_tasks_are_executed(stage: Stage) -> None:
    nursery = Nursery(BASE)
    children = Children(nursery)
    assert stage.run(children, "print('one')")[0] == 0
    os.kill(nursery.pid, signal.SIGKILL)
    assert stage.run(children, "print('two')")[0] == 0, "the one that found out"
    assert stage.run(children, "print('three')")[0] == 0
    assert stage.log.read_text().splitlines() == ["one", "two", "three"]
    assert not nursery.is_alive
    nursery.close()


def test_who_does_not_want_it_gets_none() -> None:
    with pytest.raises(NoNursery):
        Nursery({**BASE, "PACELINE_NURSERY": "0"})


def test_an_interrupt_does_not_wait_for_the_first_birth(stage: Stage) -> None:
    """Here it would never come: the nursery stands still. Nothing is started after all."""
    nursery = Nursery(BASE)
    os.kill(nursery.pid, signal.SIGSTOP)
    children = Children(nursery)
    children.interrupt()
    assert stage.start(children, "print('started')") is None
    assert not stage.log.read_text() and not nursery.is_alive


DIES = """
import os, sys
from paceline.launchers.nursery import Nursery
nursery = Nursery(dict(os.environ))
print(nursery.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_the_nursery_dies_with_its_launcher() -> None:
    told = subprocess.run(
        [sys.executable, "-c", DIES], env=BASE, capture_output=True, text=True, check=False, timeout=60
    )
    pid = int(told.stdout)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]:
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.05)  # it is nobody's child any more, so nobody can wait for it
