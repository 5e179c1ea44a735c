"""A test, a fixture, a thread or an exit handler that never ends is ended by the limits, and named."""

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import time_limit

TESTS = Path(__file__).parent
HANGS = {
    "body": "def test_it():\n    while True:\n        try: EVER.wait()\n        except BaseException: pass\n",
    "teardown_after_a_timeout": "@pytest.fixture\ndef slow():\n    yield\n    EVER.wait()\n"
    "def test_it(slow):\n    EVER.wait()\n",
    "thread": "def test_it():\n    threading.Thread(target=EVER.wait).start()\n",
    "exit_handler": "def test_it():\n    atexit.register(EVER.wait)\n",
}
XDIST = ["-n", "1"]
JUMPS = """
import os, sys, time, types
import time_limit
now = time.monotonic
jump = types.SimpleNamespace(sleep=time.sleep, time=time.time, monotonic=lambda: now() + 1e6 * os.path.exists("begun"))
time_limit.time = jump
sys.exit(time_limit.main(sys.argv[1:]))
"""


def limited(folder: Path, body: str, starter: list[object], options: list[str], limits: str = "") -> tuple[int, str]:
    """Run a file of tests as `make test` does; the exit code, and all that was printed."""
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {TESTS}\n{limits}")
    (folder / "test_hang.py").write_text(
        f"import atexit, pytest, subprocess, threading\nEVER = threading.Event()\n{body}"
    )
    (folder / "conftest.py").write_text('pytest_plugins = ["watchdog"]\n')
    words = [*starter, "1000", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=50,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("hang", "options"),
    [*((hang, []) for hang in HANGS), pytest.param("teardown_after_a_timeout", XDIST, marks=pytest.mark.slow)],
)
def test_what_hangs_is_ended_and_named(hang: str, options: list[str], tmp_path: Path) -> None:
    limits = "timeout = 0.5\ngrace_timeout = 0.5\nexit_timeout = 0.5\n"
    code, said = limited(tmp_path, HANGS[hang], [TESTS / "time_limit.py"], options, limits)
    assert code == 1, said
    assert "test_hang.py::test_it" in said


def test_a_run_that_takes_too_long_is_ended_with_all_it_has_started(tmp_path: Path) -> None:
    body = (
        "def test_it():\n    child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "    open('child', 'w').write(str(child.pid))\n    open('begun', 'w').close()\n    EVER.wait()\n"
    )
    code, said = limited(tmp_path, body, ["-c", JUMPS], [])
    assert code == time_limit.TIMED_OUT, said
    assert "test_hang.py::test_it, for" in said and "in test_it" in said, "its name, and its stack"
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_the_limit_of_collecting_does_not_hold_while_tests_run(tmp_path: Path) -> None:
    """Also in the process of xdist that gives the tests out, and collects none itself."""
    body = (
        "import os, pathlib\n"
        "def test_it():\n"
        "    giver = pathlib.Path(os.environ['TEST_PROCESS_RECORDS'], str(os.getppid()))\n"
        "    assert giver.read_text() == 'waiting for tests'\n"
    )
    code, said = limited(tmp_path, body, [TESTS / "time_limit.py"], XDIST)
    assert code == 0, said


def test_a_run_that_ends_by_itself_is_judged_by_its_tests(tmp_path: Path) -> None:
    assert limited(tmp_path, "def test_it(): pass\n", [TESTS / "time_limit.py"], XDIST)[0] == 0
    assert limited(tmp_path, "def test_it(): assert 0\n", [TESTS / "time_limit.py"], [])[0] == 1


def test_a_signal_ends_the_run_soon(tmp_path: Path) -> None:
    """The command is told, and killed where it does not hear."""
    code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\nprint('runs', flush=True)\n"
    code += "signal.pause()"
    command = [sys.executable, str(TESTS / "time_limit.py"), "1000", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"runs\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 5


LIMITED = {"self.barrier", "self._together.barrier", "turn[0]", "turn[1]", "gate", "self._begin"}  # threading.Barrier
LIMITED |= {"far.start(f.Start(WORKER, {}, 1))"}  # of a host that is lost already
RETURNS = {"subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}


def endless_waits(text: str) -> list[int]:
    """The lines in which a process, a thread or an event is waited for without a limit."""
    found = []
    for each in ast.walk(ast.parse(text)):
        if not isinstance(each, ast.Call) or not isinstance(each.func, ast.Attribute):
            continue
        of, name = ast.unparse(each.func.value), each.func.attr
        has_limit = any(keyword.arg in ("timeout", None) for keyword in each.keywords)
        is_wait = name in ("wait", "join") and not each.args and of not in LIMITED | {"self", "super()", "server"}
        if not has_limit and (f"{of}.{name}" in RETURNS or name == "communicate" or is_wait):
            found.append(each.lineno)
    return found


def test_every_wait_of_a_test_has_a_limit() -> None:
    assert endless_waits("a.wait()\nb.wait(3)\nsubprocess.run(c)\nsubprocess.run(c, timeout=3)\n','.join(d)") == [1, 3]
    found = {
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        if "programs" not in path.parts
        for line in endless_waits(path.read_text())
    }
    assert not found, "give these a limit: wait(60), join(60), timeout=60"
