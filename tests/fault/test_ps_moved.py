"""A ps whose host is gone is started on another one: the others find it by the run folder, and the old one, should it
come back, trains nobody."""

import signal
from pathlib import Path

import pytest
from by_hand import STEPS, STOP, ByHand, served, went_back
from processes import Gate, Process, Processes

from paceline.cluster import moved
from paceline.cluster.spec import Task
from paceline.launchers.ports import Reserved
from paceline.telemetry.ledgers import verdict_of

pytestmark = pytest.mark.timeout(180)
NIGHTLY = pytest.mark.nightly("a ps that moves in the other mode, ps:0 among them, or while its folder cannot be read")


def start_elsewhere(cluster: ByHand, index: int, address: str) -> Process:
    cluster.ps[index] = cluster.start("ps", index, "--at", address)
    cluster.ps[index].wait_for(f"^Started server with target: paceline://{address}$")
    return cluster.ps[index]


@pytest.mark.parametrize(
    ("mode", "lost"),
    [
        pytest.param("async", 1, marks=pytest.mark.slow),
        pytest.param("async", 0, marks=NIGHTLY),
        pytest.param("sync", 0, marks=NIGHTLY),
    ],
)
def test_it_goes_on_from_the_checkpoint_at_its_new_address(
    mode: str, lost: int, processes: Processes, ports: Reserved, train: Path, gate: Gate
) -> None:
    cluster = ByHand(processes, ports, train, gate, "--mode", mode, "--save-every", "5")
    arrival = gate.arrival()
    cluster.saved_step()
    (address,) = ports.addresses(1)
    cluster.ps[lost].signal(signal.SIGKILL)
    cluster.ps[lost].end()
    start_elsewhere(cluster, lost, address)
    arrival.release()
    said = cluster.end()
    assert f"ps:{lost} has moved from" in said and f"to {address}" in said
    assert len(went_back(said, lost)) == 1
    counts = [served(each) for each in cluster.ps]
    assert counts[0] == counts[1] if mode == "sync" else counts[lost] < counts[1 - lost]
    assert (cluster.run / "ledger" / f"ps-{lost}.moved-1.bin").exists()


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), pytest.param("async", marks=NIGHTLY)])
def test_the_old_one_comes_back_and_ends(
    mode: str, processes: Processes, ports: Reserved, train: Path, gate: Gate
) -> None:
    """Two ps:0 at once: the old one was only cut off (stopped, here), and has all that it knew. Whoever trained against
    it now would give its gradients to nobody."""
    flags = ("--mode", mode, "--save-every", "5", "--lease-s", "2")
    cluster = ByHand(processes, ports, train, gate, *flags, stops=(f"0:{STOP}", f"1:{2 * STOP}"))
    stands = [gate.arrival()]
    cluster.saved_step()
    old = cluster.ps[0]
    old.signal(signal.SIGSTOP)
    start_elsewhere(cluster, 0, ports.addresses(1)[0])
    stands[0].release()
    stands.append(gate.arrival())  # worker 1 trains on, with the new one
    old.signal(signal.SIGCONT)
    old.ends_with(3)
    assert "error: ps:0 was started again at" in old.lines[-1]
    assert "served" not in old.text and "Traceback" not in old.text
    assert not (cluster.run / "summary.json").exists(), "the run is not over because the old one is"
    stands[1].release()
    assert len(went_back(cluster.end(), 0)) == 1
    assert served(cluster.ps[0]) >= STEPS - STOP


@NIGHTLY
def test_a_worker_never_goes_back_when_the_run_folder_cannot_be_read(
    processes: Processes, ports: Reserved, train: Path, gate: Gate
) -> None:
    """The old one lives, the new one is killed, and moved.json is gone for a while: whoever looks for ps:0 must wait
    for its successor, at the address that it knew last."""
    flags = ("--mode", "async", "--save-every", "5", "--lease-s", "2")
    cluster = ByHand(processes, ports, train, gate, *flags, stops=(f"0:{STOP}", f"0:{2 * STOP}"))
    stand = gate.arrival()
    cluster.saved_step()
    old = cluster.ps[0]
    old.signal(signal.SIGSTOP)
    (address,) = ports.addresses(1)
    start_elsewhere(cluster, 0, address)
    stand.release()
    stand = gate.arrival()
    (cluster.run / moved.FILE).unlink()
    old.signal(signal.SIGCONT)  # it cannot know
    cluster.ps[0].signal(signal.SIGKILL)
    cluster.ps[0].end()
    stand.release()
    cluster.workers[0].wait_for("Still waiting for response from worker: /job:ps/replica:0/task:0")
    start_elsewhere(cluster, 0, address)
    old.ends_with(3)
    said = cluster.end()
    assert len(went_back(said, 0)) == len(went_back(said, 0, lineage=2)) == 1
    assert verdict_of(cluster.run).is_ok


@pytest.mark.slow
def test_a_ps_that_has_moved_is_not_started_where_it_was(processes: Processes, tmp_path: Path) -> None:
    moved.write(tmp_path, {Task("ps", 0): "192.0.2.1:2222"})
    hosts = ("--ps_hosts=127.0.0.1:2222", "--worker_hosts=127.0.0.1:2223")
    flags = ("--job_name=ps", "--task_index=0", *hosts, "--run-dir", tmp_path)
    ps = processes.paceline("serve", *flags)
    ps.ends_with(2)
    assert "ps:0 of this run has moved to 192.0.2.1:2222" in ps.text and "`--at HOST:PORT` moves it here" in ps.text
