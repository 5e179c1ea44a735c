"""A terminal that is closed, a reader that has gone and a stream that takes nothing end no run, and lose no training.

The terminals are real: each process leads a session of its own, and the kernel tells it when the other end is closed.
"""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import BIN, DEADLINE_S, Gate, Processes

from paceline.checkpoint.read import newest
from paceline.launchers.ports import Reserved

pytestmark = pytest.mark.timeout(300)

PACELINE = BIN / "paceline"
LEADS = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


class Terminal:
    """A terminal, and one process that was started in it."""

    def __init__(self, processes: Processes, command: list[object]) -> None:
        self._ours, theirs = pty.openpty()
        self.popen = subprocess.Popen(
            [sys.executable, "-c", LEADS, *map(str, command)],
            cwd=processes.folder,
            env=processes.environ(TERM="xterm"),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._is_open = True

    def close(self) -> None:
        """As when ssh drops: the kernel sends SIGHUP, and whatever is printed from now on raises EIO."""
        if self._is_open:
            os.close(self._ours)
            self._is_open = False

    def end(self) -> int:
        return self.popen.wait(DEADLINE_S)


@pytest.fixture
def terminals(processes: Processes) -> Iterator[list[Terminal]]:
    made: list[Terminal] = []
    yield made
    for each in made:
        each.close()
        each.popen.kill()
        each.popen.wait(DEADLINE_S)


def summed_up(folder: Path) -> dict[str, object]:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("flags", [(), pytest.param(("--hosts=localhost:2",), marks=pytest.mark.slow)])
def test_it_is_one_ctrl_c(
    flags: tuple[str, ...], processes: Processes, terminals: list[Terminal], gate: Gate, train: Path
) -> None:
    made = processes.folder / "made"
    stops = [f"--gate={i}:5:{gate.path}" for i in (0, 1)]
    terminals.append(Terminal(processes, [PACELINE, "run", *flags, "--run-dir=made", train, *stops]))
    gate.arrivals(2)
    terminals[0].close()
    terminals[0].popen.send_signal(signal.SIGHUP)  # a shell tells its jobs, too
    assert terminals[0].end() == 130
    told = summed_up(made)
    assert told["error"] == "interrupted" and told["global_step"]
    assert newest(made / "checkpoints") is not None, "what was trained is saved"
    assert "--resume auto" in str(told["resume"]), "the last block was shown to nobody"
    assert not processes.survivors()


def test_under_nohup_it_is_nothing(processes: Processes, terminals: list[Terminal], gate: Gate, train: Path) -> None:
    made = processes.folder / "made"
    stops = [f"--gate={i}:5:{gate.path}" for i in (0, 1)]
    nohup = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", nohup, PACELINE, "run", "--max-restarts=0", "--run-dir=made", train, *stops]
    terminals.append(Terminal(processes, command))
    gate.arrivals(2)
    terminals[0].close()
    for process in processes.alive():  # nobody may be ended by it, whatever group a shell puts him in
        process.send_signal(signal.SIGHUP)
    gate.open()
    assert terminals[0].end() == 0
    assert summed_up(made)["ok"] is True and newest(made / "checkpoints") is not None


@pytest.mark.slow
def test_tasks_by_hand_save_first_in_whichever_terminals_they_are(
    processes: Processes, terminals: list[Terminal], ports: Reserved, gate: Gate, train: Path
) -> None:
    """A shell that ends tells all of its jobs at once: a ps must not be gone before the chief has saved."""
    made = processes.folder / "made"
    ps, worker = ports.addresses(2)
    hosts = (f"--ps_hosts={ps}", f"--worker_hosts={worker}", "--run-dir", made, "--task_index=0")
    terminals.append(Terminal(processes, [PACELINE, "serve", "--job_name=ps", *hosts]))
    own = ("--job_name=worker", *hosts, train, f"--gate=0:5:{gate.path}")
    terminals.append(Terminal(processes, [PACELINE, "serve", *own]))
    gate.arrival()
    for each in terminals:
        each.close()
    assert [each.end() for each in terminals] == [0, 130]
    assert newest(made / "checkpoints") is not None


@pytest.mark.slow
def test_a_ps_by_hand_does_not_wait_for_workers_that_train_on(
    processes: Processes, terminals: list[Terminal], ports: Reserved, gate: Gate, train: Path
) -> None:
    processes.leave_unverified("the worker is ended while its ps is gone")
    ps, worker = ports.addresses(2)
    hosts = (f"--ps_hosts={ps}", f"--worker_hosts={worker}", "--run-dir=made", "--task_index=0")
    terminals.append(Terminal(processes, [PACELINE, "serve", "--job_name=ps", *hosts]))
    own = processes.paceline("serve", "--job_name=worker", *hosts, train, f"--gate=0:5:{gate.path}")
    gate.arrival()
    terminals[0].close()
    assert terminals[0].end() == 130
    own.popen.kill()
    own.ends_with(-9)


def test_a_server_of_a_script_hears_it_as_ctrl_c(
    processes: Processes, terminals: list[Terminal], ports: Reserved, gate: Gate, tmp_path: Path
) -> None:
    """It prints into the closed terminal first."""
    (tmp_path / "serves.py").write_text(
        "import os, signal, socket, paceline\n"
        f"server = paceline.Server({{'local': ['{ports.addresses(1)[0]}']}}, 'local', 0)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})\n"
        "with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as gate:\n"
        f"    gate.connect({os.path.relpath(gate.path, tmp_path)!r})\n"
        "    gate.sendall(f'local:0 pid {os.getpid()}\\n'.encode())\n"
        "    gate.recv(1)\n"
        "print('nobody reads this', flush=True)\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})\n"
        "server.join()\n"
    )
    terminals.append(Terminal(processes, [sys.executable, "serves.py"]))
    arrived = gate.arrival()
    terminals[0].close()
    arrived.release()
    assert terminals[0].end() == 130


@pytest.mark.parametrize(
    "streams",
    [
        "| head -n 1",
        *(pytest.param(each, marks=pytest.mark.slow) for each in (">&- 2>&- <&-", "> /dev/full 2> /dev/full")),
    ],
)
def test_a_run_ends_well_where_nobody_can_take_what_it_prints(streams: str, processes: Processes, train: Path) -> None:
    made = processes.folder / "made"
    line = f"{PACELINE} run --workers=1 --run-dir=made {train} {streams}; exit ${{PIPESTATUS[0]}}"
    processes.bash(line, CI="1").ends_with(0)
    assert summed_up(made)["ok"] is True and newest(made / "checkpoints") is not None
    for path in (made / "logs").iterdir():
        assert "job_name" in path.read_text(), "a task's log is no affair of the terminal"


@pytest.mark.slow
def test_what_a_script_prints_by_hand_raises_nothing_either(
    processes: Processes, ports: Reserved, train: Path, tmp_path: Path
) -> None:
    """Neither started by `serve` nor directly."""
    (tmp_path / "talks.py").write_text(
        f"import runpy, sys\nrunpy.run_path({str(train)!r}, run_name='__main__')\n"
        "for number in range(5000):\n    print('a line of the script', number, flush=True)\n"
    )
    for number, start in enumerate((f"{PACELINE} serve", f"{sys.executable} talks.py")):
        ps, worker = ports.addresses(2)
        hosts = f"--ps_hosts={ps} --worker_hosts={worker} --run-dir=made{number} --task_index=0"
        script = "talks.py" if number == 0 else ""
        server = f"{start} --job_name=ps {hosts} | head -n 1; exit ${{PIPESTATUS[0]}}"
        client = f"{start} --job_name=worker {hosts} {script} | head -n 1; exit ${{PIPESTATUS[0]}}"
        both = [processes.bash(server), processes.bash(client)]
        for each in both:
            each.ends_with(0)
        assert newest(processes.folder / f"made{number}" / "checkpoints") is not None


@pytest.mark.nightly("a Ray of the run's own that ends before the run has saved")
@pytest.mark.alone
def test_it_does_not_end_the_ray_of_a_run_before_that_has_saved(
    processes: Processes, terminals: list[Terminal], gate: Gate, train: Path
) -> None:
    """A Ray that was started for the run belongs to the same terminal."""
    pytest.importorskip("ray")
    made = processes.folder / "made"
    stops = [f"--gate={i}:5:{gate.path}" for i in (0, 1)]
    terminals.append(Terminal(processes, [PACELINE, "run", "--on=ray", "--run-dir=made", train, *stops]))
    gate.arrivals(2)
    terminals[0].close()
    assert terminals[0].end() == 130
    assert summed_up(made)["error"] == "interrupted"
    assert newest(made / "checkpoints") is not None
