"""Bad input gets one sentence and exit code 2, and nothing has been made or started."""

import os
import re
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Process, Processes, is_listening

from paceline.cli.main import main
from paceline.launchers.ports import Reserved

pytestmark = pytest.mark.timeout(120)

SERVE = ("serve", "--job_name=worker", "--task_index=0")
HOSTS = ("--ps_hosts=127.0.0.1:{a}", "--worker_hosts=127.0.0.1:{b},127.0.0.1:{c}")
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "unknown mode": (("run", "--mode=asinc", "train.py"), "Unknown mode 'asinc'; .*async"),
    "unknown mode of a task": ((*SERVE, *HOSTS, "--mode=snyc", "train.py"), "Unknown mode 'snyc'; .*sync"),
    "unknown placement": (("run", "--placement=roundrobin", "train.py"), "Unknown placement .*round_robin"),
    "unknown lane": (("run", "--lane=udp", "train.py"), "Unknown lane 'udp'; .*tcp"),
    "K that tokens do not reach": (
        ("run", "--mode=sync", "--replicas-to-aggregate=5", "--extra-tokens=1", "train.py"),
        "--replicas-to-aggregate is 5, but 2 workers with 1 extra tokens give at most 4",
    ),
    "K of nought": (("run", "--mode=sync", "--replicas-to-aggregate=0", "train.py"), "at least 1 gradient"),
    "K without rounds": (("run", "--replicas-to-aggregate=1", "train.py"), "only makes sense with --mode sync"),
    "grace without K": (("run", "--mode=sync", "--grace-ms=5", "train.py"), "need --replicas-to-aggregate"),
    "S below nought": (("run", "--mode=bounded", "--staleness=-1", "train.py"), "--staleness is -1; .* 0 or more"),
    "S without bounded": (("run", "--staleness=1", "train.py"), "only makes sense with --mode bounded"),
    "H of nought": (("run", "--mode=local", "--local-steps=0", "train.py"), "--local-steps is 0; .*at least 1"),
    "H of a task": ((*SERVE, *HOSTS, "--local_steps=4", "train.py"), "only makes sense with --mode local"),
    "EMA of one": (("run", "--ema=1", "train.py"), "--ema is 1.0; .* between 0 and 1"),
    "EMA of nought of a task": ((*SERVE, *HOSTS, "--ema=0", "train.py"), "--ema is 0.0; .* between 0 and 1"),
    "unknown wire": (("run", "--wire=float8", "train.py"), "Unknown wire 'float8'; .*float16"),
    "a range that goes down": (("run", "--workers=4:2", "train.py"), "--workers is 4:2; a range goes up, such as 2:4"),
    "more wanted than there are": (("run", "--workers=2:3", "--min-workers=4", "train.py"), "1 and the 3 workers"),
    "slow without a factor": (("run", "--slow=worker:1", "train.py"), "--slow is 'worker:1'; .*worker:1=5x"),
    "slow worker that is not there": (("run", "--slow=worker:2=5x", "train.py"), "worker:2, .* worker:0, worker:1"),
    "nothing to join": (("serve", "--join=nowhere", "train.py"), "No run folder 'nowhere'"),
    "duplicate addresses": (
        ("run", "--ps-hosts=127.0.0.1:{a}", "--worker-hosts=127.0.0.1:{b},127.0.0.1:{b}", "train.py"),
        "127.0.0.1:{b}",
    ),
    "duplicate addresses by hand": ((*SERVE, "--ps_hosts=h:1", "--worker_hosts=h:1", "train.py"), "h:1"),
    "address without a port": (("run", "--ps-hosts=localhost", "train.py"), "localhost"),
    "port out of range": ((*SERVE, "--ps_hosts=h:70000", "--worker_hosts=h:2", "train.py"), "70000"),
    "no such task": (
        ("serve", "--job_name=worker", "--task_index=2", *HOSTS, "train.py"),
        "worker.*2.*[02]",
    ),
    "no such job": (("serve", "--job_name=wroker", "--task_index=0", *HOSTS, "train.py"), "'wroker'.*worker"),
    "missing script": (("run", "tarin.py"), "There is no script tarin.py"),
    "missing script of a task": ((*SERVE, *HOSTS, "tarin.py"), "There is no script tarin.py"),
    "no script": ((*SERVE, *HOSTS), "needs a script"),
    "nothing to be": (("serve", "train.py"), "--job_name"),
}
QUICK = ("unknown mode", "no script")  # real processes: one `run`, one `serve`; the others in this process
NIGHTLY = pytest.mark.nightly("a command line that is refused in one process, and not by `paceline` itself")


@pytest.fixture
def folder(processes: Processes, train: Path, tmp_path: Path) -> Path:
    (tmp_path / "train.py").symlink_to(train)
    return tmp_path


