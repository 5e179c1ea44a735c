"""`paceline run --hosts` through real ssh servers: as on one host. Each has a folder of its own, so all comes back.

Both are on this machine, so the lane is shm; tests/hosts has hosts with a network between them.
"""

import json
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from processes import MARK, Gate, Process, Processes
from sshd import Servers, need_sshd

from paceline.checkpoint import read
from paceline.launchers.ports import Reserved
from paceline.telemetry.ledgers import verdict_of

pytestmark = pytest.mark.timeout(180)

HOSTS = ("server1", "server2")


class Cluster:
    """Two hosts, and the file that describes them."""

    def __init__(self, processes: Processes, ports: Reserved, folder: Path) -> None:
        self.folder, self._processes = folder, processes
        self.servers = Servers(processes, ports, folder / "ssh")
        own = processes.environ()
        told = {name: own[name] for name in (MARK, "PYTHONPATH", "PACELINE_TEST_AUDIT", "PATH")}
        for name in HOSTS:
            (folder / name).mkdir()
            self.servers.start(name, **told)
        self.describe(1, 1)

    def describe(self, *slots: int) -> None:
        tables = [
            f'[hosts.{name}]\nslots = {count}\nfolder = "{self.folder / name}"\n'
            for name, count in zip(HOSTS, slots, strict=True)
        ]
        (self.folder / "cluster.toml").write_text("\n".join(tables))

    def give(self, script: Path) -> None:
        """The script to the hosts and to the launcher, by hand."""
        for name in (*HOSTS, "."):
            shutil.copy(script, self.folder / name / "train.py")

    def run(self, *words: object) -> Process:
        flags = ["--cluster", "cluster.toml", "--run-dir", "run", *words]
        return self._processes.paceline("run", *flags, **self.servers.environ)

    def lose(self, name: str) -> None:
        """As if the host had lost its power: for the launcher, its ssh ends, and no task of it does anything more."""
        for process in self._processes.alive():
            with suppress(psutil.Error):
                if "paceline.launchers.hosts.agent" in process.cmdline() and process.cwd() == str(self.folder / name):
                    tasks = process.children(recursive=True)
                    process.kill()
                    assert not psutil.wait_procs(tasks, timeout=10)[1], "they end with the agent"
                    return
        raise AssertionError(f"{name} has no agent")

    def wait_for_checkpoint(self) -> None:
        deadline = time.monotonic() + 30
        while read.newest(self.folder / "run" / "checkpoints") is None:
            assert time.monotonic() < deadline, "no checkpoint came"
            time.sleep(0.05)

    @property
    def summary(self) -> dict[str, object]:
        return dict(json.loads((self.folder / "run" / "summary.json").read_text()))

    def log(self, task: str) -> str:
        return (self.folder / "run" / "logs" / f"{task}.log").read_text()

    def left(self) -> list[str]:
        """What of the run is on the hosts."""
        return [str(path.relative_to(self.folder)) for name in HOSTS for path in (self.folder / name).glob("run*")]


@pytest.fixture
def cluster(processes: Processes, ports: Reserved, tmp_path: Path, train: Path) -> Iterator[Cluster]:
    need_sshd()
    made = Cluster(processes, ports, tmp_path)
    made.give(train)
    yield made
    made.servers.close()
    for name in HOSTS:  # a host that was lost keeps what it had, and half of the ledgers prove nothing
        shutil.rmtree(tmp_path / name, ignore_errors=True)


def test_it_trains_and_everything_lies_here(cluster: Cluster) -> None:
    run = cluster.run("--mode", "sync", "--save-every", "5", "train.py", "--epochs", "1").ends_with(0)
    assert "server1: ps:0, worker:0;" in run.text and "server2: worker:1;" in run.text
    assert cluster.summary["ok"] and cluster.summary["global_step"] == 20
    assert all("lane shm" in cluster.log(f"worker-{index}") for index in (0, 1))
    newest = read.newest(cluster.folder / "run" / "checkpoints")
    assert newest is not None and newest.name == "step-00000020"
    read.load(newest)
    assert len(list(newest.parent.iterdir())) <= 3, "--keep holds here, too"
    assert cluster.left() == []
    assert (cluster.folder / "run" / "ledger" / "ps-0.bin").stat().st_size > 0


