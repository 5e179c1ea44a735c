"""Buffers: saved as the model has them now, and each worker goes on with its own after a resume and a restart."""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from alike import Job, Returned, assert_same, run_cluster, weights
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.checkpoint.read import load_newest
from paceline.checkpoint.tensors import Entry, values
from paceline.errors import TrainingFailed
from paceline.worker.checkpoints.statistics import mean

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from process_fixtures import started_processes

LANES = [("shm", 1), ("shm", 2), ("tcp", 1), ("tcp", 2)]


class Centered(nn.Module):
    """DINO's center, which is assigned anew; a count; and vectors that grow."""

    def __init__(self, grows: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("kept", torch.zeros(1))
        self.grows = grows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.training:
            self.center = self.center * 0.9 + y.mean(0).detach() * 0.1
            self.seen = self.seen + len(x)
            if self.grows:
                self.kept = torch.cat([self.kept, y.detach().mean().reshape(1)])
        return y - self.center


def normed() -> nn.Module:
    """A frozen layer before a norm layer, as in transfer learning."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    model[0].weight.requires_grad_(False)
    return model


def optimizer_of(model: nn.Module) -> SGD:
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def train(job: Job, model: nn.Module, optimizer: SGD, steps: int = 3) -> None:
    first = 100  # counted from 0 or 1 on, a resume would be refused
    for _ in range(first, first + steps):
        optimizer.zero_grad()
        model(job.randn(5, 4) + job.index).square().mean().backward()
        optimizer.step()


def saved(run_dir: Path, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
    newest = load_newest(run_dir / "checkpoints")
    assert newest is not None
    return load_file(newest.path / file)


@pytest.mark.parametrize(("lane", "ps"), LANES)
def test_a_buffer_that_is_assigned_anew_is_saved_as_it_is_now(lane: str, ps: int, tmp_path: Path) -> None:
    """In the middle and at the end; and a resumed model begins with it."""
    seen: dict[str, Any] = {}

    def recipe(job: Job) -> Returned:
        model = job.make(Centered)
        model, optimizer = job.prepare(model, optimizer_of(model))
        start = weights(model)
        train(job, model, optimizer)
        model.frozen = nn.Parameter(torch.full((2,), 7.0), requires_grad=False)
        folder = job.ctx.save()
        seen["middle"] = weights(model), load_file(folder / "model.safetensors")
        train(job, model, optimizer)
        return {"start": start, "end": weights(model)}

    options: dict[str, Any] = {"ps": ps, "lane": lane, "run_dir": str(tmp_path)}
    ((first,), _) = run_cluster(recipe, 1, **options)
    assert_same(*seen["middle"], "in the middle")
    assert_same(first["end"], saved(tmp_path), "at the end")
    assert first["end"]["seen"] == 30
    ((again,), _) = run_cluster(recipe, 1, resume="auto", **options)
    assert_same(first["end"], again["start"], "resumed")


def test_a_buffer_that_changed_its_shape_is_refused_and_the_rest_is_saved(tmp_path: Path) -> None:
    def recipe(job: Job) -> Returned:
        model = job.make(lambda: Centered(grows=True))
        model, optimizer = job.prepare(model, optimizer_of(model))
        train(job, model, optimizer, 4)
        return {}

    with pytest.raises(TrainingFailed, match=r"kept had the shape \[1\] at prepare\(\) and has \[5\] now"):
        run_cluster(recipe, 1, run_dir=str(tmp_path))
    assert saved(tmp_path)["seen"] == 20
    assert saved(tmp_path)["kept"].tolist() == [0.0]


def test_buffers_of_another_dtype_and_new_ones(tmp_path: Path) -> None:
    """A model that is cast after its last step is saved as it was before; what a layout has no place for is said."""

    told: list[str] = []

    def recipe(job: Job) -> Returned:
        model = nn.Sequential(job.make(Centered), nn.BatchNorm1d(3))
        job.ctx._session.say = told.append
        model, optimizer = job.prepare(model, optimizer_of(model))
        train(job, model, optimizer)
        model.register_buffer("late", torch.zeros(1))
        model[0].center = model[0].center.double()
        before = weights(model)
        model[1].half()
        return before

    ((before,), _) = run_cluster(recipe, 1, run_dir=str(tmp_path))
    before["0.center"] = before["0.center"].float()
    assert before.pop("late") is not None
    assert_same(before, saved(tmp_path), "saved")
    assert sum("the buffer late was made after prepare(): checkpoints do not hold it" in line for line in told) == 1
    assert sum("the buffer 0.center is torch.float64 since prepare()" in line for line in told) == 1
    assert not any("1.running_mean" in line for line in told)


@pytest.mark.parametrize(("lane", "ps"), LANES)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_each_worker_goes_on_with_its_own_buffers(mode: str, lane: str, ps: int, tmp_path: Path) -> None:
    def recipe(job: Job) -> Returned:
        model = job.make(normed, seed=job.index)
        model, optimizer = job.prepare(model, optimizer_of(model))
        start = weights(model)
        job.ctx.barrier()  # a chief that is quick saves other buffers before the others have taken its first ones
        train(job, model, optimizer, 3 + job.index)
        return {"start": start, "end": weights(model)}

    options: dict[str, Any] = {"ps": ps, "lane": lane, "mode": mode, "run_dir": str(tmp_path)}
    first, _ = run_cluster(recipe, 2, **options)
    own = saved(tmp_path, "workers.safetensors")
    again, _ = run_cluster(recipe, 3, resume="auto", **options)
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert not torch.equal(first[0]["end"][name], first[1]["end"][name])
        for index in range(2):
            assert_same(first[index]["end"][name], again[index]["start"][name], f"worker {index}: {name}")
        assert_same(first[0]["end"][name], again[2]["start"][name], f"a new worker begins with the chief's {name}")
        assert_same(first[1]["end"][name], own[f"1.buffers.{name}"], f"workers.safetensors: {name}")
    assert not any("weight" in name for name in own), "frozen parameters are the chief's"


class Moving(nn.BatchNorm1d):
    """A norm layer with a buffer that is no running statistic, though it is a float."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("last", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.detach().mean(0)
        return super().forward(x)


def batches(job: Job) -> DataLoader[Any]:
    """12 samples for the chief, 6 for another worker, 4 to a batch."""
    inputs = torch.randn(12 if job.index == 0 else 6, 4, generator=job.rng) + job.index
    return DataLoader(TensorDataset(inputs), batch_size=4)


@pytest.mark.parametrize(("lane", "ps"), LANES)
@pytest.mark.parametrize("buffers", ["mean", "chief"])
@pytest.mark.parametrize("mode", ["sync", "async", "local"])
def test_what_a_model_is_saved_with(mode: str, buffers: str, lane: str, ps: int, tmp_path: Path) -> None:
    """The mean of the running statistics by samples, or the chief's; all else is the chief's. Then training goes on as
    if nothing had been averaged."""
    options: dict[str, Any] = {"ps": ps, "lane": lane, "mode": mode, "data": "full", "buffers": buffers}
    options["local_steps"] = 1 if mode == "local" else None

    def recipe(job: Job) -> Returned:
        model = job.make(lambda: nn.Sequential(nn.Linear(4, 6), Moving(6), nn.Linear(6, 3)))
        model, optimizer, loader = job.prepare(model, optimizer_of(model), batches(job))
        start = weights(model)
        job.ctx.barrier()  # after it the others push
        for _ in job.ctx.epochs(2 if options.get("resume") else 1):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        job.ctx.barrier()
        return {"start": start, "end": weights(model)}

    (chief, other), _ = run_cluster(recipe, 2, run_dir=str(tmp_path), **options)
    model = saved(tmp_path)
    for name in ("1.running_mean", "1.running_var"):
        mine, its = chief["end"][name].double(), other["end"][name].double()
        assert (mine - its).abs().max() > 0.1
        wanted = ((12 * mine + 6 * its) / 18).float() if buffers == "mean" else chief["end"][name]
        assert_same(wanted, model.pop(name), name)
    assert model["1.num_batches_tracked"] == 3 and other["end"]["1.num_batches_tracked"] == 2
    assert not torch.equal(chief["end"]["1.last"], other["end"]["1.last"])
    for name, value in model.items():
        assert_same(chief["end"][name], value, name)
    options["resume"] = "auto"
    again, _ = run_cluster(recipe, 2, run_dir=str(tmp_path), **options)
    for index, each in enumerate((chief, other)):
        assert_same(each["end"], again[index]["start"], f"worker {index} resumes")


def test_without_known_samples_steps_count_and_who_closed_first_is_in_it(tmp_path: Path) -> None:
    def recipe(job: Job) -> Returned:
        model = job.make(normed)
        model, optimizer = job.prepare(model, optimizer_of(model))
        job.ctx.barrier()
        if job.index:
            train(job, model, optimizer, 2)
        else:
            deadline = time.monotonic() + 60
            while job.ctx._session.training_step.client.status().live != [0]:
                assert time.monotonic() < deadline
            train(job, model, optimizer, 6)
        return {"end": weights(model)}

    (chief, other), _ = run_cluster(recipe, 2, run_dir=str(tmp_path))
    name = "1.running_mean"
    wanted = (6 * chief["end"][name].double() + 2 * other["end"][name].double()) / 8
    assert_same(wanted.float(), saved(tmp_path)[name], name)


def test_one_worker_is_saved_bit_for_bit(tmp_path: Path) -> None:
    """Also one that resumes what two have made; and of several one that alone has made steps."""

    def recipe(job: Job) -> Returned:
        model = job.make(normed)
        model, optimizer = job.prepare(model, optimizer_of(model))
        start = weights(model)
        if job.index == job.num_workers - 1:
            train(job, model, optimizer)
        return {"start": start, "end": weights(model)}

    ((alone,), _) = run_cluster(recipe, 1, run_dir=str(tmp_path / "1"))
    assert_same(alone["end"], saved(tmp_path / "1"), "one worker")
    assert not list((tmp_path / "1").glob("checkpoints/*/workers.safetensors")), "it has nothing of its own"
    first, _ = run_cluster(recipe, 2, run_dir=str(tmp_path / "2"))
    assert_same(first[1]["end"]["1.running_var"], saved(tmp_path / "2")["1.running_var"], "one of two has trained")
    ((last,), _) = run_cluster(recipe, 1, run_dir=str(tmp_path / "2"), resume="auto")
    assert_same(first[0]["end"]["1.running_var"], last["start"]["1.running_var"], "the chief's own")
    assert_same(last["end"], saved(tmp_path / "2"), "one worker after two")


def test_a_chief_that_is_lost_is_left_out(tmp_path: Path) -> None:
    """Nothing was saved since it has trained, so what is known of its statistics is their first values."""
    seen: dict[str, Any] = {}

    def recipe(job: Job) -> Returned:
        model = job.make(normed)
        model, optimizer = job.prepare(model, optimizer_of(model))
        job.ctx.barrier()
        if job.index == 0:
            train(job, model, optimizer, 3)
            raise ValueError("it ends here")
        deadline = time.monotonic() + 60
        while job.ctx._session.training_step.client.status().live != [1]:
            assert time.monotonic() < deadline
        train(job, model, optimizer, 2)
        seen.update(weights(model))
        return {}

    with pytest.raises(TrainingFailed, match="it ends here"):
        run_cluster(recipe, 2, run_dir=str(tmp_path))
    model = saved(tmp_path)
    for name in ("1.running_mean", "1.running_var"):
        assert_same(seen[name], model[name], name)


class Features(nn.Module):
    """Random features that are made anew at each start; `width` differs in the second test."""

    def __init__(self, seed: int, width: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.linear = nn.Linear(4, 3)
        self.register_buffer("features", torch.randn(width, 4, generator=generator).t(), persistent=False)
        self.register_buffer("mask", torch.rand(5, generator=generator) < 0.5, persistent=False)
        self.register_buffer("scale", torch.rand((), generator=generator, dtype=torch.float64), persistent=False)


@pytest.mark.parametrize(("lane", "ps"), LANES)
def test_buffers_that_are_not_saved_are_the_chiefs_at_first(lane: str, ps: int, tmp_path: Path) -> None:
    found: dict[int, dict[str, torch.Tensor]] = {}
    told: list[str] = []

    def work(ctx: paceline.Context) -> None:
        ctx._session.say = told.append
        model = Features(ctx.worker_index)
        ctx.prepare(model, SGD(model.parameters(), lr=0.1))
        found[ctx.worker_index] = {name: buffer.clone() for name, buffer in model.named_buffers()}

    paceline.launch(work, ps=ps, workers=3, mode="sync", lane=lane, run_dir=tmp_path)
    for worker in range(3):
        assert_same(found[worker], dict(Features(0).named_buffers()), f"worker {worker}")
    assert sum("features, mask, scale" in line for line in told) == 2


def test_buffers_that_are_not_saved_and_not_alike_stay_as_they_are(tmp_path: Path) -> None:
    found: dict[int, torch.Tensor] = {}
    told: list[str] = []

    def work(ctx: paceline.Context) -> None:
        ctx._session.say = told.append
        model = Features(ctx.worker_index, width=3 + ctx.worker_index)
        ctx.prepare(model, SGD(model.parameters(), lr=0.1))
        found[ctx.worker_index] = model.features.clone()

    paceline.launch(work, ps=1, workers=2, mode="sync", run_dir=tmp_path)
    assert torch.equal(found[1], Features(1, width=4).features)
    assert sum("each keeps its own" in line for line in told) == 1


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--ps", "1", "--lane", "shm"], marks=pytest.mark.nightly("buffers lost on shm")),
        ["--ps", "2", "--lane", "tcp"],
    ],
)
def test_an_interrupted_chief_saves_its_buffers_as_they_are(flags: list[str], tmp_path: Path) -> None:
    """Nothing was saved before, so ps:0 has their first values."""
    program = tmp_path / "interrupted.py"
    program.write_text(INTERRUPTED)
    with started_processes(tmp_path) as processes:
        run = ["run", "--run-dir", "run", "--workers", "1", "--max-restarts", "0", *flags]
        processes.paceline(*run, program).ends_with(1)
    assert saved(tmp_path / "run")["1.num_batches_tracked"] == 5


