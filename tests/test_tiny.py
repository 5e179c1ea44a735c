"""The whole system in one process: ps and workers as threads, MNIST, both modes, and what goes wrong in small.

Everything real but the processes: services, clients, frames, run folder, summary. Runs on every commit.
"""

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.datasets import mnist
from paceline.errors import TrainingFailed

LOCK = threading.Lock()


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def digits() -> TensorDataset:
    data = mnist.load()
    return TensorDataset(torch.from_numpy(data.test_x[:800]), torch.from_numpy(data.test_y[:800]))


def small(seed: int = 0) -> nn.Module:
    with LOCK:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))


def little() -> nn.Module:
    with LOCK:
        torch.manual_seed(0)
        return nn.Linear(4, 3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    (model(torch.ones(2, 4)).square().mean() * factor).backward()
    optimizer.step()


@pytest.mark.parametrize("has_loader", [True, False])
def test_a_step_is_divided_into_data_compute_push_and_pull(has_loader: bool, tmp_path: Path) -> None:
    def train(ctx: paceline.Context) -> None:
        model = little()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = ctx.prepare(model, optimizer)
        for _ in range(20):
            step(model, optimizer)

    def train_from_loader(ctx: paceline.Context) -> None:
        model, loader = little(), DataLoader(TensorDataset(torch.ones(40, 4)), batch_size=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        for _ in loader:
            step(model, optimizer)

    summary = paceline.launch(train_from_loader if has_loader else train, ps=1, workers=1, run_dir=str(tmp_path / "r"))
    (worker,) = summary["workers"]
    split = worker["split_ms"]
    assert worker["steps"] == 20 and split["exchange"] > 0 and split["compute"] > 0
    assert split["data"] > 0 if has_loader else split["data"] is None


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_mnist_with_1_ps_and_2_workers(mode: str, digits: TensorDataset, tmp_path: Path) -> None:
    losses: dict[int, list[float]] = {0: [], 1: []}

    def train(ctx: paceline.Context) -> None:
        model = small(ctx.worker_index)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
        loader = DataLoader(digits, batch_size=50, shuffle=True)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        assert len(loader) == 8
        for _ in ctx.epochs(4):
            for images, labels in loader:
                optimizer.zero_grad()
                loss = cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                losses[ctx.worker_index].append(loss.item())
            ctx.log({"loss": loss.item(), "worker": ctx.worker_index})

    summary = paceline.launch(train, ps=1, workers=2, mode=mode, run_dir=str(tmp_path))
    for each in losses.values():
        assert len(each) == 32
        assert np.mean(each[-8:]) < 0.6 * np.mean(each[:4])
    assert summary["global_step"] == (64 if mode == "async" else 32)
    assert summary["metrics"]["worker"] == 0.0
    assert [row["metrics"]["worker"] for row in summary["workers"]] == [0.0, 1.0]
    check_contract(summary)
    assert (tmp_path / "summary.json").is_file()
    assert (tmp_path / "checkpoints" / f"step-{summary['global_step']:08d}" / "MANIFEST.json").is_file()


def check_contract(summary: dict[str, Any]) -> None:
    """Design 2.4: what summary.json has at least."""
    top = "run_id ok mode cluster global_step wall_s restarts lost workers ps staleness metrics"
    worker = (
        "index steps discarded step_ms first_100_steps_ms waited_at_start_s first_epoch_s epoch_s samples_per_s "
        "ended_at_s metrics"
    )
    assert set(top.split()) <= summary.keys()
    assert summary["ok"] is True
    assert summary["lost"] == []
    assert len(summary["workers"]) == 2
    for row in summary["workers"]:
        assert set(worker.split()) <= row.keys()
        assert row["step_ms"].keys() == {"median", "p95"}
        assert 0 < row["step_ms"]["median"] <= row["step_ms"]["p95"]
        assert row["samples_per_s"] > 0
        assert row["first_epoch_s"] > 0
        assert row["epoch_s"] > 0
    for row in summary["ps"]:
        assert {"index", "updates", "apply_ms", "bytes_in", "bytes_out"} <= row.keys()
        assert row["updates"] == summary["global_step"]
        assert row["apply_ms"] > 0
    assert summary["staleness"].keys() == {"mean", "p50", "p95", "max"}
    if summary["mode"] == "sync":
        assert summary["staleness"]["max"] == 0


@pytest.mark.parametrize("lane", ["shm", "tcp"])
@pytest.mark.parametrize(("mode", "ps"), [("async", 1), ("async", 2), ("sync", 1), ("sync", 2)])
def test_a_nan_gradient_is_discarded_and_named(mode: str, ps: int, lane: str) -> None:
    """Of no shard a part of it is applied, the training goes on, and the summary counts it."""
    finite: dict[int, bool] = {}

    def train(ctx: paceline.Context) -> None:
        model = little()
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for number in range(6):
            step(model, optimizer, float("nan") if number == 3 and ctx.worker_index == 1 else 1.0)
        ctx.barrier()
        finite[ctx.worker_index] = all(bool(v.isfinite().all()) for v in model.state_dict().values())

    with pytest.warns(UserWarning, match=r"step 4 discarded, gradient not finite in weight, bias") as told:
        summary = paceline.launch(train, ps=ps, workers=2, mode=mode, lane=lane)
    assert [Path(w.filename).name for w in told] == [Path(__file__).name]  # the line of the script, not one of ours
    assert finite == {0: True, 1: True}
    assert [row["discarded"] for row in summary["workers"]] == [0, 1]
    assert [row["updates"] for row in summary["ps"]] == [11 if mode == "async" else 6] * ps


@pytest.mark.parametrize("lane", ["inproc", "tcp"])
@pytest.mark.parametrize("ps", [1, 2])
def test_a_round_in_which_nobody_has_a_finite_gradient_is_no_update(ps: int, lane: str) -> None:
    def train(ctx: paceline.Context) -> None:
        model = little()
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for number in range(5):
            step(model, optimizer, float("nan") if number in (1, 3) else 1.0)

    with pytest.warns(UserWarning, match=r"step [24] discarded"):
        summary = paceline.launch(train, ps=ps, workers=2, mode="sync", lane=lane)
    assert summary["global_step"] == 3
    assert [row["discarded"] for row in summary["workers"]] == [2, 2]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_options_that_came_with_a_discarded_gradient_count_on_every_ps(mode: str) -> None:
    """The rate falls to zero at the very step that is discarded: no shard may go on with the old one."""
    values: list[dict[str, torch.Tensor]] = []

    def train(ctx: paceline.Context) -> None:
        model = little()
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for number in range(6):
            if number == 3:
                optimizer.param_groups[0]["lr"] = 0.0
                values.append({name: value.clone() for name, value in model.state_dict().items()})
            step(model, optimizer, float("nan") if number == 3 else 1.0)
        values.append({name: value.clone() for name, value in model.state_dict().items()})

    with pytest.warns(UserWarning, match="discarded"):
        paceline.launch(train, ps=2, workers=1, mode=mode)
    before, after = values
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


def test_nan_after_nan_ends_with_an_error_that_names_the_tensor() -> None:
    def train(ctx: paceline.Context) -> None:
        model = little()
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        while True:
            step(model, optimizer, float("inf"))

    with pytest.warns(UserWarning, match="discarded"), pytest.raises(TrainingFailed, match=r"in a row.*weight, bias"):
        paceline.launch(train, ps=1, workers=1)


@pytest.mark.parametrize(("mode", "ps"), [("async", 1), ("sync", 1), ("sync", 2)])
def test_uneven_ends(mode: str, ps: int) -> None:
    """One worker does fewer steps; the other goes on with rounds of its own."""

    def train(ctx: paceline.Context) -> None:
        model = little()
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3 if ctx.worker_index == 0 else 9):
            step(model, optimizer)

    summary = paceline.launch(train, ps=ps, workers=2, mode=mode)
    assert [row["steps"] for row in summary["workers"]] == [3, 9]
    assert summary["global_step"] == (12 if mode == "async" else 9)


@pytest.mark.parametrize("ps", [1, 2])
def test_barriers_and_uneven_ends_do_not_deadlock(ps: int) -> None:
    """Worker 0 waits in barrier() while 1 and 2 still have steps to do; 2 ends before it ever comes to one."""
    order: list[str] = []

    def train(ctx: paceline.Context) -> None:
        model = little()
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range((2, 7, 4)[ctx.worker_index]):
            step(model, optimizer)
        if ctx.worker_index == 2:
            return
        order.append(f"{ctx.worker_index} waits")
        ctx.barrier()
        order.append(f"{ctx.worker_index} goes on")
        step(model, optimizer)

    summary = paceline.launch(train, ps=ps, workers=3, mode="sync")
    assert sorted(order[:2]) == ["0 waits", "1 waits"]
    assert [row["steps"] for row in summary["workers"]] == [3, 8, 4]
    assert summary["global_step"] == 8


@pytest.mark.parametrize("lane", ["inproc", "tcp"])
@pytest.mark.parametrize(("mode", "ps"), [("async", 1), ("async", 2), ("sync", 1), ("sync", 2)])
@pytest.mark.parametrize("total", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_steps_are_those_of_the_cluster(mode: str, ps: int, total: int, lane: str) -> None:
    def train(ctx: paceline.Context) -> None:
        model = little()
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in ctx.steps(total):
            step(model, optimizer)

    summary = paceline.launch(train, ps=ps, workers=2, mode=mode, lane=lane)
    assert summary["global_step"] == total
    assert [row["updates"] for row in summary["ps"]] == [total] * ps
    done = [row["steps"] for row in summary["workers"]]
    assert done == [total, total] if mode == "sync" else sum(done) == total


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_steps_stay_exact_with_discarded_gradients_and_pauses(mode: str) -> None:
    """A discarded gradient is no update; whoever pauses comes back when the others may have used up the steps."""
    total = 9

    def train(ctx: paceline.Context) -> None:
        model = little()
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for number in ctx.steps(total):
            if ctx.worker_index == 1 and number == 2:
                with ctx.pause():
                    alone.wait(timeout=120)
            step(model, optimizer, float("nan") if number == 1 else 1.0)
            if ctx.global_step >= total - 1:
                alone.set()
        alone.set()

    alone = threading.Event()
    with pytest.warns(UserWarning, match="discarded"):
        summary = paceline.launch(train, ps=2, workers=2, mode=mode)
    assert summary["global_step"] == total


@pytest.mark.parametrize("ps", [1, 2])
def test_nobody_waits_for_a_worker_in_pause(ps: int) -> None:
    done = threading.Event()
    values: dict[int, Any] = {}

    def train(ctx: paceline.Context) -> None:
        model = little()
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        step(model, optimizer)
        if ctx.worker_index == 1:
            with ctx.pause():
                assert done.wait(timeout=120)
            assert ctx.global_step == 6  # what happened meanwhile is here
        else:
            for _ in range(5):
                step(model, optimizer)
            assert ctx.global_step == 6  # takes the last answer, so the update is there
            done.set()
        ctx.barrier()
        step(model, optimizer)
        values[ctx.worker_index] = model.state_dict()["weight"].clone()

    summary = paceline.launch(train, ps=ps, workers=2, mode="sync")
    assert summary["global_step"] == 7
    assert torch.equal(values[0], values[1])


@pytest.mark.parametrize("lane", ["inproc", "tcp"])
def test_kv_reads_what_the_ps_hold_while_it_trains(lane: str) -> None:
    def train(ctx: paceline.Context) -> None:
        with LOCK:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))
        model[0].bias.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        model, optimizer = ctx.prepare(model, torch.optim.SGD(trained, lr=0.1))
        ctx.barrier()
        for _ in range(3):
            step(model, optimizer)
        ctx.barrier()
        kv = ctx.kv
        try:
            assert set(kv) == set(model.state_dict())
            for name in ("0.weight", "1.weight", "2.bias"):
                entry, value = kv.get(name)
                assert entry.is_trained
                assert entry.version == ctx.global_step == 6
                assert np.array_equal(value, model.state_dict()[name].numpy())
            assert not kv.get("0.bias")[0].is_trained
            assert np.array_equal(kv["0.bias"], model[0].bias.numpy())
            with pytest.raises(paceline.PacelineError, match=r"no variable '0\.wait'.*0\.weight"):
                kv["0.wait"]
        finally:
            kv.close()
        ctx.barrier()

    paceline.launch(train, ps=2, workers=2, mode="async", lane=lane)


def test_a_cluster_of_threads_leaves_the_warning_filters_alone() -> None:
    """They belong to the process: whoever changes them for a moment in one thread may leave them changed."""

    def train(ctx: paceline.Context) -> None:
        model = little()
        with LOCK:
            before = list(warnings.filters)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        step(model, optimizer)
        assert list(warnings.filters) == before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "catch_warnings", None)
        paceline.launch(train, ps=2, workers=2)


def test_a_failing_worker_is_told_and_the_other_goes_on_or_ends() -> None:
    """Nothing hangs: the traceback of the one that failed is in the error."""

    def train(ctx: paceline.Context) -> None:
        model = little()
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for number in range(5):
            if ctx.worker_index == 1 and number == 2:
                raise ZeroDivisionError("in the script")
            step(model, optimizer)

    with pytest.raises(TrainingFailed, match=r"worker:1 failed.*in the script"):
        paceline.launch(train, ps=2, workers=2, mode="sync")
