"""The agent of a host as a real process over a pipe: it does as told, tells all, and never outlives anybody."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from small_checkpoint import write_step

from paceline.cluster.settings import Settings
from paceline.cluster.spec import Task
from paceline.launchers.entry import Program
from paceline.launchers.hosts import frames as f
from paceline.version import VERSION

CLUSTER = {"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}
WORKER = Task("worker", 0)
TELLS = "import os; print('I am', os.environ['OMP_NUM_THREADS'], os.getcwd(), flush=True)"
STAYS = "import os, signal; print('pid', os.getpid(), flush=True); signal.pause()"
WITHIN_S = 30.0


class Agent:
    """One agent, and what it has said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        environ["PACELINE_NURSERY"] = "0"
        command = [sys.executable, "-P", "-m", "paceline.launchers.hosts.agent"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=folder, env=environ)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        assert f.skip_noise(self.stdout) == b""

    def say(self, *messages: f.Told) -> None:
        self.stdin.write(b"".join(map(f.frame, messages)))
        self.stdin.flush()

    def hear(self, kind: type) -> f.Heard:
        """The next message of this kind; pieces of files are kept on the way."""
        while (message := f.read_heard(self.stdout)) is not None:
            if isinstance(message, f.News):
                path = self.folder / "back" / message.piece.path
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab") as file:
                    file.write(message.piece.data)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"it ended without a {kind.__name__}")

    def log(self) -> str:
        return (self.folder / "back" / "logs" / "worker-0.log").read_text()

    def begin(self, script: str, **options: object) -> f.Ready:
        (self.folder / "script.py").write_text(script)
        self.say(hello(self.folder, **options))
        ready = self.hear(f.Ready)
        assert isinstance(ready, f.Ready)
        return ready

    def start_one_that_stays(self) -> psutil.Process:
        self.say(f.Start(WORKER, CLUSTER, 1))
        path = self.folder / "back" / "logs" / "worker-0.log"
        while not path.exists() or "pid" not in path.read_text():
            self.hear(f.News)
        return psutil.Process(int(self.log().split()[1]))


def hello(folder: Path, **options: object) -> f.Hello:
    plain = {
        "version": VERSION,
        "settings": Settings(run_id="r", run_dir=str(folder / "elsewhere")),
        "program": Program(script="script.py"),
        "ps": [Task("ps", 0)],
        "secret": b"s" * 32,
        "run_dir": "runs/r",
        "token": ".t",
        "num_workers": 1,
    }
    return f.Hello(**{**plain, **options})  # type: ignore[arg-type]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path)
    yield made
    with suppress(OSError):
        made.process.kill()
    made.process.wait(WITHIN_S)


