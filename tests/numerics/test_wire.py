"""Wire dtypes: gradients travel in bfloat16 or float16, sums are made in the parameters' own precision.

Bit for bit one process that casts each worker's gradient to that dtype and back, and then does what sync does.
Parameters always travel in the model's dtype.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from alike import Job, Returned, assert_same, mean, run_cluster, weights
from torch import nn
from torch.optim import SGD, Adam
from toy import LANES, Gradient, batch, give, gradients, model_of

from paceline.errors import TrainingFailed

pytestmark = pytest.mark.filterwarnings("error")

STEPS = 5
WIRES = ("bfloat16", "float16")
Make = Callable[[nn.Module], torch.optim.Optimizer]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return Adam(model.parameters(), lr=0.01)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def travelled(gradient: Gradient, wire: str) -> Gradient:
    """There and back; only what becomes narrower is cast."""
    dtype = getattr(torch, wire)

    def cast(g: torch.Tensor) -> torch.Tensor:
        return g.to(dtype).to(g.dtype) if g.dtype.itemsize > dtype.itemsize else g.clone()

    return [None if g is None else cast(g) for g in gradient]


def reference(
    wire: str,
    workers: int,
    make: Make = adam,
    build: Callable[[], nn.Module] = model_of,
    take: Callable[[nn.Module, int, int], Gradient] | None = None,
) -> dict[str, torch.Tensor]:
    model = build()
    optimizer = make(model)
    for step in range(STEPS):
        given = [travelled((take or taken)(model, worker, step), wire) for worker in range(workers)]
        give(model, [mean(list(parts)) for parts in zip(*given, strict=True)])
        optimizer.step()
    return weights(model)


def taken(model: nn.Module, worker: int, step: int) -> Gradient:
    return gradients(model, batch(worker, step))


def recipe_of(
    make: Make = adam,
    build: Callable[[], nn.Module] = model_of,
    take: Callable[[nn.Module, int, int], Gradient] | None = None,
) -> Callable[[Job], Returned]:
    def recipe(job: Job) -> Returned:
        model = build()
        model, optimizer = job.prepare(model, make(model))
        for step in range(STEPS):
            give(model, (take or taken)(model, job.index, step))
            optimizer.step()
        return {"model": weights(model)}

    return recipe


def holds(want: dict[str, torch.Tensor], recipe: Any, workers: int, **options: Any) -> dict[str, Any]:
    got, summary = run_cluster(recipe, workers, mode=options.pop("mode", "sync"), save_every="none", **options)
    for index, each in enumerate(got):
        assert_same(want, each["model"], f"worker {index}")
    return summary


CASES = [(1, 1, "inproc"), (2, 2, "inproc"), (2, 1, "shm"), (3, 3, "shm"), (2, 1, "tcp"), (3, 2, "tcp")]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("workers", "ps", "lane"), CASES)
def test_sync_is_one_process_that_casts(workers: int, ps: int, lane: str, wire: str) -> None:
    make = sgd if workers == 2 else adam
    want = reference(wire, workers, make)
    assert not torch.equal(want["0.weight"], reference("float32", workers, make)["0.weight"])
    assert not torch.equal(want["0.weight"], want["0.weight"].to(getattr(torch, wire)).float()), "full precision"
    holds(want, recipe_of(make), workers, ps=ps, lane=lane, wire=wire)


@pytest.mark.parametrize("lane", LANES)
def test_async_with_one_worker(lane: str) -> None:
    holds(reference("bfloat16", 1), recipe_of(), 1, ps=2, lane=lane, mode="async", wire="bfloat16")


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("wire", WIRES)
def test_double_precision(wire: str, lane: str) -> None:
    def build() -> nn.Module:
        return model_of(dtype=torch.float64)

    holds(reference(wire, 2, adam, build), recipe_of(adam, build), 2, ps=2, lane=lane, wire=wire)


class Mixed(nn.Module):
    """Four dtypes, not in the order of their sizes."""

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


def slow(model: nn.Module) -> torch.optim.Optimizer:
    return SGD(model.parameters(), lr=1e-3, momentum=0.9)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("ps", [1, 3])
def test_mixed_dtypes(ps: int, wire: str, lane: str) -> None:
    """What is narrow already travels as it is: a float16 gradient is not cut to bfloat16, nor the other way round."""
    want = reference(wire, 2, slow, mixed)
    assert not torch.equal(want["single.weight"], reference("float32", 2, slow, mixed)["single.weight"])
    holds(want, recipe_of(slow, mixed), 2, ps=ps, lane=lane, wire=wire, master="model")


def test_a_model_as_narrow_as_the_wire_is_not_touched() -> None:
    def build() -> nn.Module:
        return model_of(dtype=torch.bfloat16)

    want = reference("float32", 2, sgd, build)
    holds(want, recipe_of(sgd, build), 2, ps=2, wire="bfloat16", master="model")
    holds(want, recipe_of(sgd, build), 2, ps=2, wire="float16", master="model")


@pytest.mark.parametrize("lane", LANES)
def test_gradients_that_are_missing(lane: str) -> None:
    def take(model: nn.Module, worker: int, step: int) -> Gradient:
        gradient = taken(model, worker, step)
        gradient[5] = None
        if (worker + step) % 2:
            gradient[0] = gradient[3] = None
        return gradient

    want = reference("bfloat16", 2, adam, take=take)
    holds(want, recipe_of(adam, take=take), 2, ps=2, lane=lane, wire="bfloat16")


def test_weights_too() -> None:
    """A gradient is cast, then multiplied in full precision."""

    def recipe(job: Job) -> Returned:
        job.ctx.weight((3, 11)[job.index])
        return recipe_of()(job)

    model = model_of()
    optimizer = adam(model)
    for step in range(STEPS):
        first, second = (travelled(taken(model, worker, step), "float16") for worker in range(2))
        give(model, [(a * 3 + b * 11) / 14 for a, b in zip(first, second, strict=True)])
        optimizer.step()
    holds(weights(model), recipe, 2, ps=2, lane="tcp", wire="float16")


@pytest.mark.parametrize("lane", LANES)
def test_deltas_of_local_steps_are_cast_too(lane: str) -> None:
    def take(model: nn.Module, worker: int, exchange: int) -> Gradient:
        own = model_of()
        own.load_state_dict(model.state_dict())
        optimizer = SGD(own.parameters(), lr=0.05)
        for step in (2 * exchange, 2 * exchange + 1):
            gradients(own, batch(worker, step))
            optimizer.step()
        return [w.detach() - v.detach() for w, v in zip(model.parameters(), own.parameters(), strict=True)]

    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.05))
        for step in range(2 * STEPS):
            gradients(model, batch(job.index, step))
            optimizer.step()
        return {"model": weights(model)}

    def outer(model: nn.Module) -> torch.optim.Optimizer:
        return SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    want = reference("bfloat16", 2, outer, take=take)
    assert not torch.equal(want["0.weight"], reference("float32", 2, outer, take=take)["0.weight"])
    holds(want, recipe, 2, ps=2, lane=lane, mode="local", local_steps=2, wire="bfloat16")


# --- what float16 cannot hold ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_an_overflow_is_discarded_everywhere_and_named(mode: str, lane: str) -> None:
    versions = []

    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer = job.prepare(model, sgd(model))
        before = weights(model)
        gradients(model, batch(0, 0))
        model[2].bias.grad[-1] = 1e5  # finite, but not in float16
        optimizer.step()
        assert_same(before, weights(model), "after the overflow")
        versions.append([link.version for link in job.ctx._session.training_step.client.links])
        gradients(model, batch(0, 0))
        optimizer.step()
        assert not torch.equal(before["0.weight"], weights(model)["0.weight"])
        versions.append([link.version for link in job.ctx._session.training_step.client.links])
        return {}

    with pytest.warns(
        UserWarning, match=r"step 1 discarded, gradient not finite in 2\.bias \(as float16 on the wire\)$"
    ):
        _, summary = run_cluster(recipe, 1, mode=mode, ps=3, lane=lane, wire="float16")
    assert versions == [[0, 0, 0], [1, 1, 1]]
    assert summary["workers"][0]["discarded"] == 1
    assert summary["ps"][0]["not_finite"] == {"0": 1}


class TwoSizes(nn.Module):
    """The small one is cast and copied together; the large one is narrow already, and is sent from where it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.randn(37))
        self.large = nn.Parameter(torch.randn(37, 20_000).to(torch.bfloat16))


