"""DO the scripts of `lab run seeds` tell their course? Accuracies with their times, from a cluster and in-graph."""

import sys
from pathlib import Path

import msgspec
import pytest
from processes import Processes

from paceline.lab.scripts.curves import TOLD
from paceline.lab.scripts.feeding import PICK, UPDATE, WAIT
from paceline.lab.scripts.learned import Learned

EPOCHS, BATCHES = 3, 4


def told(processes: Processes, folder: Path, script: str, workers: int, *flags: str) -> Learned:
    recipe = ("--epochs", str(EPOCHS), "--batches", str(BATCHES))
    command = (sys.executable, "-m", "paceline", "run", "--run-dir", folder, "--workers", workers, *flags)
    processes.start(*command, "-m", f"paceline.lab.scripts.{script}", *recipe).ends_with(0)
    return msgspec.json.decode((folder / TOLD).read_bytes(), type=Learned)


@pytest.mark.slow
@pytest.mark.parametrize(("script", "workers"), [("accuracy_script", 2), ("in_graph_script", 3)])
def test_a_cluster_tells_its_accuracies_on_the_way(
    script: str, workers: int, processes: Processes, tmp_path: Path
) -> None:
    learned = told(processes, tmp_path / "run", script, workers, "--mode", "sync", "--save-every", "none")
    assert [point.updates for point in learned.course] == [BATCHES, 2 * BATCHES, 3 * BATCHES] and learned.batch == 100
    times = [point.at_s for point in learned.course]
    assert times == sorted(times) and times[0] > 0
    assert learned.course[-1].accuracy == learned.last.accuracy, "the same parameters"
    assert bool(learned.client_us) == (script == "in_graph_script")
    if learned.client_us:
        assert {PICK, UPDATE, WAIT} <= learned.client_us.keys() and all(us >= 0 for us in learned.client_us.values())
