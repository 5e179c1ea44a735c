"""`paceline run --hosts` over hosts with a network between them: the lane is tcp, and a host may be cut off."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from placed import saved_step
from processes import Gate, Process, Processes
from running_hosts import RunningHost

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(240)]


class Cluster:
    """The launcher's own host, and those that it names; each has a folder of its own."""

    def __init__(self, hosts: list[RunningHost], folder: Path, train: Path, slots: list[int]) -> None:
        self.hosts, self._folder = hosts, folder
        tables = [
            f'[hosts.{host.name}]\nslots = {count}\nfolder = "{host.folder}"\n'
            for host, count in zip(hosts[1:], slots, strict=True)
        ]
        (folder / "cluster.toml").write_text("\n".join(tables))
        for place in (folder, *(host.folder for host in hosts)):
            shutil.copy(train, place / "train.py")

    def run(self, *words: object) -> Process:
        return self.hosts[0].paceline("run", "--cluster", "cluster.toml", "--run-dir", "run", *words)

    @property
    def run_dir(self) -> Path:
        return self._folder / "run"

    @property
    def summary(self) -> dict[str, object]:
        return dict(json.loads((self._folder / "run" / "summary.json").read_text()))

    def log(self, task: str) -> str:
        return (self._folder / "run" / "logs" / f"{task}.log").read_text()

    def log_there(self, number: int, task: str) -> str:
        """As it is on the host now, whether it has come or not."""
        (path,) = self.hosts[number].folder.rglob(f"logs/{task}.log")
        return path.read_text()


Make = Callable[[list[int]], Cluster]


@pytest.fixture
def cluster(hosts: Callable[[int], list[RunningHost]], processes: Processes, train: Path) -> Make:
    return lambda slots: Cluster(hosts(1 + len(slots)), processes.folder, train, slots)


def test_one_ps_and_two_workers_over_two_hosts(cluster: Make) -> None:
    made = cluster([1, 1])
    run = made.run("--mode", "sync", "train.py", "--epochs", "1").ends_with(0)
    assert "h1: ps:0, worker:0;" in run.text and "h2: worker:1;" in run.text
    assert "lane shm" in made.log("worker-0"), "it is beside its ps"
    assert "lane tcp" in made.log("worker-1"), "the link is crossed"
    assert made.summary["ok"] and made.summary["global_step"] == 20
    assert not list(made.hosts[1].folder.glob("run*"))


def test_a_host_without_power_is_replaced(cluster: Make, gate: Gate) -> None:
    """Its ps and the chief are restored on the other one from the checkpoint that the launcher has."""
    made = cluster([1, 2])
    gates = ("--gate", f"0:12:{gate.path}", "--gate", f"1:15:{gate.path}")
    run = made.run("--workers", "2", "--save-every", "5", "train.py", "--epochs", "1", *gates)
    held = gate.arrivals(2)
    saved_step(made.run_dir)  # the launcher has one
    assert "lane tcp" in made.log_there(2, "worker-1"), "its ps is on the other host"
    made.hosts[1].stop_ssh()
    held["worker:1"].release()
    gate.open()  # whether the chief comes here again depends on how far it was when the checkpoint was made
    run.ends_with(0)
    assert f"it starts on h2, at {made.hosts[2].address}:" in run.text
    assert made.summary["restarts_by_task"] == {"ps:0": 1, "worker:0": 1}
    assert "has moved from" in made.log("worker-1")
    pairs = made.summary["pairs"]
    assert isinstance(pairs, list) and {pair["lane"] for pair in pairs} == {"shm"}, "now the ps is beside both"


def test_a_host_that_is_cut_off_for_good(cluster: Make, gate: Gate) -> None:
    """Nobody is told: the launcher sees that it is silent, and there the agent sees the same of the launcher."""
    made = cluster([1, 1])
    run = made.run("--lease-s", "2", "train.py", "--epochs", "1", "--gate", f"1:3:{gate.path}")
    arrival = gate.arrival()
    assert "lane tcp" in made.log_there(2, "worker-1"), "its ps is on the other host"
    made.hosts[2].cut()
    gate.arrival().release()
    run.ends_with(0)
    assert "h2 is lost: no word from it" in run.text
    assert "worker:1: h2 is lost; it starts on h1" in run.text, "worker:0 has ended, and left a slot"
    _, left = psutil.wait_procs(made.hosts[2].running(), timeout=30)
    assert not left, "there, too, nothing is left"
    arrival.release()