def gone(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        process.wait(WITHIN_S)
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_task_runs_there_and_all_it_told_is_here_before_its_end(agent: Agent) -> None:
    ready = agent.begin(TELLS, threads="3", num_spare_ports=2)
    assert ready.threads == "3" and not ready.is_shared and ready.run_dir == str(agent.folder / "runs" / "r")
    assert len(set(ready.spare_ports)) == 2
    agent.say(f.Start(WORKER, CLUSTER, 1))
    assert agent.hear(f.Exited) == f.Exited(WORKER, 0)
    assert agent.log() == f"I am 3 {agent.folder}\n"
    agent.say(f.Start(WORKER, CLUSTER, 2))
    agent.hear(f.Exited)
    agent.say(f.End())
    agent.hear(f.Over)
    agent.say(f.End())
    assert agent.process.wait(WITHIN_S) == 0
    assert agent.log().count("I am") == 2
    assert not (agent.folder / "runs").exists(), "what came back need not stay"


def test_what_nobody_says_to_have_received_stays(agent: Agent) -> None:
    agent.begin(TELLS)
    agent.say(f.Start(WORKER, CLUSTER, 1))
    agent.hear(f.Exited)
    agent.say(f.End())
    agent.stdin.close()
    agent.stdout.close()
    assert agent.process.wait(WITHIN_S) == 0
    assert "I am" in (agent.folder / "runs" / "r" / "logs" / "worker-0.log").read_text()


def left_by_another(folder: Path) -> Path:
    """What a launcher that was killed has left: a run folder with a whole checkpoint."""
    root = folder / "runs" / "r"
    (root / "logs").mkdir(parents=True)
    (root / "logs" / "worker-0.log").write_text("of old\n")
    write_step(root / "checkpoints", 900)
    return root


def test_the_folder_of_another_run_of_this_name_is_set_aside(agent: Agent) -> None:
    root = left_by_another(agent.folder)
    ready = agent.begin(TELLS)
    assert ready.aside == f"{root}.old-1" and not list((root / "checkpoints").iterdir())
    assert (agent.folder / "runs" / "r.old-1" / "checkpoints" / "step-00000900").is_dir(), "nothing is lost"


def test_going_on_the_checkpoints_that_were_left_come_back_and_the_folder_goes(agent: Agent) -> None:
    left_by_another(agent.folder)
    assert not agent.begin(TELLS, is_going_on=True).aside
    agent.say(f.End())
    agent.hear(f.Over)
    agent.say(f.End())
    assert agent.process.wait(WITHIN_S) == 0
    assert (agent.folder / "back" / "checkpoints" / "step-00000900" / "MANIFEST.json").exists()
    assert not (agent.folder / "runs" / "r").exists()


def test_a_start_that_fails_does_not_cost_the_checkpoints_that_were_left(agent: Agent) -> None:
    """They may be the only ones: the launcher that wrote them died."""
    left_by_another(agent.folder)
    (agent.folder / "script.py").write_text(TELLS)
    with socket.create_server(("", 0)) as taken:
        agent.say(hello(agent.folder, is_going_on=True, ports=[taken.getsockname()[1]]))
        agent.hear(f.Refused)
    assert agent.process.wait(WITHIN_S) == 3 and not (agent.folder / "runs" / "r").exists()
    again = Agent(agent.folder)
    again.begin(TELLS, is_going_on=True)
    assert (agent.folder / "runs" / "r" / "checkpoints" / "step-00000900").is_dir()
    again.stdin.close()
    again.process.wait(WITHIN_S)


def test_spare_ports_lie_where_they_may(agent: Agent) -> None:
    first = socket.create_server(("", 0))
    port = first.getsockname()[1]
    with first:
        ready = agent.begin(TELLS, num_spare_ports=2, between=(port, port))
    assert ready.spare_ports == [], "the only one is taken"


def test_cores_are_shared_out_where_nobody_says_how_many_threads(agent: Agent) -> None:
    ready = agent.begin(TELLS, num_workers=10_000)
    assert ready.threads == "1"


def test_a_folder_that_both_see_is_used_as_it_is(agent: Agent) -> None:
    shared = agent.folder / "elsewhere"
    shared.mkdir()
    (shared / ".t").touch()
    ready = agent.begin(TELLS, run_dir=str(shared))
    assert ready.is_shared and ready.run_dir == str(shared)
    agent.say(f.Start(WORKER, CLUSTER, 1))
    agent.hear(f.Exited)
    agent.say(f.End())
    agent.hear(f.Over)
    agent.say(f.End())
    assert not (agent.folder / "back").exists() and "I am" in (shared / "logs" / "worker-0.log").read_text()


def test_a_folder_elsewhere_that_only_the_launcher_sees_is_not_made_here(agent: Agent) -> None:
    ready = agent.begin(TELLS, run_dir=str(agent.folder / "elsewhere"))
    assert not ready.is_shared and ready.run_dir == str(agent.folder / "runs" / "r")


def test_hosts_that_share_a_home_have_folders_of_their_own(agent: Agent) -> None:
    other = agent.folder / "runs" / "r.b"
    other.mkdir(parents=True)
    (other / "kept").touch()
    ready = agent.begin(TELLS, host="a")
    assert ready.run_dir == str(agent.folder / "runs" / "r.a")
    agent.say(f.Start(WORKER, CLUSTER, 1))
    agent.hear(f.Exited)
    agent.say(f.End())
    agent.hear(f.Over)
    agent.say(f.End())
    assert agent.process.wait(WITHIN_S) == 0
    assert [path.name for path in (agent.folder / "runs").iterdir()] == ["r.b"] and (other / "kept").exists()


def test_signals_arrive(agent: Agent) -> None:
    agent.begin(STAYS)
    agent.start_one_that_stays()
    agent.say(f.Signal(WORKER, signal.SIGKILL))
    assert agent.hear(f.Exited) == f.Exited(WORKER, -signal.SIGKILL)


def test_the_end_of_stdin_is_the_end_of_all(agent: Agent) -> None:
    agent.begin(STAYS)
    task = agent.start_one_that_stays()
    agent.stdin.close()
    assert agent.process.wait(WITHIN_S) == 0 and gone(task)
    assert (agent.folder / "runs" / "r" / "logs").exists(), "nobody has it, so it stays"


def test_an_agent_that_started_nothing_leaves_nothing(agent: Agent) -> None:
    agent.begin(STAYS)
    agent.stdin.close()
    assert agent.process.wait(WITHIN_S) == 0 and not (agent.folder / "runs").exists()


def test_silence_is_the_end_of_all(agent: Agent) -> None:
    agent.begin(STAYS, silence_s=2.0)
    task = agent.start_one_that_stays()
    began_s = time.monotonic()
    assert agent.process.wait(WITHIN_S) == 0 and gone(task)
    assert time.monotonic() - began_s < 15


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_tasks_end_with_the_agent(agent: Agent, number: signal.Signals) -> None:
    agent.begin(STAYS)
    task = agent.start_one_that_stays()
    agent.process.send_signal(number)
    agent.process.wait(WITHIN_S)
    assert gone(task)


def test_it_refuses_in_a_sentence(agent: Agent) -> None:
    agent.say(hello(agent.folder))
    refused = agent.hear(f.Refused)
    assert isinstance(refused, f.Refused) and "script.py" in refused.why
    assert agent.process.wait(WITHIN_S) == 3 and not (agent.folder / "runs").exists()


def test_one_that_refuses_leaves_nothing(agent: Agent) -> None:
    (agent.folder / "script.py").write_text(TELLS)
    with socket.create_server(("", 0)) as taken:
        agent.say(hello(agent.folder, certificate=b"c", key=b"k", ports=[taken.getsockname()[1]]))
        refused = agent.hear(f.Refused)
    assert isinstance(refused, f.Refused) and "cannot be had" in refused.why
    assert agent.process.wait(WITHIN_S) == 3 and not (agent.folder / "runs").exists()


def test_it_refuses_another_version(agent: Agent) -> None:
    (agent.folder / "script.py").write_text(TELLS)
    agent.say(hello(agent.folder, version="0.0.1"))
    refused = agent.hear(f.Refused)
    assert isinstance(refused, f.Refused) and "0.0.1" in refused.why and VERSION in refused.why


def test_no_key_stays_behind(agent: Agent) -> None:
    agent.begin(STAYS, certificate=b"c", key=b"k")
    key = agent.folder / "runs" / "r" / "key.pem"
    assert key.stat().st_mode & 0o77 == 0
    agent.start_one_that_stays()
    agent.stdin.close()
    agent.process.wait(WITHIN_S)
    assert not key.exists() and key.parent.exists()
