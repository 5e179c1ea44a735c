"""Design 2.2: the ps owns the parameters. What is loaded, saved, copied and carried around a training.

Loading after `prepare` is sent to the ps by the chief; copies and checkpoints hold what the ps hold.
"""

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import Job, Returned, assert_same, check, run_cluster, weights
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, Adagrad, Adam

import paceline
from paceline.errors import TrainingFailed, UsageError

pytestmark = pytest.mark.filterwarnings("error")


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 19), nn.Tanh(), nn.Linear(19, 3))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))


def train(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(job.randn(5, 7)).square().mean().backward()
        optimizer.step()


def earlier_run(make: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a plain training saved: model and optimizer."""
    job = Job(7, 1)
    model = job.make(small, seed=5)
    optimizer = make(model)
    train(job, model, optimizer)
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


MAKERS = {
    "momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "amsgrad": lambda model: Adam(model.parameters(), lr=0.1, amsgrad=True),
    "Adagrad": lambda model: Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5),
    "fused": lambda model: Adam(model.parameters(), lr=0.1, fused=True),
}


@pytest.mark.parametrize("when", ["before prepare", "after prepare", "in assign"])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_resumed_training_goes_on_as_in_one_process(maker: str, when: str, tmp_path: Path) -> None:
    make = MAKERS[maker]
    saved_model, saved_optimizer = earlier_run(make)

    def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.load_state_dict(copy.deepcopy(saved_model))
        optimizer.load_state_dict(copy.deepcopy(saved_optimizer))

    def recipe(job: Job) -> Returned:
        model = job.make(small, seed=job.index)
        optimizer = make(model)
        if when == "before prepare":
            load(model, optimizer)
        model, optimizer = job.prepare(model, optimizer)
        if when == "after prepare":
            load(model, optimizer)
        elif when == "in assign" and job.ctx is not None:
            with job.ctx.assign():
                load(model, optimizer)
        elif when == "in assign":
            load(model, optimizer)
        train(job, model, optimizer)
        return {"model": weights(model), "optimizer": optimizer.state_dict()}

    check(recipe, tmp_path, workers=2, mode="sync", ps=2, lane="shm" if maker == "fused" else "tcp")


@pytest.mark.parametrize("lane", ["inproc", "tcp"])
def test_loading_in_the_middle_of_a_training(lane: str, tmp_path: Path) -> None:
    """Back to an early state, optimizer and all, inside assign()."""

    def recipe(job: Job) -> Returned:
        model = job.make(small)
        model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
        fresh = copy.deepcopy(optimizer.state_dict())
        assert fresh["state"] == {}
        train(job, model, optimizer, 2)
        early = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(job, model, optimizer, 3)

        def back(values: tuple[Any, Any]) -> None:
            model.load_state_dict(values[0])
            optimizer.load_state_dict(values[1])

        for target in (early, (early[0], fresh)):
            if job.ctx is None:
                back(target)
            else:
                with job.ctx.assign():
                    back(target)
            train(job, model, optimizer, 3)
        return {"model": weights(model), "optimizer": optimizer.state_dict()}

    check(recipe, tmp_path, workers=2, mode="sync", ps=2, lane=lane)


def test_a_write_of_a_single_worker_is_there_after_a_pull() -> None:
    def recipe(job: Job) -> Returned:
        model = job.make(small)
        model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
        for value in (9.0, 8.0):
            with torch.no_grad():
                model[0].weight.fill_(value)
            written = weights(model)
            job.ctx.pull()
            assert_same(written, weights(model), "after pull")
            train(job, model, optimizer, 1)
        return {}

    run_cluster(recipe, 1, ps=2)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_write_beside_other_workers_is_refused(steps: int) -> None:
    """Before the first step and after; the error names the parameter and the line that noticed it."""

    def recipe(job: Job) -> Returned:
        model = job.make(small)
        model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
        train(job, model, optimizer, steps)
        before = model[0].weight.detach().clone()
        model[0].weight.data.clamp_(-0.01, 0.01)
        with pytest.raises(UsageError) as caught:
            train(job, model, optimizer, 1)
        assert "0.weight was written" in str(caught.value) and "test_state.py, line" in str(caught.value)
        model[0].weight.data.copy_(before)
        with job.ctx.assign():
            model[0].weight.data.clamp_(-0.01, 0.01)
        return {"model": weights(model)}

    (chief, other), _ = run_cluster(recipe, 2, mode="async")
    assert_same(chief["model"], other["model"], "the chief's write, inside assign()")
    assert chief["model"]["0.weight"].abs().max() <= 0.01


def test_optimizer_state_dict_has_the_shape_of_torch() -> None:
    """Before the first step it is torch's empty one; afterwards a plain optimizer can load it and go on."""

    def recipe(job: Job) -> Returned:
        model = job.make(small)
        model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.1))
        first = optimizer.state_dict()
        train(job, model, optimizer)
        last = copy.deepcopy(optimizer.state_dict())
        twin = job.make(small)
        twin.load_state_dict(model.state_dict())
        plain = Adam(twin.parameters(), lr=0.1)
        plain.load_state_dict(last)
        again = copy.deepcopy(plain.state_dict())
        return {"first": first, "last": last, "again": again}

    def plain() -> tuple[Any, Any]:
        job = Job(0, 1)
        model = job.make(small)
        optimizer = Adam(model.parameters(), lr=0.1)
        first = copy.deepcopy(optimizer.state_dict())
        train(job, model, optimizer)
        return first, optimizer.state_dict()

    ((got,), _), (first, last) = run_cluster(recipe, 1, ps=3), plain()
    assert_same(first, got["first"], "first")
    assert_same(last, got["last"], "last")
    assert_same(last, got["again"], "loaded by a plain optimizer")


