"""Hosts that are cut off and come back, or do not: nobody hangs, nothing counts twice, and the run goes on."""

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from placed import Placed, end, saved_step
from processes import Gate
from running_hosts import RunningHost

from paceline.telemetry.ledgers import verdict_of

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(240)]
Hosts = Callable[[int], list[RunningHost]]


@pytest.mark.parametrize(
    "mode", [pytest.param("async", marks=pytest.mark.nightly("in async, a step that a host's return doubles")), "sync"]
)
def test_a_host_is_cut_off_and_comes_back(mode: str, hosts: Hosts, train: Path, gate: Gate, tmp_path: Path) -> None:
    """Its worker is out after the lease, comes back as a newer incarnation, and makes the steps that it had left."""
    first, second = hosts(2)
    cluster = Placed(tmp_path, [first], [first, second], ["--lease-s=1", f"--mode={mode}"])
    stops = ("--gate", f"1:10:{gate.path}", "--gate", f"0:30:{gate.path}")
    tasks = cluster.start_all(train, "--epochs", "2", "--batches", "20", *stops)
    cut_off, ahead = gate.arrival(), None
    if cut_off.text.startswith("worker:0"):  # in async either may be first
        cut_off, ahead = gate.arrival(), cut_off
    assert cut_off.text.startswith("worker:1")
    second.cut()
    began_s = time.monotonic()
    cut_off.release()
    tasks["ps:0"].wait_for("^Evicted: .*worker:1|^worker:1 is gone")
    assert time.monotonic() - began_s < 40, "the lease is a second"
    ahead = ahead or gate.arrival()  # the other one has gone on, alone
    assert ahead.text.startswith("worker:0")
    second.mend()
    tasks["worker:1"].wait_for("worker:1 was given up, and comes back")
    ahead.release()
    end(tasks)
    assert cluster.lanes() == {("worker:0", "ps:0"): "shm", ("worker:1", "ps:0"): "tcp"}
    assert first.paceline("verify", cluster.run).ends_with(0).lines[0].startswith("0 violations in ")
    updates = int(re.fullmatch(r"ps:0 served (\d+) updates", tasks["ps:0"].lines[-1])[1])  # type: ignore[index]
    assert 78 <= updates <= 80 if mode == "async" else updates >= 40


def test_the_host_of_the_ps_is_lost_and_its_shard_restored_elsewhere(
    hosts: Hosts, train: Path, gate: Gate, tmp_path: Path
) -> None:
    """From the checkpoint on storage that all share. The old one was only cut off, and comes back when all is done."""
    first, second, third = hosts(3)
    cluster = Placed(tmp_path, [first], [second, third], ["--lease-s=1", "--mode=sync", "--save-every=5"])
    stops = ("--gate", f"0:20:{gate.path}", "--gate", f"0:40:{gate.path}")
    tasks = cluster.start_all(train, "--epochs", "3", "--batches", "20", *stops)
    stands = gate.arrival()
    saved_step(cluster.run)
    old = tasks["ps:0"]
    first.cut()
    old.signal(signal.SIGSTOP)  # its storage does not answer either
    tasks["ps:0"] = cluster.start("ps", 0, flags=("--at", second.at(2222)), on=second)
    tasks["ps:0"].wait_for(f"^Started server with target: paceline://{second.at(2222)}$")
    stands.release()
    stands = gate.arrival()  # twenty steps on
    first.mend()
    old.signal(signal.SIGCONT)
    old.ends_with(3)
    assert f"ps:0 was started again at {second.at(2222)}" in old.lines[-1]
    stands.release()
    end(tasks)
    said = tasks["worker:0"].text + tasks["worker:1"].text
    assert len(re.findall(r"it goes on from the checkpoint .*, lineage 1", said)) == 1
    assert said.count(f"ps:0 has moved from {first.at(2222)} to {second.at(2222)}") >= 2
    assert cluster.lanes() == {("worker:0", "ps:0"): "shm", ("worker:1", "ps:0"): "tcp"}
    assert verdict_of(cluster.run).is_ok