@pytest.mark.slow
def test_ctrl_c_saves_first_and_ends_everything_everywhere(cluster: Cluster, gate: Gate) -> None:
    run = cluster.run("--mode", "sync", "train.py", "--epochs", "1000")
    run.wait_for(r"global step \d\d")
    run.signal(signal.SIGINT)
    run.ends_with(130)
    assert "Saved: run/checkpoints/step-" in run.text and "To resume" in run.text
    assert cluster.left() == []
    newest = read.newest(cluster.folder / "run" / "checkpoints")
    assert newest is not None
    again = cluster.run("--mode", "sync", "--resume", "auto", "--max-restarts", "0", "train.py", "--epochs", "1")
    again.ends_with(0)
    assert f"Resuming from {cluster.folder}/server1/run.server1/checkpoints/{newest.name}" in cluster.log("worker-0")
    assert cluster.summary["ok"]


@pytest.mark.slow
def test_nothing_is_left_anywhere_when_the_launcher_is_killed(
    cluster: Cluster, processes: Processes, gate: Gate
) -> None:
    processes.leave_unverified("the launcher was killed before the ledgers were whole")
    run = cluster.run("train.py", "--gate", f"1:3:{gate.path}")
    arrival = gate.arrival()
    run.popen.kill()
    run.popen.wait(60)
    for server in cluster.servers.started:
        server.popen.terminate()
    assert processes.survivors() == []
    arrival.release()


@pytest.mark.slow
def test_a_worker_that_is_killed_there_comes_back(cluster: Cluster) -> None:
    run = cluster.run("--mode", "sync", "--chaos", "kill=worker:1@7", "train.py", "--epochs", "1").ends_with(0)
    assert "worker:1 was killed by SIGKILL" in run.text and "starting it again (1 of 3)" in run.text
    assert cluster.summary["restarts_by_task"] == {"worker:1": 1} and "kill=worker:1@7 1x" in run.text


@pytest.mark.slow
def test_a_ps_that_is_killed_there_has_its_memory(cluster: Cluster) -> None:
    run = cluster.run("--mode", "sync", "--chaos", "kill=ps:0@7", "train.py", "--epochs", "1").ends_with(0)
    assert "ps:0 is back, with all that it knew: 7 updates" in cluster.log("ps-0")
    assert "kill=ps:0@7 1x" in run.text
    assert cluster.summary["global_step"] == 20 and cluster.summary["restarts_by_task"] == {"ps:0": 1}


@pytest.mark.slow
def test_a_host_that_is_lost_takes_its_worker_and_the_others_go_on(cluster: Cluster, gate: Gate) -> None:
    run = cluster.run("train.py", "--epochs", "1", "--gate", f"0:3:{gate.path}", "--gate", f"1:3:{gate.path}")
    held = gate.arrivals(2)
    cluster.lose("server2")
    run.wait_for("no other host has room for it")
    held["worker:0"].release()
    run.ends_with(3)
    assert "worker:1 was lost with its host" in run.text and "server2 is lost: the connection to it" in run.text
    assert cluster.summary["lost"] == ["worker:1"]
    assert cluster.summary["workers"][0]["steps"] == 20  # type: ignore[index]