def test_buffers_of_the_chief_go_to_all_and_into_checkpoints(tmp_path: Path) -> None:
    """Everybody starts with the chief's; then each has its own, and the chief's are saved, now and at the end."""
    seen: dict[str, Any] = {}

    def recipe(job: Job) -> Returned:
        model = job.make(normed, seed=job.index)
        with torch.no_grad():
            model[1].running_mean.fill_(job.index + 0.25)
            model[1].num_batches_tracked.fill_(40 + job.index)
        model[0].weight.requires_grad_(False)
        optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model, optimizer = job.prepare(model, optimizer)
        start = weights(model)
        train(job, model, optimizer, 3)
        folder = job.ctx.save()
        if job.index == 0:
            seen["middle"] = (weights(model), load_file(folder / "model.safetensors"))
        train(job, model, optimizer, 2)
        return {"start": start, "end": weights(model)}

    (chief, other), _ = run_cluster(recipe, 2, ps=2, mode="sync", buffers="chief", run_dir=str(tmp_path))
    assert_same(chief["start"], other["start"], "start")
    assert chief["start"]["1.running_mean"][0] == 0.25
    assert chief["start"]["1.num_batches_tracked"] == 40
    assert not torch.equal(chief["end"]["1.running_mean"], other["end"]["1.running_mean"])
    assert_same(chief["end"]["2.weight"], other["end"]["2.weight"], "trained")
    last = load_file(tmp_path / "checkpoints" / "step-00000005" / "model.safetensors")
    assert_same(chief["end"], last, "the last checkpoint")
    assert_same(*seen["middle"], "the checkpoint in between")


def test_a_copy_of_the_model_has_nothing_to_do_with_the_cluster() -> None:
    """deepcopy, copy and torch.save of the whole model: the newest weights, no hooks, no connection."""

    def recipe(job: Job) -> Returned:
        model = job.make(small)
        model.register_forward_pre_hook(lambda module, inputs: None)  # the user's own hook stays
        model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
        train(job, model, optimizer, 4)
        deep = copy.deepcopy(model)
        now = weights(model)
        train(job, model, optimizer, 1)
        shallow = copy.copy(model)
        assert shallow[0].weight is model[0].weight
        for each in (deep, shallow):
            assert type(each) is nn.Sequential
            assert len(each._forward_pre_hooks) == 1
            assert not each._state_dict_pre_hooks
            assert not each._load_state_dict_post_hooks
        assert_same(now, deep.state_dict(), "deepcopy")
        model._forward_pre_hooks.popitem(last=False)  # the lambda above cannot be pickled, ours must not matter
        train(job, model, optimizer, 1)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert_same(weights(model), loaded.state_dict(), "torch.save")
        own = SGD(loaded.parameters(), lr=0.1)
        train(job, loaded, own, 2)
        assert job.ctx.global_step == 6
        return {}

    run_cluster(recipe, 1, ps=1)


def test_a_group_added_after_prepare_is_refused() -> None:
    def recipe(job: Job) -> Returned:
        model = job.make(small)
        _, optimizer = job.prepare(model, SGD(model[0].parameters(), lr=0.1))
        optimizer.add_param_group({"params": model[2].parameters()})
        return {}

    with pytest.raises(TrainingFailed, match="add_param_group"):
        run_cluster(recipe, 1, ps=1)


def test_without_a_cluster_prepare_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delenv("PACELINE_TASK", raising=False)
    monkeypatch.setattr("sys.argv", ["train.py"])

    def run(prepare: Any) -> Any:
        job = Job(0, 1)
        model = job.make(normed)
        optimizer = Adam(model.parameters(), lr=0.1)
        model, optimizer = prepare(model, optimizer)
        train(job, model, optimizer)
        return {"model": weights(model), "optimizer": optimizer.state_dict()}

    ctx = paceline.init()
    assert_same(run(lambda *objects: objects), run(ctx.prepare), "alone")
    assert ctx.global_step == 5


def test_a_checkpoint_holds_the_options_of_the_last_step(tmp_path: Path) -> None:
    def recipe(job: Job) -> Returned:
        model = job.make(small)
        model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for _ in range(3):
            train(job, model, optimizer, 1)
            scheduler.step()
        return {}

    run_cluster(recipe, 1, run_dir=str(tmp_path))
    state = json.loads((tmp_path / "checkpoints" / "step-00000003" / "state.json").read_text())
    assert state["groups"][0]["lr"] == 0.1 * 0.5 * 0.5


@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.Adam])
def test_a_parameter_that_is_one_number_keeps_its_state(make: type[torch.optim.Optimizer]) -> None:
    """The state of a 0-dim parameter is no counter, although it has no dimension either (a logit scale, say)."""

    def fn(ctx: Any) -> None:
        scale = torch.nn.Parameter(torch.tensor(2.0))
        model = torch.nn.ParameterDict({"scale": scale})
        optimizer = make(model.parameters(), lr=0.1)  # type: ignore[call-arg]
        ctx.prepare(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            (scale * 3).backward()
            optimizer.step()
        state = optimizer.state_dict()
        with ctx.assign():
            optimizer.load_state_dict(state)
        optimizer.step()
        assert ctx.global_step == 4

    paceline.launch(fn, ps=1, workers=1)