INTERRUPTED = """
import torch, paceline
from torch import nn
ctx = paceline.init()
model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = ctx.prepare(model, optimizer)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
raise KeyboardInterrupt
"""


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_the_mean_in_every_dtype(dtype: str) -> None:
    """As torch rounds it; equal values stay, whatever the weights."""
    kind = getattr(torch, dtype)
    parts = [
        torch.randn(200, generator=torch.Generator().manual_seed(i), dtype=torch.float64).to(kind) for i in range(3)
    ]
    parts[1][:50] = parts[2][:50] = parts[0][:50]
    parts[1][50] = torch.nan
    entries = [Entry(dtype, (200,), part.view(torch.uint8).numpy().tobytes()) for part in parts]
    weights = [3.0, 0.1, 7.0]
    wanted = sum(w * p.double() for w, p in zip(weights, parts, strict=True)) / 10.1
    wanted[:50] = parts[0][:50].double()
    got = values(mean(entries, weights)).astype(np.float64)
    rounded = wanted.float().to(kind).double() if dtype == "bfloat16" else wanted.to(kind).double()
    assert np.array_equal(got, rounded.numpy(), equal_nan=True) and np.isnan(got).sum() == 1


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_restarted_worker_goes_on_with_its_own_buffers(victim: str, tmp_path: Path) -> None:
    """The chief too, whose new model has first values only."""
    program = Path(__file__).with_name("programs") / "own_buffers.py"
    with started_processes(tmp_path) as processes:
        run = ["run", "--run-dir", "run", "--workers", "2", "--mode", "async", "--lease-s", "3"]
        processes.paceline(*run, program, tmp_path, victim).ends_with(0)
    assert_same(load_file(tmp_path / "before"), load_file(tmp_path / "after"), "its own statistics")