def check_refused(process: Process, folder: Path, sentence: str) -> None:
    """One line, exit code 2, and the folder as it was."""
    process.ends_with(2)
    assert len(process.lines) == 1 and process.lines[0].startswith("paceline: "), process.text
    process.wait_for(sentence)
    left = {path.name for path in folder.iterdir()} - {"config"}  # the test's own secret may be there
    assert left == {"train.py"}, "nothing was made"


@pytest.fixture
def words(name: str, ports: Reserved) -> tuple[list[str], str, list[str]]:
    """The command line of a case, the sentence that it gets, and the addresses in it."""
    given, sentence = CASES[name]
    addresses = ports.addresses(3)
    found = dict(zip("abc", (address.rpartition(":")[2] for address in addresses), strict=True))
    return [word.format_map(found) for word in given], sentence.replace("{b}", found["b"]), addresses


@pytest.mark.parametrize("name", CASES)
def test_refused(
    words: tuple[list[str], str, list[str]],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same command lines as below, in this process."""
    monkeypatch.chdir(folder)
    before = threading.active_count()
    with pytest.raises(SystemExit) as end:
        main(words[0])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("paceline: ") and re.search(words[1], line)
    assert [path.name for path in folder.iterdir()] == ["train.py"], "nothing was made"
    assert not any(is_listening(address) for address in words[2]) and threading.active_count() == before


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else NIGHTLY) for name in CASES])
def test_refused_with_one_sentence(words: tuple[list[str], str, list[str]], processes: Processes, folder: Path) -> None:
    check_refused(processes.paceline(*words[0]), folder, words[1])
    assert not any(is_listening(address) for address in words[2])


@pytest.mark.slow
@pytest.mark.parametrize("text", ["{oops", "[1, 2]", '{"cluster": {"worker": ["h:1"]}}'])
def test_tf_config_that_cannot_be_meant(text: str, processes: Processes, folder: Path) -> None:
    check_refused(processes.paceline("serve", "train.py", TF_CONFIG=text), folder, "TF_CONFIG")


def test_tf_config_that_is_not_json_in_a_script_started_directly(processes: Processes, folder: Path) -> None:
    process = processes.start(sys.executable, "train.py", TF_CONFIG="{oops")
    check_refused(process, folder, "TF_CONFIG is not JSON")


def test_a_run_folder_that_holds_a_run(processes: Processes, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()  # the one name that check_refused lets pass
    (tmp_path / "config" / "config.json").write_text("{}")
    check_refused(processes.paceline("run", "--run-dir=config", "train.py"), folder, "already holds a run")
    assert [path.name for path in (tmp_path / "config").iterdir()] == ["config.json"]


@pytest.fixture
def taken() -> Callable[[], str]:
    """An address at which this very process listens."""
    listener = socket.create_server(("127.0.0.1", 0))
    yield f"127.0.0.1:{listener.getsockname()[1]}"  # type: ignore[misc]
    listener.close()


def test_a_port_in_use_says_by_whom(taken: str, processes: Processes, folder: Path) -> None:
    process = processes.paceline("run", f"--ps-hosts={taken}", "train.py")
    check_refused(process, folder, rf"{taken} is in use by .* \(pid {os.getpid()}\)")


@pytest.mark.parametrize("job", ["ps", pytest.param("worker", marks=pytest.mark.slow)])
def test_a_port_in_use_by_hand(job: str, taken: str, processes: Processes, ports: Reserved, folder: Path) -> None:
    hosts = {"ps": ports.addresses(1)[0], "worker": ports.addresses(1)[0], job: taken}
    flags = [f"--ps_hosts={hosts['ps']}", f"--worker_hosts={hosts['worker']}", f"--job_name={job}", "--task_index=0"]
    process = processes.paceline("serve", *flags, *([] if job == "ps" else ["train.py"]))
    process.ends_with(2)
    assert process.lines[-1].startswith("paceline: ") and "Traceback" not in process.text
    process.wait_for(rf"paceline: .*{taken}.* is in use by .* \(pid {os.getpid()}\)")


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--optimizer=LBFGS", "LBFGS.* SGD, Adam, AdamW, Adagrad, Adadelta, Adamax, NAdam, RAdam, RMSprop, Rprop"),
        pytest.param("--no-parameters", "the model ReLU has no parameters", marks=pytest.mark.slow),
    ],
)
def test_what_only_the_script_shows(flag: str, sentence: str, processes: Processes, folder: Path) -> None:
    process = processes.paceline("run", "--workers=1", "--run-dir=made", "train.py", flag).ends_with(2)
    process.wait_for(rf"^  paceline: .*{sentence}")
    assert "Traceback" not in process.text
    assert process.text.count("paceline: ") == 2, "told when it happened, and in the last block"
