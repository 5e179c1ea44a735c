"""EMA on the ps: shadow = decay * shadow + (1 - decay) * variable after each applied update, bit for bit.

`ctx.ema()` gives a context in which the model holds the shadows; after it the model is its own again, to the bit.
"""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import Job, Returned, assert_same, mean, run_cluster, weights
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, Adam
from toy import LANES, batch, gradients, model_of

import paceline
from paceline.errors import TrainingFailed

pytestmark = pytest.mark.filterwarnings("error")

STEPS = 6
DECAY = 0.9
Values = dict[str, torch.Tensor]


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def averaged(shadow: Values, model: nn.Module, decay: float = DECAY) -> Values:
    return {name: decay * shadow[name] + (1 - decay) * value for name, value in model.state_dict().items()}


def reference(workers: int, steps: int = STEPS, seed: int = 3) -> list[tuple[Values, Values]]:
    """After every step: the parameters and their averages."""
    model = model_of(seed)
    optimizer = momentum(model)
    shadow = weights(model)
    seen = []
    for step in range(steps):
        given = [[g.clone() for g in gradients(model, batch(worker, step))] for worker in range(workers)]
        for parameter, *parts in zip(model.parameters(), *given, strict=True):
            parameter.grad = mean(list(parts))
        optimizer.step()
        shadow = averaged(shadow, model)
        seen.append((weights(model), shadow))
    return seen


def recipe(job: Job) -> Returned:
    model = model_of(seed=3 + job.index)
    model, optimizer = job.prepare(model, momentum(model))
    seen = []
    for step in range(STEPS):
        gradients(model, batch(job.index, step))
        optimizer.step()
        before = weights(model)
        with job.ctx.ema():
            inside = weights(model)
        assert_same(before, weights(model), "after")
        seen.append((before, inside))
    return {"seen": seen}


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize(("ps", "workers"), [(1, 1), (1, 2), (2, 2), (3, 3)])
def test_every_update_moves_the_averages(ps: int, workers: int, lane: str) -> None:
    want = reference(workers)
    assert not torch.equal(want[-1][0]["0.weight"], want[-1][1]["0.weight"])
    got, _ = run_cluster(recipe, workers, mode="sync", ps=ps, lane=lane, ema=DECAY, save_every="none")
    for each in got:
        assert_same(want, each["seen"], "parameters and averages")


@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_one_worker_without_rounds(mode: str) -> None:
    got, _ = run_cluster(recipe, 1, mode=mode, ps=2, ema=DECAY, save_every="none")
    assert_same(reference(1), got[0]["seen"], "parameters and averages")


def test_what_has_no_gradient_is_averaged_too() -> None:
    """An update leaves it as it is, and its average goes on towards it."""

    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer = job.prepare(model, momentum(model))
        for step in range(3):
            gradients(model, batch(0, step))
            if step:
                model[0].weight.grad = None
            optimizer.step()
        with job.ctx.ema():
            return {"model": weights(model)}

    plain = model_of()
    optimizer = momentum(plain)
    shadow = weights(plain)
    for step in range(3):
        gradients(plain, batch(0, step))
        if step:
            plain[0].weight.grad = None
        optimizer.step()
        shadow = averaged(shadow, plain)
    got, _ = run_cluster(recipe, 1, ps=2, ema=DECAY)
    assert_same(shadow, got[0]["model"], "averages")


def test_a_discarded_gradient_moves_no_average() -> None:
    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer = job.prepare(model, momentum(model))
        with job.ctx.ema():
            before = weights(model)
        gradients(model, batch(0, 0))
        model[4].bias.grad.fill_(float("inf"))
        optimizer.step()
        with job.ctx.ema():
            assert_same(before, weights(model), "averages")
        return {}

    with pytest.warns(UserWarning, match="not finite"):
        run_cluster(recipe, 1, ps=2, mode="sync", ema=DECAY)


