"""A constraint that the ps keeps is, bit for bit, plain PyTorch's step followed by clamp_ and renorm_ by hand."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import Job, Returned, assert_same, check, run_cluster, weights
from torch import nn
from torch.optim import SGD, Adam
from toy import batch, gradients, model_of

import paceline
from paceline.errors import TrainingFailed, UsageError

pytestmark = pytest.mark.filterwarnings("error")

STEPS = 5
MOST, NORM = 0.05, 0.3
Make = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: Adam(p, lr=0.05),
    "Adam foreach": lambda p: Adam(p, lr=0.05, foreach=True),
}


@torch.no_grad()
def by_hand(model: Any) -> None:
    """What `constrained` asks of the ps."""
    model[0].weight.renorm_(2, 0, NORM)
    model[0].bias.clamp_(min=0.01)
    model[2].weight.clamp_(-MOST, MOST).renorm_(2, 0, NORM / 2)
    model[2].bias.clamp_(max=0.02)


def constrained(model: Any) -> Any:
    paceline.constrain(model[0].weight, max_norm=NORM)
    paceline.constrain(model[0].bias, min=0.01)
    paceline.constrain([model[2].weight], min=-MOST, max=MOST, max_norm=NORM / 2)
    paceline.constrain(model[2].bias, max=0.02)
    return model


def recipe(make: Make, dtype: torch.dtype = torch.float32) -> Callable[[Job], Returned]:
    def run(job: Job) -> Returned:
        model: Any = model_of(dtype=dtype)
        model, optimizer = job.prepare(constrained(model), make(model.parameters()))
        seen = []
        for step in range(STEPS):
            gradients(model, batch(job.index, step))
            if step == 2:
                model[0].weight.grad = None  # what has no gradient is held, too
            optimizer.step()
            if job.ctx is None:
                by_hand(model)
            seen.append(weights(model))
        return {"seen": seen, "model": seen[-1]}

    return run


PLACES = [(1, "bytes", "shm"), (3, "bytes", "tcp"), (3, "round_robin", "inproc"), (2, "greedy", "shm")]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("ps", "placement", "lane"), PLACES)
def test_one_worker_is_plain_pytorch(name: str, ps: int, placement: str, lane: str, tmp_path: Path) -> None:
    check(recipe(MAKERS[name]), tmp_path, ps=ps, placement=placement, lane=lane)


@pytest.mark.parametrize("ps", [1, 3])
def test_sync_is_the_averaged_reference(ps: int, tmp_path: Path) -> None:
    check(recipe(MAKERS["Adam"]), tmp_path, workers=2, mode="sync", ps=ps)


def test_half_precision_without_masters_is_plain_pytorch(tmp_path: Path) -> None:
    check(recipe(MAKERS["SGD"], torch.bfloat16), tmp_path, master="model")


def test_masters_and_averages_are_constrained() -> None:
    """The reference steps float32 copies on the gradients of the bfloat16 model."""

    def run(job: Job) -> Returned:
        model: Any = model_of(dtype=torch.bfloat16)
        masters: Any = model_of(dtype=torch.bfloat16).float()
        trained = masters if job.ctx is None else constrained(model)
        trained, optimizer = job.prepare(trained, MAKERS["SGD"](trained.parameters()))
        shadow = weights(masters)
        for step in range(STEPS):
            given = gradients(model, batch(0, step))
            if job.ctx is None:
                for parameter, gradient in zip(masters.parameters(), given, strict=True):
                    parameter.grad = None if gradient is None else gradient.float()
            optimizer.step()
            if job.ctx is None:
                by_hand(masters)
                model.load_state_dict(masters.state_dict())
                shadow = {n: 0.5 * shadow[n] + 0.5 * value for n, value in masters.state_dict().items()}
        if job.ctx is None:
            return {"model": weights(model), "averages": {n: value.bfloat16() for n, value in shadow.items()}}
        with job.ctx.ema():
            averages = weights(model)
        return {"model": weights(model), "averages": averages}

    (got,), _ = run_cluster(run, ps=2, ema=0.5, save_every="none")
    assert_same(run(Job(0, 1)), got, "half precision")


def test_local_holds_on_the_worker_and_after_the_outer_update(tmp_path: Path) -> None:
    """The reference: two steps of its own, constrained each; then the outer SGD's, and once more the constraint."""
    local_steps, outer_lr = 2, 1.7

    def run(job: Job) -> Returned:
        model: Any = model_of()
        model, optimizer = job.prepare(constrained(model), MAKERS["Adam"](model.parameters()))
        origin, seen = [p.detach().clone() for p in model.parameters()], []
        outer = SGD([p.clone() for p in origin], lr=outer_lr)
        for step in range(2 * local_steps):
            gradients(model, batch(job.index, step))
            optimizer.step()
            if job.ctx is None:
                by_hand(model)
                if step % local_steps:
                    with torch.no_grad():
                        now = outer.param_groups[0]["params"]
                        for common, parameter in zip(now, model.parameters(), strict=True):
                            common.grad = common - parameter
                        outer.step()
                        for common, parameter in zip(now, model.parameters(), strict=True):
                            parameter.copy_(common)
                        by_hand(model)
                        for common, parameter in zip(now, model.parameters(), strict=True):
                            common.copy_(parameter)
            seen.append(weights(model))
        return {"seen": seen}

    options = {"local_steps": local_steps, "outer_lr": outer_lr, "outer_momentum": 0.0, "save_every": "none"}
    want = run(Job(0, 1))
    (got,), _ = run_cluster(run, mode="local", ps=2, **options)
    assert_same(want, got, "local")