@pytest.mark.slow
def test_what_a_lost_host_had_goes_on_elsewhere(cluster: Cluster, gate: Gate) -> None:
    """The ps and the chief, which are restored from the checkpoint that came back before."""
    cluster.describe(1, 2)
    gates = ("--gate", f"0:12:{gate.path}", "--gate", f"1:15:{gate.path}")
    run = cluster.run("--save-every", "5", "--workers", "2", "train.py", "--epochs", "1", *gates)
    held = gate.arrivals(2)
    cluster.wait_for_checkpoint()
    cluster.lose("server1")
    held["worker:1"].release()
    gate.open()  # whether the chief comes here again depends on how far it was when the checkpoint was made
    run.ends_with(0)
    assert "ps:0: server1 is lost; it starts on server2, at 127.0.0.1:" in run.text
    assert "worker:0: server1 is lost; it starts on server2" in run.text
    assert cluster.summary["restarts_by_task"] == {"ps:0": 1, "worker:0": 1} and cluster.summary["ok"]
    assert "has moved from" in cluster.log("worker-1")


@pytest.mark.slow
def test_a_ps_that_moved_and_is_killed_goes_on_in_its_own_ledger(cluster: Cluster, gate: Gate) -> None:
    cluster.describe(1, 2)
    gates = ("--gate", f"0:12:{gate.path}", "--gate", f"1:15:{gate.path}")
    flags = ("--save-every", "5", "--workers", "2", "--chaos", "kill=ps:0@40")
    run = cluster.run(*flags, "train.py", "--epochs", "2", *gates)
    held = gate.arrivals(2)
    cluster.wait_for_checkpoint()
    cluster.lose("server1")
    held["worker:1"].release()
    gate.arrival().release()
    run.ends_with(0)
    assert "kill=ps:0@40 1x" in run.text and "ps:0 is back, with all that it knew" in cluster.log("ps-0")
    moved = [path.name for path in (cluster.folder / "run" / "ledger").glob("ps-0.moved-*")]
    assert moved == ["ps-0.moved-1.bin"] and verdict_of(cluster.folder / "run").is_ok


@pytest.mark.slow
def test_the_script_comes_with_sync_code(cluster: Cluster, processes: Processes) -> None:
    for name in HOSTS:
        shutil.rmtree(cluster.folder / name)
    refused = cluster.run("train.py").ends_with(3)
    assert "server1 has no folder" in refused.text and "--sync-code" in refused.text
    (cluster.folder / "server1").mkdir()
    (cluster.folder / "server2").mkdir()
    refused = cluster.run("train.py").ends_with(3)
    assert "There is no script train.py on server1" in refused.text and "--sync-code" in refused.text
    assert not (cluster.folder / "run").exists()
    project = cluster.folder / "project"
    (project / "runs").mkdir(parents=True)
    (project / "runs" / "big").touch()
    shutil.move(cluster.folder / "train.py", project / "train.py")
    run = cluster.run("--sync-code", "project/train.py", "--epochs", "1").ends_with(0)
    assert "copied to server1 (rsync), server2 (rsync)" in run.text or "(tar)" in run.text
    for name in HOSTS:
        assert [path.name for path in (cluster.folder / name / "project").iterdir()] == ["train.py"]


@pytest.mark.slow
def test_tls_works_and_no_key_stays_there(cluster: Cluster) -> None:
    run = cluster.run("--tls", "--lane", "tcp", "train.py", "--epochs", "1").ends_with(0)
    assert all("lane tcp" in cluster.log(f"worker-{index}") for index in (0, 1)), run.text
    assert not list(cluster.folder.glob("server*/**/key.pem"))


@pytest.mark.slow
def test_the_secret_is_in_no_command_line(cluster: Cluster, processes: Processes, gate: Gate) -> None:
    run = cluster.run("train.py", "--epochs", "1", "--gate", f"1:3:{gate.path}")
    arrival = gate.arrival()
    secret = (cluster.folder / "run" / "secret").read_text()
    lines = [" ".join(process.cmdline()) for process in processes.alive()]
    arrival.release()
    run.ends_with(0)
    assert any("launchers.hosts.agent" in line for line in lines) and not [line for line in lines if secret in line]
