"""The flags of `paceline run --hosts`: refused in a sentence before any host is asked, or shown by --dry-run."""

import errno
import io
import json
import os
import tarfile
from pathlib import Path

import msgspec
import pytest

from paceline.cli.main import main as cli
from paceline.cluster.hosts import Host
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import EXIT_CLUSTER, EXIT_OK, EXIT_USAGE, ClusterError
from paceline.launchers import mirror
from paceline.launchers.crew import Run
from paceline.launchers.entry import Program
from paceline.launchers.hosts import many, ssh, syncing
from paceline.launchers.hosts.agent import Folder
from paceline.launchers.hosts.diagnosis import Seen
from paceline.launchers.hosts.far import Far, lost_s
from paceline.launchers.hosts.frames import Hello, Put, Ready
from paceline.launchers.hosts.machine import Machine
from paceline.launchers.hosts.preflight import Report
from paceline.launchers.pieces import Piece
from paceline.telemetry.paths import RunPaths


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_SSH", "false")  # whoever asks a host fails
    (tmp_path / "train.py").write_text("")
    return tmp_path


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli(["run", *words])
    return int(ended.value.code or 0)


def test_dry_run_says_who_goes_where_and_asks_nobody(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    assert run("--hosts", "server1:2,server2:1", "--ps", "2", "--dry-run", "train.py") == EXIT_OK
    told = capsys.readouterr().out
    assert "server1: ps:0, worker:0, worker:1\nserver2: ps:1, worker:2\n" in told
    assert "nothing was started" in told and not (here / "runs").exists()


def test_an_elastic_run_marks_who_may_join(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--hosts", "server1:2,server2:1", "--workers", "2:3", "--dry-run", "train.py") == EXIT_OK
    assert "server2: worker:2 (may join)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--hosts", "a", "--ps-hosts", "a:1", "--worker-hosts", "b:2", "train.py"), "leave one out"),
        (("--hosts", "a", "--hostfile", "f", "train.py"), "leave one out"),
        (("--hosts", "a:1", "--workers", "3", "train.py"), "3 workers do not fit"),
        (("--hosts", "a,b", "--lane", "shm", "train.py"), "--lane shm is for tasks of one host, and these are on 2"),
        (("--hosts", "a", "--plain", "train.py"), "--plain starts tasks on this host only"),
        (("--hosts", "a", "missing.py"), "There is no script missing.py"),
        (("--hosts", "a", "--mode", "snyc", "train.py"), "sync"),
        (("--sync-code", "train.py"), "name them with --hosts"),
        (("--hostfile", "nowhere", "train.py"), "nowhere"),
    ],
)
def test_what_makes_no_sense_is_told_in_a_sentence(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    assert run(*words) == EXIT_USAGE
    assert said in " ".join(capsys.readouterr().err.split()) and not (here / "runs").exists()


def test_a_host_may_be_silent_for_longer_than_a_task() -> None:
    assert lost_s(Settings(run_id="", lease_s=1.0)) == 10.0 and lost_s(Settings(run_id="", lease_s=20.0)) == 60.0


def test_what_is_no_code_is_not_packed(here: Path) -> None:
    for name in ("runs/r1/log", ".git/config", ".venv/bin/python", "lib/__pycache__/a.pyc", "lib/a.py"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).touch()
    (here / "result").mkdir()
    for name in ("cluster.json", "secret"):  # a run folder, which has its secret
        (here / "result" / name).touch()
    packed = io.BytesIO()
    syncing.pack(here, packed)
    packed.seek(0)
    with tarfile.open(fileobj=packed) as tar:
        files = {member.name for member in tar if member.isfile()}
    assert files == {"./train.py", "./lib/a.py"}


@pytest.mark.parametrize(
    ("code", "stderr", "said"),
    [
        (96, "", "There is no script train.py on b (in there); --sync-code copies it there."),
        (97, "", "b has no folder 'there'"),
        (255, "ssh: connect to host b port 22: No route to host", "There is no way to b"),
        (None, "", "b did not answer within"),
    ],
)
def test_a_host_whose_script_is_not_seen_says_why(
    code: int | None, stderr: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(name="b", target="b", folder="there")
    monkeypatch.setattr(ssh, "run_on_all", lambda *_: [ssh.Answer(host=host, code=code, stderr=stderr)])
    with pytest.raises(ClusterError) as refused:
        many.check_scripts(Program(script="train.py"), [host])
    assert str(refused.value).startswith(said)


CLUSTER = ClusterSpec({"ps": ["a:1"], "worker": ["a:2", "b:2"]})
A, B = Host(name="a", target="a"), Host(name="b", target="b")
PLACED = {Task("ps", 0): A, Task("worker", 0): A, Task("worker", 1): B}


def test_cards_are_looked_for_on_the_host_of_each_worker(here: Path) -> None:
    settings = Settings(run_id="r", worker_device="/cpu:0,/job:worker/task:1/gpu:0", soft_placement=False)
    run = Run(program=Program(script="x"), cluster=CLUSTER, settings=settings, paths=RunPaths(here), threads="1")
    ready = {
        name: Ready(host=name, cores=1, threads="1", cards=cards, run_dir="r", is_shared=True, spare_ports=[])
        for name, cards in (("a", 0), ("b", 1))
    }
    many.check_cards(run, PLACED, ready)
    with pytest.raises(ClusterError, match=r"^b: worker:1 is to compute on /gpu:0, and there is no GPU here"):
        many.check_cards(run, PLACED, {**ready, "b": ready["a"]})


def test_descriptors_are_counted_where_the_ps_is() -> None:
    few = Machine(
        name="a", system="Linux", python="3.11", executable="p", paceline="1", sources="s", torch="2", cores=2,
        memory_mb=1.0, free_memory_mb=1.0, descriptors=50,
    )  # fmt: skip
    many_of_them = msgspec.structs.replace(few, descriptors=1000)
    report = Report(seen={host.name: Seen(host=host, machine=few, address=host.name) for host in (A, B)})
    with pytest.raises(ClusterError, match=r"needs about 54 descriptors, and a allows 50"):
        many.check_descriptors(CLUSTER, PLACED, report)
    report.seen["a"] = msgspec.structs.replace(report.seen["a"], machine=many_of_them)
    many.check_descriptors(CLUSTER, PLACED, report)


def test_more_tasks_than_a_host_can_hold_are_not_started() -> None:
    machine = Machine(
        name="a", system="Linux", python="3.11", executable="p", paceline="1", sources="s", torch="2", cores=2,
        memory_mb=8000.0, free_memory_mb=4000.0,
    )  # fmt: skip
    report = Report(seen={"a": Seen(host=A, machine=machine, address="a")})
    many.check_memory(PLACED, report)
    with pytest.raises(ClusterError, match=r"^a would get 1000 tasks of at least 100 MB each, and has 8000 MB"):
        many.check_memory({Task("worker", number): A for number in range(1000)}, report)


def hello(token: str) -> Hello:
    settings, program = Settings(run_id="r"), Program(script="train.py")
    return Hello(
        version="1", host="a", settings=settings, program=program, ps=[], secret=b"", run_dir="made", token=token,
        num_workers=1,
    )  # fmt: skip


@pytest.mark.parametrize("is_full", [True, False])
def test_a_full_disk_on_a_host_does_not_end_what_trains_there(
    here: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    folder = Folder(hello("another"))

    def write(root: Path, piece: Piece, sender: str = "") -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if is_full:
        monkeypatch.setattr(mirror, "keep", write)
    folder.put(Put(Piece("note.txt", 0, b"abc", is_last=True)))
    assert (folder.paths.root / "note.txt").exists() != is_full


@pytest.mark.parametrize("can_write", [True, False])
def test_a_host_that_may_only_read_the_run_folder_writes_into_one_of_its_own(
    here: Path, monkeypatch: pytest.MonkeyPatch, can_write: bool
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK or can_write)
    (here / "made").mkdir()
    with syncing.token_in(here / "made") as token:
        folder = Folder(hello(token))
    assert folder.is_shared == can_write and folder.paths.root.name == ("made" if can_write else "made.a")


def test_nobody_copies_a_home_folder(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    monkeypatch.setenv("HOME", str(here))
    with pytest.raises(Exception, match="put the script into a folder of its own"):
        syncing.sync(syncing.code_of(Program(script="train.py"), here), [])


def test_a_host_that_fails_after_it_was_asked_leaves_a_summary(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(far: Far, hosts: list[Host], hellos: dict[str, Hello]) -> dict[str, Ready]:
        raise ClusterError("localhost: port 2222 was taken meanwhile.")

    monkeypatch.setattr(Far, "open", fail)
    assert run("--hosts", "localhost:1", "--run-dir", "made", "train.py") == EXIT_CLUSTER
    told = json.loads((here / "made" / "summary.json").read_text())
    assert not told["ok"] and told["error"] == "localhost: port 2222 was taken meanwhile."