@pytest.mark.parametrize("ps", [1, 2])
@pytest.mark.parametrize("lane", LANES)
def test_an_overflow_beside_a_shard_that_is_not_cast(lane: str, ps: int) -> None:
    def recipe(job: Job) -> Returned:
        model = job.make(TwoSizes)
        model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
        before = weights(model)
        give(model, [torch.full((37,), 1e5), torch.ones_like(model.large)])
        optimizer.step()
        assert_same(before, weights(model), "after the overflow")
        give(model, [torch.full((37,), 0.1), torch.ones_like(model.large)])
        optimizer.step()
        want = before["small"].add(torch.full((37,), 0.1).half().float(), alpha=-0.1)
        assert_same(want, weights(model)["small"], "small")
        return {}

    with pytest.warns(UserWarning, match=r"not finite in small \(as float16 on the wire\)$"):
        run_cluster(recipe, 1, ps=ps, placement="round_robin", lane=lane, wire="float16")


def test_what_was_not_finite_before_the_cast_is_named_without_it() -> None:
    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer = job.prepare(model, sgd(model))
        gradients(model, batch(0, 0))
        model[2].bias.grad[0] = float("nan")
        optimizer.step()
        return {}

    with pytest.warns(UserWarning, match=r"gradient not finite in 2\.bias$"):
        run_cluster(recipe, 1, ps=2, wire="bfloat16")