@pytest.mark.parametrize("how", ["alone", "local"])
def test_other_hooks_see_constrained_values(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script"])
    seen = []

    def run(ctx: Any) -> None:
        model: Any = model_of()
        paceline.constrain(model[4].weight, max=0.0)
        optimizer = SGD(model.parameters(), lr=1.0)
        optimizer.register_step_post_hook(lambda *_: seen.append(model[4].weight.max().item()))
        model, optimizer = ctx.prepare(model, optimizer)
        gradients(model, batch(0, 0))
        optimizer.step()

    if how == "alone":
        run(paceline.init())
    else:
        paceline.launch(run, ps=1, workers=1, mode="local", local_steps=2, save_every="none")
    assert seen == [0.0]


def test_the_same_bits_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script"])
    got = recipe(MAKERS["Adam"])(Job(0, 1, paceline.init()))
    assert_same(recipe(MAKERS["Adam"])(Job(0, 1)), got, "alone")


def test_a_resumed_run_that_names_its_constraints_again_goes_on(tmp_path: Path) -> None:
    """First values are constrained from the first update on, wherever they come from."""

    def run(first: int, stop: int) -> Callable[[Job], Returned]:
        def train(job: Job) -> Returned:
            model: Any = model_of()
            model, optimizer = job.prepare(constrained(model), MAKERS["Adam"](model.parameters()))
            for step in range(first, stop):
                gradients(model, batch(0, step))
                optimizer.step()
            return weights(model)

        return train

    (whole,), _ = run_cluster(run(0, 6), ps=1, save_every="none")
    run_cluster(run(0, 3), ps=3, run_dir=str(tmp_path / "a"))
    (got,), _ = run_cluster(run(3, 6), ps=2, run_dir=str(tmp_path / "b"), resume=str(tmp_path / "a"))
    assert_same(whole, got, "resumed")


def test_another_constraint_is_refused_at_join() -> None:
    workers = count()

    def run(job: Job) -> Returned:
        model: Any = model_of()
        paceline.constrain(model[2].weight, min=-MOST - next(workers), max=MOST)
        model, _ = job.prepare(model, SGD(model.parameters(), lr=0.1))
        return {}

    with pytest.raises(TrainingFailed, match=r"2.weight: here .* with min=-[01].05, max=0.05, there .* with min=-"):
        run_cluster(run, 2, mode="sync", wait_s=20.0)


@pytest.mark.parametrize("ps", [0, 2])
def test_towers_keep_what_was_prepared(ps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script"])
    seen = []

    def run(ctx: Any) -> None:
        model = constrained(model_of())
        optimizer = MAKERS["Adam"](model.parameters())
        with pytest.raises(UsageError, match=r"max_norm=0.3\), which towers\(\) does not keep: call ctx.prepare"):
            paceline.towers(model, optimizer, devices=["/cpu:0"])
        ctx.prepare(model, optimizer)
        with paceline.towers(model, optimizer, devices=["/cpu:0"]) as one:
            for step in range(STEPS):
                one.step(lambda tower, x: tower(x).square().mean(), [(batch(0, step),)])
        seen.append(weights(model))

    def on_a_thread(ctx: Any) -> None:
        torch.set_num_threads(1)
        run(ctx)

    if ps:
        paceline.launch(on_a_thread, ps=ps, workers=1, save_every="none")
    else:
        run(paceline.init())
    model = model_of()
    optimizer = MAKERS["Adam"](model.parameters())
    for step in range(STEPS):
        gradients(model, batch(0, step))
        optimizer.step()
        by_hand(model)
    assert_same(weights(model), seen[0], "towers")


BAD: dict[str, Callable[[nn.Parameter], Any]] = {
    "min=1.0 is more than max=0.5": lambda p: paceline.constrain(p, min=1, max=0.5),
    "NaN is no bound": lambda p: paceline.constrain(p, min=float("nan")),
    "max_norm=-1.0 is not above 0": lambda p: paceline.constrain(p, max_norm=-1.0),
    "it names none of": paceline.constrain,
    "may leave bounds": lambda p: paceline.constrain(p, min=0.1, max_norm=1.0),
    "this tensor has no rows": lambda p: paceline.constrain(nn.Parameter(torch.ones(3)), max_norm=1.0),
    "are torch.int64": lambda p: paceline.constrain(nn.Parameter(torch.ones(3).long(), requires_grad=False), min=0),
    "takes parameters, not a Tensor": lambda p: paceline.constrain(p.detach(), min=0),
    "takes parameters, not a str": lambda p: paceline.constrain("p", min=0),
    "float has none": lambda p: paceline.constrain(1.0, min=0),
    "list has none": lambda p: paceline.constrain([], min=0),
    "min is a number": lambda p: paceline.constrain(p, min="low"),
    "has a constraint already (max=1.0)": lambda p: [paceline.constrain(p, max=1.0), paceline.constrain(p, max=2.0)],
}


@pytest.mark.parametrize("said", BAD)
def test_wrong_arguments_are_refused_with_the_line(said: str) -> None:
    with pytest.raises(UsageError) as caught:
        BAD[said](nn.Parameter(torch.ones(3, 2)))
    assert said in str(caught.value) and "test_constraints.py, line" in str(caught.value)


@pytest.mark.parametrize("how", ["alone", "cluster"])
def test_what_would_hold_nothing_is_refused(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After prepare(), and of a parameter that this optimizer does not train."""
    monkeypatch.setattr("sys.argv", ["script"])

    def run(ctx: Any) -> None:
        model: Any = model_of()
        paceline.constrain(model[0].weight, min=0)
        with pytest.raises(UsageError, match=r"^0.weight has a constraint \(min=0.0\), and the optimizer does not"):
            ctx.prepare(model, SGD([model[2].weight], lr=0.1))
        ctx.prepare(model, SGD(model.parameters(), lr=0.1))
        with pytest.raises(UsageError, match=r"comes after prepare\(\).* \(test_constraints.py, line"):
            paceline.constrain(model[4].weight, min=0)

    if how == "alone":
        run(paceline.init())
    else:
        paceline.launch(run, ps=1, workers=1, save_every="none")


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_max_norm_of_an_embedding_beside_other_workers(kind: Any) -> None:
    """Its forward writes: that is refused with what to do instead, and what to do instead works."""

    def make(job: Job, **options: Any) -> Any:
        return job.make(lambda: nn.Sequential(kind(20, 6, **options), nn.Flatten(), nn.LazyLinear(1)))

    def run(job: Job, model: Any) -> None:
        words = torch.randint(0, 20, (8, 4), generator=job.rng)
        model(words)
        model, optimizer = job.prepare(model, SGD(model.parameters(), lr=1.0))
        for _ in range(2):
            optimizer.zero_grad()
            model(words).sum().backward()
            optimizer.step()

    def recipe(job: Job) -> Returned:
        advised = make(job)
        paceline.constrain(advised[0].weight, max_norm=0.5)
        run(job, advised)
        return {"norm": advised[0].weight.detach().norm(dim=1).max()}

    def refused(job: Job) -> Returned:
        run(job, make(job, max_norm=0.5))
        return {}

    said = rf"0.weight was written by .* layer 0, {kind.__name__}\(…, max_norm=0.5\), scales .*constrain\(layer.weight"
    with pytest.raises(TrainingFailed, match=said):
        run_cluster(refused, 2, mode="sync", save_every="none")
    got, _ = run_cluster(recipe, 2, mode="sync", ps=2, save_every="none")
    assert max(each["norm"] for each in got) < 0.501
