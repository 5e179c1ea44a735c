"""Buffers: saved as the model has them now, and each worker goes on with its own after a resume and a restart."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import Job, Returned, assert_same, run_cluster, weights
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD

from paceline.checkpoint.read import load_newest
from paceline.errors import TrainingFailed

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
    for _ in range(steps):
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
        job.ctx._say = told.append
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


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_restarted_worker_goes_on_with_its_own_buffers(victim: str, tmp_path: Path) -> None:
    """The chief too, whose new model has first values only."""
    program = Path(__file__).with_name("programs") / "own_buffers.py"
    with started_processes(tmp_path) as processes:
        run = ["run", "--run-dir", "run", "--workers", "2", "--mode", "async", "--lease-s", "0.5"]
        processes.paceline(*run, program, tmp_path, victim).ends_with(0)
    assert_same(load_file(tmp_path / "before"), load_file(tmp_path / "after"), "its own statistics")
