"""A ps whose memory is gone: the workers bring the newest checkpoint, or what they have, and go on by themselves.

Tasks are started by hand here (by_hand.py).
"""

import signal
from pathlib import Path

import pytest
from by_hand import STEPS, STOP, ByHand, served, went_back
from processes import Gate, Processes

from paceline.checkpoint.read import load_newest
from paceline.launchers.ports import Reserved
from paceline.telemetry.ledger import Kind, read

pytestmark = pytest.mark.timeout(180)
NIGHTLY = pytest.mark.nightly("memory lost in another mode, by another shard, twice, or with all that knew the values")


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=NIGHTLY)])
def test_in_sync_all_shards_go_back_to_the_checkpoint(
    lost: int, processes: Processes, ports: Reserved, train: Path, gate: Gate
) -> None:
    cluster = ByHand(processes, ports, train, gate, "--mode", "sync", "--save-every", "5")
    arrival = gate.arrival()
    step = cluster.saved_step()
    cluster.lose(lost)
    arrival.release()
    told = went_back(cluster.end(), lost)
    assert told and told[0] >= step
    back = told[0]
    # Each worker makes its 60 steps; the one that was on its way when the ps died may be void. Worker 0 stands after it
    # has pushed step 20, for which worker 1 must have pushed its step 19, no more: its step 20 may still be to come.
    counts = [served(each) for each in cluster.ps]
    assert counts[0] == counts[1]
    assert back + (STEPS - STOP) - 2 <= counts[0] <= back + (STEPS - STOP) + 1
    (event,) = cluster.events("restore")
    assert (event["version"], event["lineage"]) == (back, 1)


@pytest.mark.parametrize("lost", [pytest.param(0, marks=NIGHTLY), pytest.param(1, marks=pytest.mark.slow)])
def test_in_async_only_the_lost_shard_goes_back(
    lost: int, processes: Processes, ports: Reserved, train: Path, gate: Gate
) -> None:
    cluster = ByHand(processes, ports, train, gate, "--mode", "async", "--save-every", "5")
    arrival = gate.arrival()
    cluster.saved_step()
    cluster.lose(lost)
    arrival.release()
    told = went_back(cluster.end(), lost)
    assert len(told) == 1
    kept = served(cluster.ps[1 - lost])
    assert 2 * STEPS - 2 <= kept <= 2 * STEPS  # nothing of the other shard is lost
    assert served(cluster.ps[lost]) < kept


@pytest.mark.parametrize("mode", [pytest.param("async", marks=NIGHTLY), pytest.param("sync", marks=pytest.mark.slow)])
def test_the_chief_is_lost_too(mode: str, processes: Processes, ports: Reserved, train: Path, gate: Gate) -> None:
    """Started again it has nothing but fresh values, and must not take a run that is on for a first start."""
    cluster = ByHand(processes, ports, train, gate, "--mode", mode, "--save-every", "5", "--resume", "none")
    gate.arrival()
    cluster.saved_step()
    cluster.lose_with_chief(1)
    said = cluster.end()
    told = went_back(said, 1)
    assert len(told) == 1 and told[0] >= 5
    counts = [served(each) for each in cluster.ps]
    assert counts[0] == counts[1] if mode == "sync" else counts[0] > counts[1]
    restored = [r for r in read(cluster.run / "ledger" / "ps-0.bin") if r.kind == Kind.RESTORE]
    assert len(restored) == (mode == "sync")  # where every push is an update, ps:0 keeps what it has


@NIGHTLY
def test_a_chief_that_begins_anew_does_not_reseed(
    processes: Processes, ports: Reserved, train: Path, gate: Gate
) -> None:
    flags = ("--mode", "async", "--save-every", "none", "--reseed")
    cluster = ByHand(processes, ports, train, gate, *flags, stops=("0:20", "1:20"))
    stands = gate.arrivals(2)
    cluster.lose_with_chief(1)
    stands["worker:1"].release()  # it alone has values, and must not have ended before
    cluster.end()
    (event,) = cluster.events("reseed")
    assert int(str(event["version"])) >= STOP
    assert "reseed" in (cluster.run / "telemetry" / "worker-1.jsonl").read_text()