@pytest.mark.parametrize("lane", ["inproc", "tcp"])
@pytest.mark.parametrize("mode", ["sync", "local"])
def test_a_step_inside_is_refused(mode: str, lane: str) -> None:
    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer = job.prepare(model, momentum(model))
        gradients(model, batch(0, 0))
        with job.ctx.ema():
            optimizer.step()
        return {}

    with pytest.raises(TrainingFailed, match=r"a step inside ctx\.ema\(\)"):
        run_cluster(recipe, 1, mode=mode, ps=2, lane=lane, ema=DECAY)


def test_after_an_error_inside_the_model_is_its_own_again() -> None:
    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer = job.prepare(model, momentum(model))
        for step in range(2):
            gradients(model, batch(0, step))
            optimizer.step()
        before = weights(model)
        with pytest.raises(ZeroDivisionError), job.ctx.ema(), job.ctx.ema():
            assert not torch.equal(before["0.weight"], model[0].weight)
            raise ZeroDivisionError
        assert_same(before, weights(model), "after")
        gradients(model, batch(0, 2))
        optimizer.step()
        assert job.ctx.global_step == 3
        return {}

    run_cluster(recipe, 1, ps=1, ema=DECAY)


@pytest.mark.parametrize("call", ["pull", "barrier", "pause", "state_dict"])
def test_inside_the_model_keeps_the_averages(call: str) -> None:
    """Whatever brings parameters brings them when the context ends."""
    workers = 1 if call == "pause" else 2  # nobody waits for one in a pause

    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer = job.prepare(model, momentum(model))
        for step in range(2):
            gradients(model, batch(job.index, step))
            optimizer.step()
        with job.ctx.ema():
            before = weights(model)
            if call == "pause":
                with job.ctx.pause():
                    pass
            elif call == "state_dict":
                model.state_dict()
            else:
                getattr(job.ctx, call)()
            assert_same(before, weights(model), "inside")
        assert_same(reference(workers, 2)[-1][0], weights(model), "after")
        for step in range(2, 4):
            gradients(model, batch(job.index, step))
            optimizer.step()
        return {"model": weights(model)}

    got, _ = run_cluster(recipe, workers, mode="sync", ps=2, ema=DECAY)
    for each in got:
        assert_same(reference(workers, 4)[-1][0], each["model"], "at the end")


@pytest.mark.parametrize("lane", LANES)
def test_a_pull_inside_brings_the_newest_afterwards(lane: str) -> None:
    """async: the other one makes an update while this one evaluates."""
    began, ended = threading.Event(), threading.Event()

    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer = job.prepare(model, momentum(model))
        if job.index == 1:
            assert began.wait(30)
            gradients(model, batch(1, 0))
            optimizer.step()
            newest = weights(model)
            ended.set()
            return {"model": newest}
        with job.ctx.ema():
            inside = weights(model)
            began.set()
            assert ended.wait(30)
            job.ctx.pull()
            assert_same(inside, weights(model), "inside")
        return {"model": weights(model)}

    (mine, theirs), _ = run_cluster(recipe, 2, mode="async", ps=2, lane=lane, ema=DECAY)
    assert_same(theirs["model"], mine["model"], "after")
    assert not torch.equal(model_of().state_dict()["0.weight"], mine["model"]["0.weight"])


@pytest.mark.parametrize("lane", LANES)
def test_the_averages_are_in_the_checkpoint(lane: str, tmp_path: Path) -> None:
    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer = job.prepare(model, momentum(model))
        for step in range(STEPS):
            gradients(model, batch(job.index, step))
            optimizer.step()
            if step == 2:
                job.ctx.save()
        return {}

    run_cluster(recipe, 2, mode="sync", ps=2, lane=lane, ema=DECAY, run_dir=str(tmp_path))
    for step in (3, STEPS):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        parameters, averages = reference(2)[step - 1]
        assert_same(parameters, load_file(folder / "model.safetensors"), "model")
        assert_same(averages, load_file(folder / "ema.safetensors"), "ema")
        manifest = json.loads((folder / "MANIFEST.json").read_text())
        assert manifest["files"]["ema.safetensors"]["size_bytes"] == (folder / "ema.safetensors").stat().st_size


