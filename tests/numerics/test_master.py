"""Mixed precision: half-precision parameters on the worker, their float32 masters on the ps (the default).

Bit for bit one process that keeps a float32 copy: half-precision gradients are added and divided in float32, torch's
optimizer steps in float32, and the worker gets the copy in the model's dtype.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import Job, Returned, assert_same, check, mean, run_cluster, weights
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, Adam, AdamW
from toy import LANES, Gradient, batch, give, gradients, model_of

pytestmark = pytest.mark.filterwarnings("error")

STEPS = 6
HALF = (torch.bfloat16, torch.float16)
Make = Callable[[Any], torch.optim.Optimizer]
Take = Callable[[nn.Module, int, int], Gradient]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return Adam(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return SGD(parameters, lr=0.02, momentum=0.9, weight_decay=1e-2)


def bfloat16() -> nn.Module:
    return model_of(dtype=torch.bfloat16)


def float16() -> nn.Module:
    return model_of(dtype=torch.float16)


class Mixed(nn.Module):
    """Four dtypes, not in the order of their sizes; two of them have masters."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Linear(37, 5, dtype=torch.bfloat16)
        self.single = nn.Linear(5, 19)
        self.long = nn.Linear(19, 7, dtype=torch.float64)
        self.half_float = nn.Linear(7, 5, dtype=torch.float16)
        self.last = nn.Linear(5, 3, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.short(x.to(torch.bfloat16))
        x = self.long(self.single(x.float()).double())
        return self.last(self.half_float(x.half()).to(torch.bfloat16)).float()


def mixed() -> nn.Module:
    return Job.make(Mixed, seed=2)


def small_batch(model: nn.Module, worker: int, step: int) -> Gradient:
    return gradients(model, batch(worker, step) / 10)


class Masters:
    """The reference: a model, and what it is the rounded copy of."""

    def __init__(self, build: Callable[[], nn.Module], make: Make, take: Take = small_batch) -> None:
        self.model = build()
        self._take = take
        self.masters = [
            nn.Parameter(p.detach().float() if p.dtype in HALF else p.detach().clone()) for p in self.model.parameters()
        ]
        self.optimizer = make(self.masters)

    def train(self, workers: int, steps: int = STEPS) -> "Masters":
        for step in range(steps):
            given = [
                [None if g is None else g.clone() for g in self._take(self.model, w, step)] for w in range(workers)
            ]
            for master, *parts in zip(self.masters, *given, strict=True):
                master.grad = mean([None if g is None else g.to(master.dtype) for g in parts])
            self.optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                    parameter.copy_(master)
        return self

    def named(self) -> dict[str, torch.Tensor]:
        names = [name for name, _ in self.model.named_parameters()]
        return {name: master.detach() for name, master in zip(names, self.masters, strict=True)}


def recipe_of(build: Callable[[], nn.Module], make: Make, take: Take = small_batch) -> Callable[[Job], Returned]:
    def recipe(job: Job) -> Returned:
        model = build()
        model, optimizer = job.prepare(model, make(model.parameters()))
        for step in range(STEPS):
            give(model, take(model, job.index, step))
            optimizer.step()
        return {"model": weights(model), "optimizer": copy.deepcopy(optimizer.state_dict())}

    return recipe


def holds(build: Callable[[], nn.Module], make: Make, workers: int, take: Take = small_batch, **options: Any) -> None:
    reference = Masters(build, make, take).train(workers)
    got, summary = run_cluster(recipe_of(build, make, take), workers, mode="sync", save_every="none", **options)
    for index, each in enumerate(got):
        assert_same(weights(reference.model), each["model"], f"worker {index}")
    assert summary["global_step"] == STEPS


CASES = [(1, 1, "inproc"), (2, 2, "inproc"), (2, 1, "shm"), (3, 3, "shm"), (2, 1, "tcp"), (3, 2, "tcp")]


@pytest.mark.parametrize("build", [bfloat16, float16, mixed])
@pytest.mark.parametrize(("workers", "ps", "lane"), CASES)
def test_sync_is_one_process_with_a_float32_copy(
    workers: int, ps: int, lane: str, build: Callable[[], nn.Module]
) -> None:
    holds(build, sgd if workers == 2 or build is mixed else adam, workers, ps=ps, lane=lane)


@pytest.mark.parametrize("placement", ["bytes", "round_robin", "greedy"])
@pytest.mark.parametrize("name", ["fused", "foreach", "groups"])
def test_implementations_and_groups(name: str, placement: str) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        if name == "groups":
            each = list(parameters)
            return AdamW([{"params": each[::2], "lr": 0.03}, {"params": each[1::2], "weight_decay": 0.3}], lr=0.01)
        return Adam(parameters, lr=0.01, fused=name == "fused", foreach=name == "foreach")

    holds(bfloat16, make, 2, ps=2, placement=placement)


@pytest.mark.parametrize("lane", LANES)
def test_gradients_that_are_missing(lane: str) -> None:
    """No gradient: no decay either, whatever the dtype."""

    def take(model: nn.Module, worker: int, step: int) -> Gradient:
        gradient = small_batch(model, worker, step)
        gradient[4] = None
        if (worker + step) % 2:
            gradient[0] = gradient[3] = None
        return gradient

    holds(bfloat16, lambda p: AdamW(p, lr=0.01, weight_decay=0.5), 2, take, ps=2, lane=lane)
    holds(mixed, sgd, 2, take, ps=2, lane=lane)


def test_bits_of_the_master_are_not_those_of_the_model() -> None:
    """What the tests above compare with is something else than half precision all the way."""
    plain = model_of(dtype=torch.bfloat16)
    optimizer = sgd(plain.parameters())
    for step in range(STEPS):
        small_batch(plain, 0, step)
        optimizer.step()
    assert not torch.equal(Masters(bfloat16, sgd).train(1).model[0].weight, plain[0].weight)


@pytest.mark.parametrize("lane", LANES)
def test_the_models_own_precision_if_asked_for(lane: str, tmp_path: Path) -> None:
    """--master model: plain PyTorch's bits, optimizer state and all."""

    def recipe(job: Job) -> Returned:
        model = bfloat16()
        model, optimizer = job.prepare(model, adam(model.parameters()))
        for step in range(STEPS):
            small_batch(model, job.index, step)
            optimizer.step()
        return {"model": weights(model), "optimizer": optimizer.state_dict()}

    check(recipe, tmp_path, workers=2, mode="sync", ps=2, lane=lane, master="model")


@pytest.mark.parametrize("lane", LANES)
def test_many_tiny_updates_add_up(lane: str) -> None:
    """1 - 0.0001 is 1 in bfloat16, a hundred times; with a master a hundred of them are 0.99."""

    def recipe(job: Job) -> Returned:
        model = nn.Linear(5, 3, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            model.weight.fill_(1.0)
        model, optimizer = job.prepare(model, SGD(model.parameters(), lr=1e-4))
        for _ in range(100):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        return {"model": weights(model)}

    (moved,), _ = run_cluster(recipe, 1, ps=1, lane=lane)
    (stuck,), _ = run_cluster(recipe, 1, ps=1, lane=lane, master="model")
    assert_same(torch.ones(3, 5, dtype=torch.bfloat16), stuck["model"]["weight"], "without masters")
    assert_same(torch.full((3, 5), 0.99, dtype=torch.bfloat16), moved["model"]["weight"], "with masters")


# --- what is said of the state --------------------------------------------------------------------------------------


def test_optimizer_state_dict_has_the_shape_of_torch() -> None:
    """No word of masters in it; a plain optimizer loads it."""
    reference = Masters(bfloat16, adam).train(1)
    (got,), _ = run_cluster(recipe_of(bfloat16, adam), 1, ps=2)
    assert_same(reference.optimizer.state_dict(), got["optimizer"], "optimizer")
    plain = adam(bfloat16().parameters())
    plain.load_state_dict(got["optimizer"])
    assert set(plain.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("make", [adam, sgd])
@pytest.mark.parametrize("when", ["before prepare", "after prepare", "in assign"])
def test_state_that_is_loaded_goes_on_in_float32(when: str, make: Make) -> None:
    """torch casts what it loads to the parameters' dtype; the ps goes on from that in its own."""
    earlier = Masters(bfloat16, make).train(1, 3)
    saved_model, saved_state = weights(earlier.model), copy.deepcopy(earlier.optimizer.state_dict())

    def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.load_state_dict(saved_model)
        optimizer.load_state_dict(copy.deepcopy(saved_state))

    def recipe(job: Job) -> Returned:
        model = bfloat16()
        optimizer = make(model.parameters())
        if when == "before prepare":
            load(model, optimizer)
        model, optimizer = job.prepare(model, optimizer)
        if when == "after prepare":
            load(model, optimizer)
        elif when == "in assign":
            with job.ctx.assign():
                load(model, optimizer)
        for step in range(STEPS):
            small_batch(model, job.index, step)
            optimizer.step()
        return {"model": weights(model), "optimizer": copy.deepcopy(optimizer.state_dict())}

    cast = make(bfloat16().parameters())  # what torch makes of the state
    cast.load_state_dict(copy.deepcopy(saved_state))
    resumed = Masters(bfloat16, make)
    resumed.model.load_state_dict(saved_model)
    with torch.no_grad():
        for parameter, master in zip(resumed.model.parameters(), resumed.masters, strict=True):
            master.copy_(parameter)
    resumed.optimizer.load_state_dict(cast.state_dict())
    resumed.train(1)
    (got,), _ = run_cluster(recipe, 1, ps=2)
    assert_same(weights(resumed.model), got["model"], "model")
    assert_same(resumed.optimizer.state_dict(), got["optimizer"], "optimizer")


def test_loaded_parameters_are_the_new_masters() -> None:
    other = weights(model_of(seed=44, dtype=torch.bfloat16))

    def recipe(job: Job) -> Returned:
        model = bfloat16()
        model, optimizer = job.prepare(model, adam(model.parameters()))
        model.load_state_dict(other)
        for step in range(STEPS):
            small_batch(model, 0, step)
            optimizer.step()
        return {"model": weights(model)}

    (got,), _ = run_cluster(recipe, 1, ps=2)
    reference = Masters(lambda: model_of(seed=44, dtype=torch.bfloat16), adam).train(1)
    assert_same(weights(reference.model), got["model"], "model")


@pytest.mark.parametrize("build", [bfloat16, mixed])
def test_a_checkpoint_keeps_the_masters(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    """The model as workers see it in one file, what it is rounded from in the other."""
    reference = Masters(build, sgd).train(2)
    run_cluster(recipe_of(build, sgd), 2, mode="sync", ps=2, lane="shm", run_dir=str(tmp_path))
    folder = tmp_path / "checkpoints" / f"step-{STEPS:08d}"
    assert_same(weights(reference.model), load_file(folder / "model.safetensors"), "model")
    saved = load_file(folder / "optimizer.safetensors")
    halves = [name for name, p in reference.model.named_parameters() if p.dtype in HALF]
    masters = {name: reference.named()[name] for name in halves}
    assert_same(masters, {name: saved[f"{name}.master"] for name in halves}, "masters")
    assert sum(name.endswith(".master") for name in saved) == len(halves)


def test_averages_are_made_of_masters() -> None:
    """In bfloat16 0.99 * w + 0.01 * w is not w, and small changes would be lost."""

    def recipe(job: Job) -> Returned:
        model = bfloat16()
        model, optimizer = job.prepare(model, sgd(model.parameters()))
        for step in range(STEPS):
            small_batch(model, 0, step)
            optimizer.step()
        with job.ctx.ema():
            return {"model": weights(model)}

    reference = Masters(bfloat16, sgd)
    shadow = {name: value.clone() for name, value in reference.named().items()}
    for step in range(STEPS):
        reference._take = lambda model, worker, _, step=step: small_batch(model, worker, step)
        reference.train(1, 1)
        shadow = {name: 0.99 * shadow[name] + (1 - 0.99) * value for name, value in reference.named().items()}
    (got,), _ = run_cluster(recipe, 1, ps=2, ema=0.99)
    assert_same({name: value.to(torch.bfloat16) for name, value in shadow.items()}, got["model"], "averages")


@pytest.mark.parametrize("lane", LANES)
def test_local_steps_in_half_precision(lane: str) -> None:
    """The worker's own steps are its own; the outer step has masters."""

    def take(model: nn.Module, worker: int, exchange: int) -> Gradient:
        own = bfloat16()
        own.load_state_dict(model.state_dict())
        optimizer = SGD(own.parameters(), lr=0.05)
        for step in (2 * exchange, 2 * exchange + 1):
            small_batch(own, worker, step)
            optimizer.step()
        return [w.detach() - v.detach() for w, v in zip(model.parameters(), own.parameters(), strict=True)]

    def recipe(job: Job) -> Returned:
        model = bfloat16()
        model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.05))
        for step in range(2 * STEPS):
            small_batch(model, job.index, step)
            optimizer.step()
        return {"model": weights(model)}

    reference = Masters(bfloat16, lambda p: SGD(p, lr=0.7, momentum=0.9, nesterov=True), take).train(2)
    got, _ = run_cluster(recipe, 2, mode="local", local_steps=2, ps=2, lane=lane)
    for index, each in enumerate(got):
        assert_same(weights(reference.model), each["model"], f"worker {index}")
