"""Which random numbers do the workers of one run draw, and what must be the same for all of them all the same?"""

import ast
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from process_fixtures import PROGRAMS
from processes import Processes

from paceline.cluster.spec import Task
from paceline.launchers.seeding import derived

pytestmark = pytest.mark.timeout(900)

SIZE, WORKERS = 24, 3
LIMIT_S = 250.0  # of a run, beside others on a busy machine
Seen = list[dict[str, list[Any]]]  # of each worker: what it has told of each thing, once a start


def run(processes: Processes, name: str, *flags: object, script: tuple[object, ...] = (), **extra: str) -> Seen:
    options = ["--ps=1", f"--workers={WORKERS}", f"--run-dir={name}", "--lane=shm", *flags]
    processes.start("paceline", "run", *options, PROGRAMS / "seeds.py", *script, within_s=LIMIT_S, **extra).ends_with(0)
    return [seen(processes, name, index) for index in range(WORKERS)]


def seen(processes: Processes, name: str, index: int) -> dict[str, list[Any]]:
    told = defaultdict(list)
    for line in (processes.folder / name / "logs" / f"worker-{index}.log").read_text().splitlines():
        if line.startswith("seen "):
            what, _, value = line.removeprefix("seen ").partition(": ")
            told[what].append(ast.literal_eval(value))
    return told


def check_shared(workers: Seen) -> None:
    """The parameters and the order of the data are the same for all, whatever else they draw."""
    assert all(each["begins"] == workers[0]["made"] for each in workers), "all begin with the chief's"
    for what in ("samples", "shuffle", "weighted"):
        taken = [i for each in workers for batch in each[what][0] for i in batch]
        assert sorted(taken) == list(range(SIZE)), what


def check_own(workers: Seen) -> None:
    for what, count in (("draws", 3), ("mask", 1)):
        for number in range(count):
            drawn = [each[what][0][number] if count > 1 else tuple(each[what][0]) for each in workers]
            assert len(set(drawn)) == WORKERS, f"{what} {number}: {drawn}"


@pytest.mark.slow
def test_every_worker_has_random_numbers_of_its_own(processes: Processes) -> None:
    first = run(processes, "first")
    check_own(first)
    check_shared(first)
    again = run(processes, "again", script=("--die", processes.folder / "died"))
    check_own(again)
    assert first[0]["draws"] != again[0]["draws"]
    assert len({tuple(draws) for draws in again[1]["draws"]}) == 2, "one that was started again draws anew"


@pytest.mark.slow
def test_a_seed_gives_every_worker_one_of_its_own(processes: Processes) -> None:
    """Also where tasks are not forked, so that torch and numpy are imported by the script."""
    first = run(processes, "first", "--seed=7")
    check_own(first)
    check_shared(first)
    again = run(processes, "again", "--seed=7", PACELINE_NURSERY="0", script=("--die", processes.folder / "died"))
    for worker, once in zip(again, first, strict=True):
        for what in ("draws", "made", "samples", "mask", *("shuffle", "weighted", "replacement")):
            assert worker[what][0] == once[what][0], what
    assert again[1]["draws"] == first[1]["draws"] * 2, "one that was started again begins as before"
    other = run(processes, "other", "--seed=8")
    assert first[0]["draws"] != other[0]["draws"] and first[0]["samples"] != other[0]["samples"]


@pytest.mark.nightly("a seed that stops the scripts' own one from winning")
def test_the_scripts_own_seed_wins(processes: Processes) -> None:
    """The same for all workers, as in separate processes; the data is shared out all the same."""
    for flags in ((), ("--seed=7",)):
        workers = run(processes, f"with{len(flags)}", *flags, script=("--manual=3",))
        check_shared(workers)
        assert all(each["made"] == workers[0]["made"] for each in workers)
        assert len({each["draws"][0][1] for each in workers}) == WORKERS, "it seeds torch alone"


def test_each_task_of_each_seed_has_another() -> None:
    chief = Task("chief", 0)
    tasks = [chief, *(Task("worker", index) for index in range(50)), Task("evaluator", 0)]
    made = {derived(seed, task, chief) for seed in range(20) for task in tasks}
    assert len(made) == 20 * len(tasks) and max(made) < 1 << 32
    assert derived(5, chief, chief) == 5


RESUMED = """
import sys, torch, paceline
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
ctx = paceline.init()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = DataLoader(TensorDataset(torch.arange(12.0)), batch_size=2, sampler=WeightedRandomSampler([1.0] * 12, 12))
model, optimizer, data = ctx.prepare(model, optimizer, data)
for epoch in ctx.epochs(int(sys.argv[1])):
    for (batch,) in data:
        optimizer.zero_grad()
        model(batch[:, None]).sum().backward()
        optimizer.step()
        print(f"seen {epoch}: {[*batch.tolist(), torch.rand(()).item()]}", flush=True)
"""


@pytest.mark.slow
def test_a_resumed_run_draws_what_it_would_have_drawn(processes: Processes, tmp_path: Path) -> None:
    """Its generators come from the checkpoint, whatever the seed says, and so does the order of a sampler."""
    script = tmp_path / "resumed.py"
    script.write_text(RESUMED)

    def told(name: str, epochs: int, *flags: str) -> Seen:
        options = ["--ps=1", "--workers=2", "--mode=sync", f"--run-dir={name}", *flags]
        processes.start("paceline", "run", *options, script, epochs, within_s=LIMIT_S).ends_with(0)
        return [seen(processes, name, index) for index in range(2)]

    whole = told("whole", 3, "--seed=7")
    told("parts", 1, "--seed=7")
    parts = told("parts", 3, "--resume=auto", "--seed=8")
    assert parts == whole and parts[0] != parts[1]


KERAS = """
import paceline, tensorflow, keras, random
ctx = paceline.init()
shuffled = tensorflow.data.Dataset.range(16).shuffle(16, seed=5)
print("seen order:", [int(each) for each in shuffled], flush=True)
seeds = keras.layers.Dropout(0.5).seed_generator.state.numpy().tolist()
own = [float(keras.random.uniform(())), random.random(), seeds]
print("seen own:", own, flush=True)
"""


@pytest.mark.nightly("TensorFlow workers that shuffle in orders of their own")
def test_a_seed_leaves_the_order_of_tensorflows_data_the_same_for_all(processes: Processes, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    script = tmp_path / "shuffles.py"
    script.write_text(KERAS)
    told = []
    for name in ("first", "again"):
        options = ["--ps=1", "--workers=2", f"--run-dir={name}", "--seed=7"]
        processes.start("paceline", "run", *options, script, within_s=LIMIT_S, KERAS_BACKEND="tensorflow").end()
        told.append([seen(processes, name, index) for index in range(2)])
    first, again = told
    assert first == again
    assert first[0]["order"] == first[1]["order"] and sorted(first[0]["order"][0]) == list(range(16))
    assert all(one != other for one, other in zip(first[0]["own"][0], first[1]["own"][0], strict=True))