@NIGHTLY
def test_lost_again_it_goes_back_to_its_own_version(
    processes: Processes, ports: Reserved, train: Path, gate: Gate
) -> None:
    """Where every push is an update, a shard that went back has made fewer than ps:0. verify looks at what is told."""
    cluster = ByHand(processes, ports, train, gate, "--mode", "async", "--save-every", "5", stops=("0:20", "1:40"))
    stands = gate.arrivals(2)
    cluster.saved_step()
    cluster.lose(1)
    stands["worker:0"].release()
    cluster.workers[0].ends_with(0)  # it has saved at its end
    found = load_newest(cluster.run / "checkpoints")
    assert found is not None
    first, second = (shard.version for shard in found.state.shards)
    assert second < first
    cluster.lose(1)
    stands["worker:1"].release()
    said = cluster.end()
    assert went_back(said, 1, lineage=2) == [second]


@NIGHTLY
def test_reseeded_from_a_worker(processes: Processes, ports: Reserved, train: Path, gate: Gate) -> None:
    cluster = ByHand(processes, ports, train, gate, "--mode", "sync", "--save-every", "none", "--reseed")
    arrival = gate.arrival()
    cluster.lose(1)
    arrival.release()
    cluster.end()
    (event,) = cluster.events("reseed")
    # Worker 1 has pushed its step 19 at least, and may not have read the answer: it then stands at version 18.
    assert STOP - 2 <= int(str(event["version"])) <= STOP + 1
    counts = [served(each) for each in cluster.ps]
    assert counts[0] == counts[1] and STEPS - 3 <= counts[0] <= STEPS + 1


@pytest.mark.slow
def test_reseeded_from_the_freshest_worker(processes: Processes, ports: Reserved, train: Path, gate: Gate) -> None:
    """Not from the chief, which stands at an older version."""
    flags = ("--mode", "async", "--lane", "tcp", "--save-every", "none", "--reseed")
    cluster = ByHand(processes, ports, train, gate, *flags, stops=("0:20", "1:20", "1:40"))
    stands = gate.arrivals(2)
    stands["worker:1"].release()  # while the chief stands it makes twenty more: now it is the freshest
    stands["worker:1"] = gate.arrival()
    cluster.lose(1)
    for each in stands.values():
        each.release()
    cluster.end()
    (event,) = cluster.events("reseed")
    assert 40 < int(str(event["version"])) <= 60  # the chief has seen 40 at most
    assert "reseed" in (cluster.run / "telemetry" / "worker-1.jsonl").read_text()


@pytest.mark.slow
def test_without_a_checkpoint_it_ends_with_the_reason(
    processes: Processes, ports: Reserved, train: Path, gate: Gate
) -> None:
    cluster = ByHand(processes, ports, train, gate, "--mode", "sync", "--save-every", "none", "--wait-s", "10")
    arrival = gate.arrival()
    cluster.lose(1)
    arrival.release()
    chief = cluster.workers[0].ends_with(3)
    assert "ps:1 lost its memory, and there is no checkpoint to go back to" in chief.text
    assert "--reseed" in chief.text
    cluster.workers[1].end()
    for each in cluster.ps:
        each.signal(signal.SIGKILL)  # else they wait for workers that nobody starts again


LOST_WITH_CHIEF = "have trained with values that ps:0 lost together with the chief"
LOST = "ps:0 lost its memory, and there is no checkpoint to go back to"


@pytest.mark.parametrize(
    "is_chief_first", [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=NIGHTLY)]
)
def test_all_that_knew_the_values_is_lost_with_the_chief(
    is_chief_first: bool, processes: Processes, ports: Reserved, train: Path, gate: Gate
) -> None:
    """A new chief cannot know that others have trained; the ps, to which they come, tells it, or them."""
    flags = ("--mode", "async", "--save-every", "none", "--wait-s", "20")
    cluster = ByHand(processes, ports, train, gate, *flags, stops=("0:20", "1:20"))
    stands = gate.arrivals(2)
    cluster.lose_with_chief(0, 1)
    if is_chief_first:
        cluster.workers[0].wait_for("waiting for .*/job:worker/replica:0/task:1")
    stands["worker:1"].release()
    for worker in cluster.workers:  # which of the two depends on who comes first, to a hair
        said = worker.ends_with(3).text
        assert LOST_WITH_CHIEF in said or (LOST in said and not is_chief_first)
    for each in cluster.ps:
        each.signal(signal.SIGKILL)  # else they wait for workers that nobody starts again