def test_without_ema_there_are_none_in_the_checkpoint(tmp_path: Path) -> None:
    def recipe(job: Job) -> Returned:
        model = model_of()
        job.prepare(model, momentum(model))
        return {}

    run_cluster(recipe, 1, ps=1, run_dir=str(tmp_path))
    (folder,) = (tmp_path / "checkpoints").glob("step-*")
    assert sorted(f.name for f in folder.iterdir()) == [
        "MANIFEST.json", "model.safetensors", "optimizer.safetensors", "state.json",
    ]  # fmt: skip


def test_in_a_cluster_that_keeps_none_it_is_refused_in_one_sentence() -> None:
    def recipe(job: Job) -> Returned:
        model = model_of()
        job.prepare(model, momentum(model))
        with job.ctx.ema():
            raise AssertionError("there are no averages")
        return {}

    with pytest.raises(TrainingFailed) as caught:
        run_cluster(recipe, 1, ps=2)
    assert type(caught.value.__cause__) is paceline.errors.Refused
    assert str(caught.value.__cause__) == "the ps keep no averaged parameters: start the run with --ema 0.999, say"


def test_without_a_cluster_the_model_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    for name in ("TF_CONFIG", "PACELINE_TASK"):
        monkeypatch.delenv(name, raising=False)
    ctx = paceline.init()
    model = model_of()
    model, optimizer = ctx.prepare(model, momentum(model))
    gradients(model, batch(0, 0))
    optimizer.step()
    before = weights(model)
    for _ in range(2):
        with ctx.ema():
            assert_same(before, weights(model), "inside")
    assert capsys.readouterr().out.count("nobody keeps averages") == 1


@pytest.mark.parametrize("how", ["load_state_dict", "assign"])
def test_loading_restarts_the_averages(how: str) -> None:
    """Averages of parameters that are gone are of no use."""
    other = weights(model_of(seed=44))

    def load(job: Job, model: nn.Module) -> None:
        if how == "load_state_dict":
            model.load_state_dict(other)
            job.ctx.barrier()
        else:
            with job.ctx.assign():
                model.load_state_dict(other)

    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer = job.prepare(model, momentum(model))
        load(job, model)
        with job.ctx.ema():
            assert_same(other, weights(model), "averages")
        for step in range(STEPS):
            gradients(model, batch(job.index, step))
            optimizer.step()
        with job.ctx.ema():
            return {"model": weights(model)}

    got, _ = run_cluster(recipe, 2, mode="sync", ps=2, ema=DECAY)
    assert_same(reference(2, seed=44)[-1][1], got[1]["model"], "averages")


def test_local_averages_what_the_ps_hold_and_keeps_the_workers_own_steps() -> None:
    """The shadows follow the outer updates; a worker between two exchanges has its own parameters back after it."""

    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
        start = weights(model)
        for step in range(3):
            gradients(model, batch(0, step))
            optimizer.step()
            if step == 1:
                common = weights(model)
        own = weights(model)
        with job.ctx.ema():
            inside = weights(model)
        assert_same(own, weights(model), "after")
        want = {name: DECAY * start[name] + (1 - DECAY) * common[name] for name in start}
        assert_same(want, inside, "averages")
        assert not torch.equal(own["0.weight"], common["0.weight"])
        return {}

    run_cluster(recipe, 1, mode="local", local_steps=2, ps=2, ema=DECAY)


@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_decays_and_adam_in_double_precision(decay: float) -> None:
    def make(model: nn.Module) -> Any:
        return Adam(model.parameters(), lr=0.01)

    def recipe(job: Job) -> Returned:
        model = model_of(dtype=torch.float64)
        model, optimizer = job.prepare(model, make(model))
        for step in range(STEPS):
            gradients(model, batch(0, step))
            optimizer.step()
        with job.ctx.ema():
            return {"model": weights(model)}

    plain = model_of(dtype=torch.float64)
    optimizer = make(plain)
    shadow = weights(plain)
    for step in range(STEPS):
        gradients(plain, batch(0, step))
        optimizer.step()
        shadow = averaged(shadow, plain, decay)
    got, _ = run_cluster(recipe, 1, ps=2, ema=decay)
    assert_same(shadow, got[0]["model"], "averages")