@pytest.mark.parametrize("lane", ["inproc", "tcp"])
def test_large_but_finite_is_finite(lane: str) -> None:
    """Each number fits float16, their sum would not; nor would a sum of float32's largest in bfloat16."""

    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer = job.prepare(model, SGD(model.parameters(), lr=1e-4))
        value = 3e38 if job.ctx._session.require_cluster().settings.wire == "bfloat16" else 6e4
        give(model, [torch.full_like(p, value) for p in model.parameters()])
        optimizer.step()
        assert job.ctx.global_step == 1
        return {}

    for wire in WIRES:
        assert run_cluster(recipe, 1, ps=2, lane=lane, wire=wire)[1]["workers"][0]["discarded"] == 0


# --- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [5_000, 400_000])
def test_a_ps_receives_half_the_bytes(numel: int) -> None:
    """Small shards are sent in one piece, large ones (more than 1 MiB) from where they lie."""

    class Vector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values = nn.Parameter(torch.zeros(numel))

    def recipe(job: Job) -> Returned:
        model = Vector()
        model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
        for _ in range(STEPS):
            give(model, [torch.ones(numel)])
            optimizer.step()
        return {}

    received, sent = {}, {}
    for wire in ("float32", *WIRES):
        _, summary = run_cluster(recipe, 1, mode="sync", ps=1, lane="tcp", wire=wire, save_every="none")
        received[wire], sent[wire] = summary["ps"][0]["bytes_in"], summary["ps"][0]["bytes_out"]
    for wire in WIRES:
        assert received["float32"] - received[wire] == pytest.approx(2 * numel * STEPS, rel=0.02)
        assert sent["float32"] == pytest.approx(sent[wire], rel=0.02)
    assert received["float32"] == pytest.approx(4 * numel * (STEPS + 1), rel=0.2)  # and the first values


def test_tasks_of_different_wires_do_not_train_together() -> None:
    """A ps that reads other bytes than a worker writes would train on noise."""

    def recipe(job: Job) -> Returned:
        assignment = job.ctx._session.assignment
        settings = msgspec.structs.replace(assignment.settings, wire="float32")
        job.ctx._session.assignment = msgspec.structs.replace(assignment, settings=settings)
        model = model_of()
        job.prepare(model, sgd(model))
        return {}

    with pytest.raises(TrainingFailed, match="wire float32, this ps with bfloat16"):
        run_cluster(recipe, 1, ps=1, wire="bfloat16")
