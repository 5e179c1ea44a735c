"""In-graph replication, towers and placed modules as real processes: the examples, by hand and by `paceline run`."""

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from processes import Process, Processes

import paceline
from paceline.cluster.discovery import Assignment, encode_for_child
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.datasets.cifar10 import Cifar10
from paceline.errors import UsageError
from paceline.ingraph import server as servers
from paceline.launchers.ports import Reserved
from paceline.models.cnn import Cnn

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--epochs=2", "--batches=5", "--lr=0.01")


def in_graph(processes: Processes, *args: object, name: str = "client") -> Process:
    return processes.start(sys.executable, EXAMPLES / "in_graph.py", *args, name=name)


def joined(processes: Processes, ports: Reserved, count: int = 2) -> tuple[str, list[Process]]:
    """Workers that join, started by hand as the documents do."""
    hosts = ",".join(ports.addresses(count))
    ports.before_start()
    workers = [
        in_graph(processes, "--job_name=worker", f"--task_index={n}", f"--worker_hosts={hosts}", name=f"worker:{n}")
        for n in range(count)
    ]
    return f"--worker_hosts={hosts}", workers


def reference(updates: str) -> list[str]:
    """The same training in this process; sync is the same to the last bit."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        from in_graph import batches, loss
    finally:
        sys.path.remove(str(EXAMPLES))
    from paceline.datasets import mnist
    from paceline.ingraph.towers import towers
    from paceline.models.mlp import document_000

    torch.set_num_threads(1)
    digits = mnist.load().tensorflow_split()
    model = document_000(1)
    costs = []
    with towers(model, torch.optim.SGD(model.parameters(), lr=0.01), ["/cpu:0"] * 2, mode=updates) as two:
        for epoch in range(2):
            told = list(two.train(loss, batches(digits, 2, 5, seed=epoch)))
            costs.append(f"Epoch {epoch + 1}: cost {told[-1].loss.item():.4f}, {two.step_count} updates")
    return costs


NIGHTLY = pytest.mark.nightly("processes of towers that update one by one; threads of them are in make test")


@pytest.mark.slow
def test_by_hand_workers_only_join_and_the_client_trains(processes: Processes, ports: Reserved) -> None:
    hosts, workers = joined(processes, ports)
    client = in_graph(processes, "--job_name=client", hosts, *SMALL).ends_with(0)
    assert "2 towers, sync: /job:worker/task:0, /job:worker/task:1" in client.text
    assert [line.rpartition(", ")[0] for line in client.lines if line.startswith("Epoch")] == reference("sync")
    assert re.search(r"^Test-Accuracy: 0\.\d\d$", client.text, re.MULTILINE)
    for worker in workers:
        assert "Started server with target: paceline://" in worker.text
        worker.signal(signal.SIGTERM)
        worker.ends_with(0)


@pytest.mark.slow
@pytest.mark.parametrize("updates", ["sync", pytest.param("async", marks=NIGHTLY)])
def test_launched_worker_0_is_the_client(updates: str, processes: Processes) -> None:
    folder = processes.folder / "run"
    script = (EXAMPLES / "in_graph.py", f"--updates={updates}", *SMALL)
    run = processes.paceline("run", "--workers", 3, "--run-dir", folder, *script).ends_with(0)
    assert "  worker:0  was the client\n  worker:1  ran ops for others\n" in run.text
    log = (folder / "logs" / "worker-0.log").read_text()
    assert f"2 towers, {updates}: /job:worker/task:1, /job:worker/task:2" in log
    assert f"{10 if updates == 'sync' else 20} updates" in log
    assert "Test-Accuracy: 0." in log


@pytest.mark.slow
def test_a_worker_that_is_killed_is_named_and_nobody_hangs(processes: Processes, ports: Reserved) -> None:
    hosts, workers = joined(processes, ports)
    client = in_graph(processes, "--job_name=client", hosts, "--wait-s=3", "--epochs=100000", *SMALL[1:])
    client.wait_for("Epoch 2:")
    psutil.Process(workers[1].pid).kill()
    assert client.end() == 3, client.text
    assert "/job:worker/replica:0/task:1" in client.text
    workers[0].signal(signal.SIGTERM)
    workers[0].ends_with(0)


@pytest.mark.slow
def test_a_worker_that_never_comes_is_waited_for_and_named(processes: Processes, ports: Reserved) -> None:
    hosts = f"--worker_hosts={ports.addresses(1)[0]}"
    client = in_graph(processes, "--job_name=client", hosts, "--wait-s=1", *SMALL)
    assert client.end() == 3, client.text
    assert re.search(r"worker: /job:worker/replica:0/task:0", client.text), client.text


@pytest.mark.slow
def test_ctrl_c_while_a_worker_is_waited_for_is_one_word(processes: Processes, ports: Reserved) -> None:
    client = in_graph(processes, "--job_name=client", f"--worker_hosts={ports.addresses(1)[0]}")
    client.wait_for("^Still waiting for response from worker")
    client.signal(signal.SIGINT)
    client.ends_with(130)
    assert client.lines[-1] == "Interrupted." and "Traceback" not in client.text


@pytest.mark.slow
def test_two_parts_on_two_tasks_print_what_one_process_prints(processes: Processes) -> None:
    small = ("--steps=20", "--hidden=20")
    alone = processes.start(sys.executable, EXAMPLES / "model_parallel.py", *small, name="alone")
    folder = processes.folder / "run"
    apart = processes.paceline("run", "--workers", 3, "--run-dir", folder, EXAMPLES / "model_parallel.py", *small)
    alone.ends_with(0)
    apart.ends_with(0)
    (want,) = (line for line in alone.lines if line.startswith("step 20"))
    log = (folder / "logs" / "worker-0.log").read_text()
    assert want in log.splitlines()
    assert "parts on /job:worker/task:1 and /job:worker/task:2" in log


@pytest.mark.slow
@pytest.mark.parametrize("updates", ["sync", pytest.param("async", marks=NIGHTLY)])
def test_towers_on_the_cpu(updates: str, processes: Processes) -> None:
    small = ("--steps=20", "--batch-size=4", "--channels=4", f"--updates={updates}", "--devices=/cpu:0,/cpu:0")
    run = processes.start(sys.executable, EXAMPLES / "cifar10_towers.py", *small).ends_with(0)
    assert f"2 towers, {updates}: /device:CPU:0, /device:CPU:0; variables on cpu" in run.text
    assert re.search(r"step 20, loss = \d\.\d\d \(\d+ examples/sec\)", run.text)
    assert len(re.findall(r"Test accuracy.*: 0\.\d{4}", run.text)) == 2


def test_resumed_towers_make_the_steps_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as in one go: the batches are those that were to come."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import cifar10_towers as example

    images = np.random.default_rng(0).integers(0, 256, (50, 3, 32, 32), dtype=np.uint8)
    data = Cifar10(images, np.arange(50) % 10, images, np.arange(50) % 10, "a test")
    ends: list[tuple[int, torch.Tensor]] = []

    def train(total: int) -> Callable[[paceline.Context], None]:
        def worker(ctx: paceline.Context) -> None:
            model = Cnn(2, seed=1)
            model, optimizer = ctx.prepare(model, torch.optim.SGD(model.groups(), lr=0.1))
            numbers = example.steps(ctx, total, "sync")
            with paceline.towers(model, optimizer, ["/cpu:0"] * 2, variables="/cpu:0") as two:
                told = list(two.train(example.loss, example.batches(data, 2, numbers, 2, ctx.worker_index)))
            ends.append((len(told), torch.cat([p.detach().flatten() for p in model.parameters()])))

        return worker

    paceline.launch(train(5), workers=1, run_dir=str(tmp_path / "whole"))
    paceline.launch(train(3), workers=1, run_dir=str(tmp_path / "half"))
    paceline.launch(train(5), workers=1, run_dir=str(tmp_path / "rest"), resume=str(tmp_path / "half"))
    (whole, want), (half, _), (rest, have) = ends
    assert (whole, half, rest) == (5, 3, 2)
    assert torch.equal(want, have)


def test_a_client_without_workers_says_how_many_it_needs(ports: Reserved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import in_graph

    cluster = ClusterSpec({"ps": ports.addresses(1), "worker": ports.addresses(1)})
    ports.before_start()
    alone = Assignment(cluster, Task("worker", 0), 1, Settings(run_id="r"), bytes(32), "launcher")
    for name, value in encode_for_child(alone).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["in_graph.py"])
    monkeypatch.setattr("sys.excepthook", lambda *args: None)  # a server in a script changes it; here nobody should
    with pytest.raises(UsageError, match="at least 2 workers"):
        in_graph.find_workers(in_graph.arguments())
    while servers._servers:
        servers._servers[-1].stop()
