"""DOES the command line do what it says? Flags, refusals, help, the launcher with stand-in tasks."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from rich.console import Console
from small_checkpoint import write_step

import paceline.errors
from paceline.cli import main as cli
from paceline.cli.run import hosts_or_count
from paceline.cli.serve import as_argv
from paceline.cluster.cores import usable_cores
from paceline.cluster.discovery import Assignment, discover, encode_for_child
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import UsageError
from paceline.ingraph import server as op_server
from paceline.launchers import closing, entry, joining, live, local, ports, supervisor
from paceline.telemetry import read, summary
from paceline.telemetry.lines import error_line
from paceline.telemetry.paths import RunPaths
from paceline.telemetry.records import PsReport, WorkerReport
from paceline.transport import port_reservation
from paceline.wire import messages as m
from paceline.worker.control import Running, running

SRC = Path(paceline.errors.__file__).parents[1]
VERBS = [
    [],
    ["run"],
    ["serve"],
    ["demo"],
    ["emit"],
    ["emit", "docker"],
    ["emit", "jobset"],
    ["emit", "tfjob"],
    ["emit", "sbatch"],
    ["emit", "env"],
    ["env"],
    ["kv"],
    ["kv", "ls"],
    ["kv", "get"],
    ["chaos"],
    ["ctl"],
    ["ctl", "mode"],
    ["ckpt"],
    ["ckpt", "ls"],
    ["ckpt", "diff"],
    ["lab"],
    ["lab", "run"],
    ["lab", "show"],
    ["lab", "compare"],
    ["lab", "report"],
]

# Stands for the core in every task: a worker that closes writes a byte, a ps serves until all have.
STAND_IN = """
import os, signal, sys, types
task = types.ModuleType("paceline.launchers.task")
def serve_ps(assignment):
    if os.environ.get("PS_FAILS"):
        raise RuntimeError("the shard burned")
    if os.environ.get("PS_STAYS"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # that it may end now
        os.open(os.environ["PS_STAYS"], os.O_RDWR)  # the workers wait for that
        signal.pause()
    pipe = os.open(os.environ["PIPE"], os.O_RDWR)  # held open, so that no byte is lost
    for _ in assignment.cluster.workers[: assignment.settings.started_workers]:
        os.read(pipe, 1)
    if os.environ.get("OTHERS"):  # as with a worker that somebody else has started: it trains on until told
        import time
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a ps that is released stays while somebody trains
        with open(f"{assignment.settings.run_dir}/telemetry/ps-0.jsonl", "a") as file:
            file.write('{"t": %f, "kind": "tick", "task": "ps:0", "workers": 1}\\n' % time.time())
        print("others train on", flush=True)
        os.read(pipe, 1)
def finish(ok):
    print("finish", ok)
    if ok and "PACELINE_TASK" in os.environ:  # as a worker that has trained
        import json
        told = json.loads(os.environ["PACELINE_TASK"])
        index, folder = told["task"]["index"], told["settings"]["run_dir"]
        if folder:
            with open(f"{folder}/telemetry/worker-{index}.jsonl", "a") as file:
                record = {"t": 0, "kind": "report", "task": f"worker:{index}", "report": {"index": index}}
                file.write(json.dumps(record) + "\\n")
    if "PIPE" in os.environ:
        os.write(os.open(os.environ["PIPE"], os.O_WRONLY), b".")
task.serve_ps, task.finish = serve_ps, finish
sys.modules["paceline.launchers.task"] = task
"""
WORKER = """
import json, os, sys
index = json.loads(os.environ["PACELINE_TASK"])["task"]["index"]
"""


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, whose tasks have the stand-in core."""
    (tmp_path / "stand_in").mkdir()
    (tmp_path / "stand_in" / "sitecustomize.py").write_text(STAND_IN)
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("PIPE", str(tmp_path / "pipe"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "stand_in"), str(SRC)]))
    monkeypatch.setenv("CI", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # what is printed does not depend on this machine's cards
    monkeypatch.setenv("PACELINE_NURSERY", "0")  # the stand-in needs no torch, and should not wait for it
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script(folder: Path, body: str) -> str:
    path = folder / "train.py"
    path.write_text(WORKER + textwrap.dedent(body))
    return str(path)


def call(*argv: str) -> int:
    """The exit code of a command, run in this process."""
    with pytest.raises(SystemExit) as end:
        cli.main(list(argv))
    return int(end.value.code or 0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks get a second to end, instead of ten."""
    monkeypatch.setattr(local, "Patience", lambda: supervisor.Patience(ps_s=1.0, stop_s=2.0))


# Help and version


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: " ".join(verb) or "paceline")
def test_help_imports_no_torch(verb: list[str]) -> None:
    code = (
        "import sys\nfrom paceline.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "heavy = {'torch', 'numpy', 'rich.live'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *verb, "--help"],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: paceline" in done.stdout


def test_the_launcher_imports_no_torch() -> None:
    """It starts in a moment, and leaves the memory to its tasks."""
    code = "import sys, paceline.launchers.local; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out.startswith("paceline ")


def test_unknown_flag_is_a_usage_error() -> None:
    assert call("run", "--wrokers", "2", "train.py") == 2


# Flags


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[local.Request]:
    """What `paceline run` asks of the launcher."""
    seen: list[local.Request] = []
    monkeypatch.setattr(local, "run", lambda request: seen.append(request) or 0)
    return seen


@pytest.mark.parametrize("spelled", ["--log-every", "--log_every"])
def test_dashes_and_underscores_are_the_same(requests: list[local.Request], spelled: str) -> None:
    assert call("run", spelled, "7", f"{spelled}=8", "--run_dir", "a_b-c", "train.py") == 0
    assert requests[0].settings.log_every == 8
    assert requests[0].run_dir == "a_b-c"


def test_script_arguments_pass_untouched(requests: list[local.Request]) -> None:
    own = ["--workers", "9", "--batch_size=3", "--", "--mode", "x", "-m", "--help"]
    assert call("run", "--workers", "3", "train.py", *own) == 0
    assert requests[0].program == entry.Program(script="train.py", args=tuple(own))
    assert requests[0].workers == 3


def test_module_and_defaults(requests: list[local.Request]) -> None:
    assert call("run", "-m", "pkg.train", "--epochs", "1") == 0
    assert requests[0].program == entry.Program(script="pkg.train", args=("--epochs", "1"), is_module=True)
    assert (requests[0].ps, requests[0].workers, requests[0].settings.mode) == (1, 2, "async")


def test_hosts_become_addresses(requests: list[local.Request]) -> None:
    assert call("run", "--ps-hosts", "a:1", "--worker_hosts='b:1, b:2'", "train.py") == 0
    assert (requests[0].ps, requests[0].workers) == (("a:1",), ("b:1", "b:2"))


def test_counts_and_hosts_must_agree() -> None:
    params = {"ps": 2, "ps_hosts": "a:1"}
    with pytest.raises(UsageError, match="has 1 address;"):
        hosts_or_count("ps", params, default=1)


def test_demo_takes_flags_after_its_name(requests: list[local.Request]) -> None:
    assert call("demo", "mnist", "--workers", "3", "--", "--epochs", "1") == 0
    assert call("demo", "--mode=sync") == 0
    assert Path(requests[0].program.script).name == "mnist.py"
    assert requests[0].program.args == ("--epochs", "1")
    assert (requests[0].workers, requests[1].settings.mode) == (3, "sync")


def test_a_demo_s_own_help_starts_nothing(
    requests: list[local.Request], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", list(sys.argv))
    monkeypatch.setattr("sys.path", list(sys.path))
    assert call("demo", "autoencoder", "--", "--help") == 0
    assert "--hidden" in capsys.readouterr().out and not requests


def test_every_number_of_a_mode_reaches_the_settings(requests: list[local.Request]) -> None:
    dial = ["--replicas-to-aggregate=2", "--extra_tokens", "1", "--grace-ms", "20%"]
    assert call("run", "--mode=sync", *dial, "train.py") == 0
    assert str(requests[0].settings.mode_spec) == "sync, 2 to aggregate, 1 extra tokens, grace 20 % of a round"
    assert call("demo", "--mode=bounded", "--staleness=0", "--staleness-scale", "--ema", "0.9", "--overlap") == 0
    told = requests[1].settings
    assert (told.staleness, told.staleness_scale, told.ema, told.overlap) == (0, True, 0.9, True)
    local_flags = ["--local-steps=4", "--outer=async", "--outer-lr=1", "--outer-momentum=0"]
    types_flags = ["--wire=bfloat16", "--master=model", "--slow=worker:1=5x"]
    assert call("run", "--mode=local", *local_flags, *types_flags, "train.py") == 0
    told = requests[2].settings
    assert (told.local_steps, told.outer, told.outer_lr, told.outer_momentum) == (4, "async", 1.0, 0.0)
    assert (told.wire, told.master, told.slow) == ("bfloat16", "model", "worker:1=5x")


def test_flags_of_the_dial_have_the_settings_defaults(requests: list[local.Request]) -> None:
    assert call("run", "train.py") == 0
    assert requests[0].settings == Settings(run_id="")


@pytest.mark.parametrize(
    ("flags", "room", "started", "fewest"),
    [
        (["--workers=3"], 3, None, 1),
        (["--workers=3", "--min-workers=2"], 3, None, 2),
        (["--workers=2:6"], 6, 2, 2),
        (["--workers", "2:6", "--min-workers", "1"], 6, 2, 1),
        (["--workers=1:2", "--worker-hosts=h:1,h:2"], ("h:1", "h:2"), 1, 1),
    ],
)
def test_a_range_of_workers(
    requests: list[local.Request], flags: list[str], room: object, started: int | None, fewest: int
) -> None:
    assert call("run", *flags, "train.py") == 0
    told = requests[0].settings
    assert (requests[0].workers, told.started_workers, told.min_workers) == (room, started, fewest)


def test_serve_hands_only_its_own_flags_to_discovery() -> None:
    params = {
        "script": "train.py",
        "args": ("--x",),
        "job_name": "ps",
        "log_device_placement": True,
        "mode": None,
    }
    assert as_argv(params) == ["--job_name=ps", "--log_device_placement=True"]
    by_hand = {"task_index": 0, "slow": "", "overlap": False, "join": None, "workers": "2:4"}
    assert as_argv(by_hand) == ["--task_index=0", "--started_workers=2"]


# Refusals: one sentence, exit code 2, nothing made


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["run", "missing.py"], "There is no script missing.py"),
        (["run", "."], "is a folder"),
        (["run", "-m", "no_such_module_x"], "No module named 'no_such_module_x'"),
        (["run", "--mode", "snyc", "train.py"], "did you mean 'sync'"),
        (["run", "--mode", "sync", "--replicas-to-aggregate", "0", "train.py"], "at least 1 gradient"),
        (
            ["run", "--mode", "sync", "--replicas-to-aggregate", "5", "--extra-tokens", "1", "train.py"],
            "at most 4 gradients a round",
        ),
        (["run", "--replicas-to-aggregate", "1", "train.py"], "--mode sync"),
        (["run", "--staleness", "2", "train.py"], "--staleness only makes sense with --mode bounded"),
        (["run", "--mode", "bounded", "--staleness", "-1", "train.py"], "--staleness is -1"),
        (["run", "--mode", "local", "--local-steps", "0", "train.py"], "--local-steps is 0"),
        (["run", "--ema", "1.5", "train.py"], "--ema is 1.5"),
        (["run", "--wire", "int8", "train.py"], "Unknown wire 'int8'"),
        (["run", "--workers", "6:2", "train.py"], "a range goes up, such as 2:6"),
        (["run", "--workers", "two", "train.py"], "use a number such as 2, or a range such as 2:6"),
        (["run", "--workers", "0", "train.py"], "at least 1"),
        (["run", "--workers", "2:4", "--min-workers", "5", "train.py"], "between 1 and the 4 workers"),
        (["run", "--workers", "2:4", "--worker-hosts", "h:1,h:2", "train.py"], "has 2 addresses"),
        (["run", "--slow", "worker:2=5x", "train.py"], "its workers are worker:0, worker:1"),
        (["demo", "--slow", "worker:1", "--", "--epochs", "1"], "write it as worker:1=5x"),
        (["run", "--ps", "0", "train.py"], "at least 1"),
        (["run", "--save-every", "often", "train.py"], "--save-every"),
        (
            ["run", "--save-every", "0.5s", "train.py"],
            "--save-every is '0.5s'; use a number of steps (500), a time (10m,",
        ),
        (["run", "--chaos", "", "train.py"], "--chaos is empty; name what it is to do, or leave it out"),
        (["demo", "--slow", " "], "--slow is empty"),
        (["run", "--lane", "inproc", "train.py"], "inproc"),
        (["run", "--ps-hosts", "localhost", "train.py"], "has no port"),
        (["run", "--ps-hosts", "h:1,h:1", "train.py"], "both have the address"),
        (["run", "--ps-hosts", "192.0.2.1:2222", "train.py"], "not an address of this host"),
        (["demo", "mnits"], "did you mean 'mnist'"),
        (["demo", "mnist", "extra"], "'extra' is none"),
        (["serve"], "--job_name"),
        (
            ["serve", "--job_name=ps", "--task_index=4", "--ps_hosts=a:1", "--worker_hosts=a:2"],
            "no task ps:4",
        ),
        (["kv", "ls", "nowhere"], "No run folder"),
        (["serve", "--join", "nowhere"], "No run folder"),
        (["serve", "--join", "nowhere", "--mode=sync"], "--mode is the run's own"),
        (
            ["serve", "--job_name=ps", "--ps_hosts=a:1", "--worker_hosts=a:2,a:3", "--workers=1:3"],
            "--workers is 1:3, but the cluster has 2 workers",
        ),
    ],
)
def test_bad_input_is_one_sentence(
    argv: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("TF_CONFIG", raising=False)
    Path("train.py").write_text("")
    assert call(*argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("paceline: ")
    assert sentence in lines[0]
    assert not Path("runs").exists()


def test_serve_worker_needs_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    flags = ["--job-name=worker", "--task-index", "0", "--ps-hosts=a:1", "--worker-hosts=a:2"]
    assert call("serve", *flags) == 2


def test_port_in_use_names_the_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"{port}.* in use .*pid {os.getpid()}"):
            ports.check_free([f"127.0.0.1:{port}"])


def test_reserved_ports_differ_and_a_task_may_listen_there() -> None:
    with ports.Reserved() as reserved:
        found = reserved.addresses(20)
        assert len(set(found)) == 20
        reserved.before_start()
        host, port = found[0].split(":")
        socket.create_server((host, int(port))).close()


def test_dry_run_starts_nothing(stage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", "--dry-run", "--ps", "2", script(stage, "")) == 0
    out = capsys.readouterr().out
    assert "Cluster: job ps -> {0 -> 127.0.0.1:" in out
    assert "OMP_NUM_THREADS=" in out
    assert not (stage / "runs").exists()


def test_dry_run_tells_what_is_unusual(stage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mode = ["--mode=bounded", "--staleness=2", "--workers=1:3", "--slow=worker:0=5x"]
    assert call("run", "--dry-run", *mode, script(stage, "")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "mode bounded, staleness 2, placement bytes, lane auto, data shard" in lines
    assert "1 of 3 workers are started here; one more: paceline serve --join RUN" in lines
    assert "Slowed on purpose (--slow): worker:0=5x" in lines
    assert f"OMP_NUM_THREADS={usable_cores()} in every task" in lines


# The launcher, with stand-in tasks


def test_a_run_leaves_its_folder(stage: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train = script(stage, "print('args', sys.argv[1:], sys.path[0], os.environ['OMP_NUM_THREADS'])")
    assert call("run", "--run-dir", "r", train, "--epochs", "2") == 0
    out = capfd.readouterr().out.splitlines()
    assert out[0] == "Run folder: r"
    assert out[1].startswith("Cluster: job ps")
    assert out[-2] == "Run folder: r (summary.json, and what the tasks printed in logs/)"
    assert out[-1].startswith("To start over: paceline run --run-dir r --resume auto ")
    paths = RunPaths("r")
    assert json.loads(paths.config.read_text())["run_id"] == "r"
    assert list(json.loads(paths.cluster.read_text())) == ["ps", "worker", "tasks"]
    assert paths.secret.stat().st_mode & 0o777 == 0o600
    told = json.loads(paths.summary.read_text())
    assert (told["ok"], told["lost"]) == (True, [])
    log = paths.logs(Task("worker", 1)).read_text()
    assert f"args ['--epochs', '2'] {stage} " in log
    assert "finish True" in log


def test_a_run_folder_is_not_used_twice(stage: Path) -> None:
    (stage / "r").mkdir()
    (stage / "r" / "config.json").write_text("{}")
    assert call("run", "--run-dir", "r", script(stage, "")) == 2


def test_a_failed_worker_is_shown_once(stage: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train = script(stage, "if index == 1:\n    raise ValueError('bad loss')\nprint('went on')")
    assert call("run", "--run-dir", "r", "--max-restarts", "0", train) == 1
    shown = capfd.readouterr()
    progress, last = shown.out.splitlines(), shown.err.splitlines()
    at_once = progress.index("worker:1 failed with exit code 1; its log: r/logs/worker-1.log")
    assert progress[at_once + 1] == "  ValueError: bad loss" and "Traceback" not in shown.out
    assert last[0] == "Root cause: worker:1 failed with exit code 1; its log: r/logs/worker-1.log"
    assert last[1] == "  Traceback (most recent call last):" and shown.err.count("Traceback") == 1
    assert "runpy" not in shown.err
    told = json.loads(RunPaths("r").summary.read_text())
    assert (told["ok"], told["lost"]) == (False, ["worker:1"])
    assert "went on" in RunPaths("r").logs(Task("worker", 0)).read_text()
    assert "finish False" in RunPaths("r").logs(Task("worker", 1)).read_text()


def test_the_same_failure_is_shown_in_full_only_once(stage: Path, capfd: pytest.CaptureFixture[str]) -> None:
    raises = script(stage, "raise ValueError('bad loss')")
    assert call("run", "--run-dir", "r", "--max-restarts", "0", raises) == 1
    said = capfd.readouterr().err
    assert said.count("Traceback") == 1
    assert said.count("for the same reason: ValueError: bad loss") == 1


@pytest.mark.parametrize(
    ("raised", "code"), [("UsageError", 2), ("WaitTimeout", 3), ("TrainingFailed", 1), ("SystemExit", 1)]
)
def test_exit_codes_of_workers_become_the_run_s(stage: Path, raised: str, code: int) -> None:
    train = script(stage, f"from paceline.errors import *\nraise {raised}('no')")
    assert call("run", "--workers", "1", "--max-restarts", "0", train) == code


def test_a_mistake_in_the_script_is_told_and_nobody_is_started_again(
    stage: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call("run", "--run-dir", "r", "--workers", "1", script(stage, "x = (")) == 1
    shown = capfd.readouterr()
    told = "; not started again: Python cannot read it: its own message says what to change\n  SyntaxError: "
    assert told in shown.out
    assert shown.err.splitlines()[-1].startswith("To start over, once that is put right: paceline run ")


def test_a_lost_ps_ends_the_run(
    stage: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PS_FAILS", "1")
    monkeypatch.delenv("PIPE")
    assert call("run", "--run-dir", "r", script(stage, "import signal\nsignal.pause()")) == 3
    assert "RuntimeError: the shard burned" in capfd.readouterr().out
    assert json.loads(RunPaths("r").summary.read_text())["lost"] == ["ps:0"]


@pytest.mark.usefixtures("quick")
def test_a_ps_that_stays_is_ended(
    stage: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(stage / "stays")
    monkeypatch.setenv("PS_STAYS", str(stage / "stays"))
    monkeypatch.delenv("PIPE")
    assert call("run", "--run-dir", "r", script(stage, "open(os.environ['PS_STAYS']).close()")) == 0
    assert "ps:0 did not end within 1 s" in capfd.readouterr().out


def test_an_elastic_run_starts_the_first_and_shows_nobody_else(stage: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train = script(stage, "print('threads', os.environ['OMP_NUM_THREADS'])")
    assert call("run", "--run-dir", "r", "--workers", "1:3", train) == 0
    out = capfd.readouterr().out
    assert "1 of 3 workers are started here; one more: paceline serve --join r" in out
    assert "worker:1" not in out.replace("Cluster: job worker", "")
    told = json.loads(RunPaths("r").summary.read_text())
    assert [row["task"] for row in told["workers"]] == ["worker:0"]
    assert (told["ok"], told["lost"], told["cluster"]["num_workers"]) == (True, [], 3)
    log = RunPaths("r").logs(Task("worker", 0)).read_text()
    assert f"threads {usable_cores()}\n" in log
    assert not RunPaths("r").logs(Task("worker", 1)).exists()
    assert json.loads(RunPaths("r").config.read_text())["started_workers"] == 1


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("is_late", [False, True], ids=["before", "as the last one ends"])
def test_the_ps_are_not_ended_while_a_joined_worker_trains(
    stage: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], is_late: bool
) -> None:
    """The stand-in ps says so in a tick, and ends only when the launcher has gone on waiting because of it."""
    monkeypatch.setenv("OTHERS", "1")
    seen: list[bool] = []

    def train(joined: supervisor.Joined, ask: Callable[[supervisor.Joined], bool] = supervisor.Joined.train) -> bool:
        if is_late and not seen:  # the ps stays, and the launcher has not heard of the joined worker yet
            deadline = time.monotonic() + 30
            while not ask(joined) and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(False)
            return False
        seen.append(ask(joined))
        if (
            seen[-1] and seen.count(True) == 1
        ):  # the launcher has seen it, and goes on waiting: now the joined worker closes
            os.write(os.open(os.environ["PIPE"], os.O_WRONLY), b".")
        return seen[-1]

    monkeypatch.setattr(supervisor.Joined, "train", train)
    assert call("run", "--run-dir", "r", "--workers", "1:2", script(stage, "")) == 0
    assert "did not end within" not in capfd.readouterr().out
    assert True in seen


def test_a_slowed_worker_is_marked_at_both_ends(stage: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call("run", "--run-dir", "r", "--slow", "worker:1=5x", script(stage, "")) == 0
    assert capfd.readouterr().out.splitlines().count("Slowed on purpose (--slow): worker:1=5x") == 2
    assert json.loads(RunPaths("r").summary.read_text())["slow"] == "worker:1=5x"


def test_a_joined_worker_that_vanished_is_named(stage: Path) -> None:
    leaves = """
        with open(f"r/telemetry/worker-1.jsonl", "w") as file:
            file.write('{"t": 1, "kind": "tick", "task": "worker:1", "step": 7}\\n')
    """
    assert call("run", "--run-dir", "r", "--workers", "1:3", script(stage, leaves)) == 0
    told = json.loads(RunPaths("r").summary.read_text())
    assert told["lost"] == ["worker:1"]
    assert [(row["task"], row["steps"]) for row in told["workers"]] == [("worker:0", 0), ("worker:1", 7)]


@pytest.fixture
def launcher(stage: Path) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Starts `paceline run` as a process; whatever is left of it at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(body: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "paceline", "run", "--run-dir", "r", script(stage, body)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate(timeout=120)


# Every worker writes its pid to a pipe of the test's own, so that the test knows when all run.
ANNOUNCE = """
with open("ready", "w") as ready:
    ready.write(f"{os.getpid()} {os.getppid()}\\n")
import signal
signal.pause()
"""


def ready_pids(stage: Path, count: int) -> list[int]:
    pids: list[int] = []
    while len(pids) < count:
        with open(stage / "ready") as ready:
            pids += [int(line.split()[0]) for line in ready]
    return pids


def test_interrupt_ends_all_and_says_130(stage: Path, launcher: Callable[[str], "subprocess.Popen[str]"]) -> None:
    os.mkfifo(stage / "ready")
    process = launcher(ANNOUNCE)
    pids = ready_pids(stage, 2)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Interrupted" in out
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert json.loads(RunPaths("r").summary.read_text())["error"] == "interrupted"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends the tasks on Linux only")
def test_a_killed_launcher_leaves_nothing(stage: Path, launcher: Callable[[str], "subprocess.Popen[str]"]) -> None:
    os.mkfifo(stage / "ready")
    process = launcher(ANNOUNCE)
    ready_pids(stage, 2)
    tasks = psutil.Process(process.pid).children()
    assert len(tasks) == 3
    process.kill()
    _, alive = psutil.wait_procs(tasks, timeout=60)
    assert not [task for task in alive if task.status() != psutil.STATUS_ZOMBIE]


# One task by hand


def test_serve_becomes_the_task(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPE")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(stage / "config"))
    train = script(stage, "print(sys.argv[1:], json.loads(os.environ['PACELINE_TASK'])['settings']['mode'])")
    flags = [
        "--job_name=worker",
        "--task-index",
        "1",
        "--ps_hosts=h:1",
        "--worker_hosts=h:2,h:3",
        "--mode=sync",
    ]
    command = [sys.executable, "-m", "paceline", "serve", *flags, train, "--mode", "mine"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['--mode', 'mine'] sync", "finish True"]


def test_serve_ps_needs_no_script_and_reads_tf_config(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"ps": ["h:1"], "worker": ["h:2"]}
    monkeypatch.setenv("XDG_CONFIG_HOME", str(stage / "config"))
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "ps", "index": 0}}))
    monkeypatch.setenv("PS_FAILS", "1")
    done = subprocess.run([sys.executable, "-m", "paceline", "serve"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the shard burned" in done.stderr


def test_serve_leaves_room_by_hand(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPE")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(stage / "config"))
    body = "told = json.loads(os.environ['PACELINE_TASK'])['settings']\n"
    train = script(stage, body + "print(told['started_workers'], told['min_workers'])")
    flags = ["--job_name=worker", "--task_index=0", "--ps_hosts=h:1", "--worker_hosts=h:2,h:3", "--workers=1:2"]
    command = [sys.executable, "-m", "paceline", "serve", *flags, train]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1 1", "finish True"]


# A worker that joins later


def made_run(folder: Path, **settings: object) -> Running:
    """A run folder as the launcher makes it, with three places, and as control finds it."""
    with ports.Reserved() as reserved:
        request = local.Request(
            program=entry.Program(script="train.py", args=("--epochs", "1")),
            ps=1,
            workers=3,
            settings=Settings(run_id="", started_workers=2, **settings),
            run_dir=str(folder),
        )
        cluster = ClusterSpec({"ps": reserved.addresses(1), "worker": reserved.addresses(3)})
        local.make_folder(request, cluster, local.folder_of(request))
    return running(folder)


def record(run: Running, task: str, kind: str, **fields: object) -> None:
    with RunPaths(run.run_dir).telemetry(Task.parse(task)).open("a") as file:
        file.write(json.dumps({"t": 1, "kind": kind, "task": task, **fields}) + "\n")


def test_who_joins_takes_a_place_that_nobody_has(tmp_path: Path) -> None:
    run = made_run(tmp_path / "r")
    places = joining.free_places(run, m.Status([1], [], 0, live=[0]))
    assert [str(task) for task in places] == ["worker:2"]
    for task in ("worker:0", "worker:1"):
        record(run, task, "start")
    places = joining.free_places(run, m.Status([], [], 5, live=[0]))
    assert [str(task) for task in places] == ["worker:2", "worker:1"], "a lost one's place is the second choice"
    record(run, "worker:1", "report", report={"index": 1})
    places = joining.free_places(run, m.Status([], [], 5, live=[0, 2]))
    assert places == [], "nobody does a share again that is done"


def test_two_that_join_at_once_get_different_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path / "r")
    monkeypatch.setattr(port_reservation, "_RESERVED", {})
    taken = run.cluster.address(Task("worker", 1)).rpartition(":")
    places = [Task("worker", 1), Task("worker", 2)]
    with socket.create_server((taken[0], int(taken[2]))):
        assert joining.first_held(run, places) == Task("worker", 2)
        with pytest.raises(UsageError, match=r"All 3 workers of this run are there, .* --workers 3:4"):
            joining.first_held(run, places[:1])


def test_who_joins_gets_the_settings_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path / "r", mode="sync", replicas_to_aggregate=2, slow="worker:2=3x")
    monkeypatch.setattr(joining, "ask_status", lambda run: m.Status([], [], 5, live=[0, 1]))
    monkeypatch.setattr(port_reservation, "_RESERVED", {})
    found = joining.join(run.run_dir)
    assert (found.task, found.source, found.secret) == (Task("worker", 2), "run folder", run.secret)
    assert found.incarnation > 1, "newer than what the launcher starts"
    assert (found.settings.run_id, found.settings.run_dir) == ("r", str(tmp_path / "r"))
    assert str(found.settings.mode_spec) == "sync, 2 to aggregate"
    assert discover(argv=[], environ=encode_for_child(found)) == found
    with pytest.raises(UsageError, match=r"worker:1 of this run is there.*; free: worker:2\."):
        joining.join(run.run_dir, index=1)
    with pytest.raises(UsageError, match="no task worker:7"):
        joining.join(run.run_dir, index=7)


def test_the_run_s_own_program_is_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("train.py").write_text("")
    made_run(tmp_path / "r")
    monkeypatch.chdir(tmp_path)
    program = joining.program_of(joining.read_config("r"))
    entry.check_program(program)
    assert (program.args, Path(program.script)) == (("--epochs", "1"), tmp_path / "here" / "train.py")


@pytest.mark.parametrize("argv", [[], ["train.py"], ["--task_index=2"]])
def test_a_finished_run_is_not_joined(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    made_run(tmp_path / "r")
    RunPaths("r").summary.write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    assert call("serve", "--join", "r", *argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "has ended" in lines[0]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_does_not_answer_is_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(joining, "TRY_S", 0.0)
    Path("train.py").write_text("")
    made_run(tmp_path / "r")
    assert call("serve", "--join", "r") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "does not answer" in lines[0]


# Reading a ps


class Variable(msgspec.Struct):
    name: str = "fc.weight"
    shape: tuple[int, ...] = (10, 784)
    dtype: str = "float32"
    version: int = 7
    ps: tuple[str, ...] = ("ps:0", "ps:1")
    is_trained: bool = True


def test_kv_prints_plain_columns_in_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = types.SimpleNamespace(read=lambda *_: [Variable()], value=lambda _, name, *__: (Variable(name), [1.5]))
    monkeypatch.setitem(sys.modules, "paceline.worker.kv", stand_in)
    monkeypatch.setattr("paceline.worker.kv", stand_in, raising=False)
    (tmp_path / "runs" / "latest").mkdir(parents=True)
    (tmp_path / "runs" / "latest" / "cluster.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert call("kv", "ls", "latest") == 0
    assert capsys.readouterr().out.splitlines()[1] == "fc.weight\t10x784\tfloat32\t7\tps:0,ps:1\ttrained"
    assert call("kv", "get", "runs/latest", "fc.bias") == 0
    assert capsys.readouterr().out.startswith("name: fc.bias\n")


# Views and the last block


def test_the_table_shows_every_task(tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    view = live.LiveTable(ClusterSpec({"ps": ["h:1"], "worker": ["h:2"]}), RunPaths(tmp_path), console)
    view.update({Task("worker", 0): 0})
    view.say("[not markup]")
    view.close()
    assert all(text in screen.getvalue() for text in ("ps:0", "starting", "worker:0", "ended", "[not markup]"))


def test_plain_lines_tell_the_newest_tick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ClusterSpec({"ps": ["h:1"], "worker": ["h:2", "h:3"]})
    paths = RunPaths(tmp_path)
    paths.create()
    view = live.PlainLines(cluster, paths)
    file = paths.telemetry(Task("worker", 0))
    first = '{"t": 1, "kind": "tick", "step": 5, "global_step": 9, "steps_per_s": 2, "metrics": {"loss": 0.5}}\n'
    file.write_text('{"t": 0, "kind": "start"}\n' + first + first.replace('"step": 5', '"step": 6')[:30])
    view.update({})
    file.write_text(file.read_text() + first.replace('"step": 5', '"step": 6')[30:] + "garbage\n")
    view.update({Task("worker", 1): 1})
    one, two = capsys.readouterr().out.splitlines()
    assert one.endswith("global step 9 | worker:0 step 5 (2/s)  loss 0.5 | worker:1 starting")
    assert two.endswith("global step 9 | worker:0 step 6 (2/s)  loss 0.5 | worker:1 failed")


def test_the_last_line_is_not_said_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line every three seconds, also where nothing has changed; but not the same once more at the end."""
    now_s = 100.0
    monkeypatch.setattr(live.time, "monotonic", lambda: now_s)
    paths = RunPaths(tmp_path)
    paths.create()
    view = live.PlainLines(ClusterSpec({"ps": ["h:1"], "worker": ["h:2"]}), paths)
    for seconds in (0.0, 3.0, 0.4):
        now_s += seconds
        view.update({})
    assert len(capsys.readouterr().out.splitlines()) == 2
    view.update({Task("worker", 0): 0})
    assert capsys.readouterr().out.endswith("worker:0 ended\n"), "what is new is said at once"


def test_whoever_a_ps_has_counted_is_not_starting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A worker's first record comes a second after its first step."""
    cluster = ClusterSpec({"ps": ["h:1"], "chief": ["h:2"], "worker": ["h:3", "h:4"]})
    paths = RunPaths(tmp_path)
    paths.create()
    file = paths.telemetry(Task("ps", 0))
    file.write_text('{"t": 1, "kind": "tick", "global_step": 64, "staleness": {"0": {"0": 40}, "1": {"2": 24}}}\n')
    live.PlainLines(cluster, paths).update({Task("worker", 1): 1})
    assert capsys.readouterr().out.endswith("global step 64 | chief:0 training | worker:0 training | worker:1 failed\n")
    screen = io.StringIO()
    view = live.LiveTable(cluster, paths, Console(file=screen, force_terminal=True, width=100))
    view.update({})
    view.close()
    shown = screen.getvalue()
    assert shown.count("train") == 2 * shown.count("starting") > 0


def test_steps_that_are_not_in_the_model_are_told(tmp_path: Path) -> None:
    """After Ctrl+C others go on while the last checkpoint is written."""
    paths = RunPaths(tmp_path)
    write_step(paths.checkpoints, 450)
    cluster = ClusterSpec({"ps": ["h:1"], "worker": ["h:2"]})

    def said(global_step: int) -> str:
        worker = WorkerReport(index=0, task="worker:0", steps=464, is_lost=True)
        reports = [worker], [PsReport(index=0, global_step=global_step)]
        told = summary.build(
            Settings(run_id="r"), cluster, reports, ok=False, wall_s=1.0, restarts=0, lost=[], error="interrupted"
        )
        return closing.block(told, paths)

    assert "step-00000450, without the last 14 of the 464 steps: they are lost\n" in said(464)
    assert "step-00000450\n" in said(450)
    assert "ms  (interrupted)\n" in said(450), "nothing is wrong with a worker that was told to end"


def test_a_run_of_ops_is_told_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By what its servers tell, there is no step to show, and at the end no training to speak of."""
    cluster = ClusterSpec({"ps": ["h:1"], "worker": ["h:2", "h:3"]})
    settings = Settings(run_id="r", run_dir=str(tmp_path))
    paths = RunPaths(tmp_path)
    paths.create()
    client, other = cluster.workers
    for task, phase in ((client, "runs"), (other, "serves")):
        op_server._tell_phase(Assignment(cluster, task, 1, settings, b"", "launcher"), phase)
    live.PlainLines(cluster, paths).update({})
    assert capsys.readouterr().out.endswith(" s] worker:0 runs | worker:1 serves\n")
    op_server._report(Assignment(cluster, other, 1, settings, b"", "launcher"), "serves")
    told = {"wall_s": 2.0, "restarts": 0, "lost": []}
    reports = read.reports(tmp_path)
    failed = closing.block(summary.build(settings, cluster, reports, ok=False, error="why", **told), paths, (), "again")
    assert failed.splitlines()[:3] == [
        "Run failed: why; 2.0 s",
        "  worker:0  was the client  (did not end properly)",
        "  worker:1  ran ops for others",
    ]
    assert "Model" not in failed and failed.endswith("To start over: again")
    op_server._report(Assignment(cluster, client, 1, settings, b"", "launcher"), "runs")
    reports = read.reports(tmp_path)
    done = closing.block(summary.build(settings, cluster, reports, ok=True, error=None, **told), paths, (), "again")
    assert done.startswith("Run done; 2.0 s\n  worker:0  was the client\n") and done.endswith("To run it again: again")


def test_table_rows_of_a_ps() -> None:
    tick = live.Tick(version=4, global_step=4, updates_per_s=2.0, staleness_mean=0.5)
    assert live.row(Task("ps", 0), tick, None) == ("ps:0", "4", "4", "2.0", "staleness 0.50", "serve")


def test_the_last_traceback_of_a_log_is_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    trace = "Traceback (most recent call last):\n  File x\n"
    log.write_text(f"step 1\n{trace}KeyError: 1\nnoise\n{trace}ValueError: 2\n")
    assert closing.reason(log)[-1] == "ValueError: 2"
    assert "KeyError: 1" not in closing.reason(log)


@pytest.mark.parametrize(
    "notice",
    [
        "paceline: worker:1 was given up, and comes back",
        "paceline: an iterable dataset is not shared out: every worker iterates all of it, unless it splits itself",
    ],
)
def test_what_a_task_says_by_the_way_is_no_error(notice: str, tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    log.write_text(f"{notice}\n")
    assert closing.gist(closing.reason(log)) == ""
    log.write_text(f"{notice}\n{error_line(UsageError('2 ps are needed'))}\n{notice}\n")
    assert closing.gist(closing.reason(log)) == "paceline: error: 2 ps are needed"


def test_the_model_is_what_resume_auto_would_take(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert closing.newest_checkpoint(paths) is None
    write_step(paths.checkpoints, 300)
    write_step(paths.checkpoints, 200, lineage=1)  # the cluster went back, and trained on from there
    torn = write_step(paths.checkpoints, 400, lineage=1)
    (torn / "model.safetensors").write_bytes(b"")
    (paths.checkpoints / "step-00000500").mkdir()
    assert closing.newest_checkpoint(paths) == paths.checkpoints / "step-00000200"


def test_what_tasks_print_is_shown_with_their_names(tmp_path: Path) -> None:
    cluster, paths = ClusterSpec({"ps": ["h:1"], "worker": ["h:2"]}), RunPaths(tmp_path)
    paths.create()
    log = paths.logs(Task("worker", 0))
    log.write_text("of an earlier run\n")
    ticks = live.Ticks(cluster, paths, shows_logs=True)
    with log.open("a") as file:
        file.write("job_name : worker\n12.5: Worker 0: training step 3 done (global step: 4)\naccuracy 0.9\nhal")
    assert ticks.update() == ["worker:0: accuracy 0.9"], "whole lines, none of which the launcher shows itself"
    with log.open("a") as file:
        file.write("f a line\n")
    assert ticks.update() == ["worker:0: half a line"]
    assert live.Ticks(cluster, paths).update() == []
