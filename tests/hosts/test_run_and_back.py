"""`paceline run --cluster` with TLS, and a host that is cut off for a moment: shorter than its launcher's patience."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Gate, Processes
from running_hosts import RunningHost

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(240)]


def test_a_host_is_cut_off_and_comes_back(
    hosts: Callable[[int], list[RunningHost]], processes: Processes, train: Path, gate: Gate
) -> None:
    """Its worker is given up and comes back; nobody is started again, and nothing counts twice (verify, at the end)."""
    launcher, first, second = hosts(3)
    tables = [f'[hosts.{host.name}]\nslots = 1\nfolder = "{host.folder}"\n' for host in (first, second)]
    (processes.folder / "cluster.toml").write_text("\n".join(tables))
    for place in (processes.folder, first.folder, second.folder):
        shutil.copy(train, place / "train.py")
    flags = ("--cluster", "cluster.toml", "--run-dir", "run", "--lease-s", "1", "--tls")
    stops = ("--gate", f"1:5:{gate.path}", "--gate", f"0:15:{gate.path}")
    run = launcher.paceline("run", *flags, "train.py", "--epochs", "1", *stops)
    standing = {each.text.split()[0]: each for each in (gate.arrival(), gate.arrival())}  # in any order: it is async
    second.cut()
    standing["worker:1"].release()
    wait_for_line(processes.folder / "run/logs/ps-0.log", "Evicted: worker:1")
    second.mend()
    standing["worker:0"].release()
    run.ends_with(0)
    told = json.loads((processes.folder / "run" / "summary.json").read_text())
    assert told["ok"] and told["restarts"] == 0 and told["lost"] == []
    assert {pair["worker"]: pair["lane"] for pair in told["pairs"]} == {"worker:0": "shm", "worker:1": "tcp"}
    assert "worker:1 was given up, and comes back" in (processes.folder / "run/logs/worker-1.log").read_text()


def wait_for_line(log: Path, text: str) -> None:
    """Until a log that comes from another host has it."""
    deadline = time.monotonic() + 30
    while text not in (log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline, f"{log} never said {text!r}"
        time.sleep(0.02)  # it comes piece by piece, and nobody tells
