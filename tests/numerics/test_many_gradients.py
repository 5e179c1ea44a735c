"""K above the number of workers: one worker puts several gradients into a round, and the mean is over all of them.

A worker's gradients are added in the order of its pushes, the sums in worker order: ((a1 + a2) + b1) / 3.
"""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from alike import Job, Returned, assert_same, run_cluster, weights
from torch import nn
from torch.optim import SGD, Adam
from toy import LANES, Gradient, drawn, give, model_of

from paceline.frameworks.torch.layout import optimizer_spec
from paceline.params.layout import Layout, TensorSpec
from paceline.params.placement import place
from paceline.server.numbers.gradients import Slot
from paceline.server.numbers.shard import Shard
from paceline.views import flat

pytestmark = pytest.mark.filterwarnings("error")

ROUNDS = 4
K = 3


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return Adam(model.parameters(), lr=0.01)


def summed(parts: Sequence[torch.Tensor | None], divisor: float) -> torch.Tensor | None:
    present = [part for part in parts if part is not None]
    if not present:
        return None
    total = present[0].clone()
    for part in present[1:]:
        total = total + part
    return total / divisor


def reference(rounds: Sequence[Sequence[Gradient]], make: Any = adam) -> dict[str, torch.Tensor]:
    """One process: an update a round, from the mean of its gradients in this order."""
    model = model_of()
    optimizer = make(model)
    for given in rounds:
        give(model, [summed(parts, len(given)) for parts in zip(*given, strict=True)])
        optimizer.step()
    return weights(model)


def pushes() -> list[list[Gradient]]:
    model = model_of()
    return [[list(drawn(model, K * round_ + number)) for number in range(K)] for round_ in range(ROUNDS)]


def recipe_of(rounds: Sequence[Sequence[Gradient]], make: Any = adam) -> Any:
    """One worker that makes all pushes; inside a round its parameters stay where they are."""

    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer = job.prepare(model, make(model))
        for index, given in enumerate(rounds):
            before = weights(model)
            for number, gradient in enumerate(given):
                model(torch.ones(1, 37))
                give(model, gradient)
                optimizer.step()
                if number < len(given) - 1:
                    assert_same(before, weights(model), f"inside round {index}")
                    assert job.ctx.global_step == index
            assert job.ctx.global_step == index + 1
        return {"model": weights(model)}

    return recipe


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("ps", [1, 2, 3])
@pytest.mark.parametrize("make", [sgd, adam])
def test_three_gradients_of_one_worker(make: Any, ps: int, lane: str) -> None:
    rounds = pushes()
    want = reference(rounds, make)
    got, summary = run_cluster(
        recipe_of(rounds, make), 1, mode="sync", ps=ps, lane=lane, replicas_to_aggregate=K, save_every="none"
    )
    assert_same(want, got[0]["model"], "worker 0")
    assert summary["global_step"] == ROUNDS
    assert summary["workers"][0]["steps"] == K * ROUNDS


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("ps", [1, 2])
def test_four_gradients_of_two_workers(ps: int, lane: str) -> None:
    """Who gives how many is a race; with small whole numbers as gradients every sum is exact, whoever is in it."""

    def exact(number: int) -> list[torch.Tensor]:
        return [g.mul(8).round().div(8) for g in drawn(model_of(), number)]

    def recipe(job: Job) -> Returned:
        model = model_of(seed=3 + job.index)
        model, optimizer = job.prepare(model, adam(model))
        for _ in job.ctx.steps(6):
            give(model, exact(job.ctx.global_step))
            optimizer.step()
        job.ctx.barrier()
        return {"model": weights(model)}

    got, summary = run_cluster(recipe, 2, mode="sync", ps=ps, lane=lane, replicas_to_aggregate=4, save_every="none")
    want = reference([[list(exact(round_))] for round_ in range(6)])
    for index, each in enumerate(got):
        assert_same(want, each["model"], f"worker {index}")
    assert summary["global_step"] == 6
    counted = sum(int(n) for histogram in summary["ps"][0]["staleness"].values() for n in histogram.values())
    assert counted == 4 * 6


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("ps", [1, 2])
def test_two_workers_in_turn(ps: int, lane: str) -> None:
    """Worker 0 puts two gradients into each round, then worker 1 two: ((a1 + a2) + b1) + b2, over 4."""
    turn = [threading.Barrier(2, timeout=60) for _ in range(2)]

    def gradient(round_: int, number: int) -> list[torch.Tensor]:
        return drawn(model_of(), 4 * round_ + number)

    def recipe(job: Job) -> Returned:
        model = model_of(seed=3 + job.index)
        model, optimizer = job.prepare(model, adam(model))
        for round_ in range(ROUNDS):
            if job.index == 1:
                turn[0].wait()
            for number in (0, 1):
                give(model, gradient(round_, 2 * job.index + number))
                optimizer.step()
                weights(model)  # the answer is in
            if job.index == 0:
                turn[0].wait()
            turn[1].wait()
            job.ctx.pull()
            assert job.ctx.global_step == round_ + 1
        return {"model": weights(model)}

    got, _ = run_cluster(recipe, 2, mode="sync", ps=ps, lane=lane, replicas_to_aggregate=4, save_every="none")
    want = reference([[list(gradient(round_, number)) for number in range(4)] for round_ in range(ROUNDS)])
    for index, each in enumerate(got):
        assert_same(want, each["model"], f"worker {index}")


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("ps", [1, 2])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_that_is_not_finite_is_a_vote_and_nothing_else(bad: int, ps: int, lane: str) -> None:
    """The round is over after three pushes; its mean is over the two that count."""
    rounds = pushes()
    want = reference([[g for n, g in enumerate(given) if (i, n) != (1, bad)] for i, given in enumerate(rounds)])
    poisoned = [list(g) for g in rounds[1]]
    poisoned[bad] = [g.clone().fill_(float("nan")) if i == 5 else g for i, g in enumerate(poisoned[bad])]
    given = [rounds[0], poisoned, *rounds[2:]]
    with pytest.warns(UserWarning, match=rf"step {K + bad + 1} discarded, gradient not finite in 4\.bias$"):
        got, summary = run_cluster(
            recipe_of(given), 1, mode="sync", ps=ps, lane=lane, replicas_to_aggregate=K, save_every="none"
        )
    assert_same(want, got[0]["model"], "worker 0")
    assert summary["workers"][0]["discarded"] == 1


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("ps", [1, 2])
def test_gradients_that_are_missing(ps: int, lane: str) -> None:
    """What one push lacks is nothing in the sum, and still divided by three; what all lack does not move."""
    rounds = pushes()
    for index, given in enumerate(rounds):
        for number, gradient in enumerate(given):
            gradient[5] = None
            if index != 2:
                gradient[number] = None
            if number > 0:
                gradient[4] = None  # only the first push of a round has it
    want = reference(rounds)
    assert torch.equal(want["4.bias"], model_of().state_dict()["4.bias"])
    got, _ = run_cluster(
        recipe_of(rounds), 1, mode="sync", ps=ps, lane=lane, replicas_to_aggregate=K, save_every="none"
    )
    assert_same(want, got[0]["model"], "worker 0")


@pytest.mark.parametrize("lane", LANES)
def test_each_with_its_own_weight(lane: str) -> None:
    samples = [[3, 5, 11], [2, 7, 4], [6, 6, 6], [1, 2, 5]]
    rounds = pushes()

    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer = job.prepare(model, adam(model))
        for given, weight in zip(rounds, samples, strict=True):
            for gradient, n in zip(given, weight, strict=True):
                job.ctx.weight(n)
                give(model, gradient)
                optimizer.step()
        return {"model": weights(model)}

    model = model_of()
    optimizer = adam(model)
    for given, weight in zip(rounds, samples, strict=True):
        is_equal = len(set(weight)) == 1
        parts = [[g if is_equal else g * n for g in gradient] for gradient, n in zip(given, weight, strict=True)]
        give(model, [summed(each, K if is_equal else sum(weight)) for each in zip(*parts, strict=True)])
        optimizer.step()
    got, _ = run_cluster(recipe, 1, mode="sync", ps=2, lane=lane, replicas_to_aggregate=K, save_every="none")
    assert_same(weights(model), got[0]["model"], "worker 0")


def test_sums_in_another_dtype_than_the_wire() -> None:
    """Gradients come as bfloat16; their sum is kept in float32."""
    rounds = pushes()
    cast = [[[g.bfloat16().float() for g in gradient] for gradient in given] for given in rounds]
    options: dict[str, Any] = {"replicas_to_aggregate": K, "save_every": "none", "wire": "bfloat16"}
    got, _ = run_cluster(recipe_of(rounds), 1, mode="sync", ps=2, lane="shm", **options)
    assert_same(reference(cast), got[0]["model"], "worker 0")


# --- the arithmetic of a shard, whoever gave what -------------------------------------------------------------------

NUMEL = (37, 1000, 5)


def shard_of() -> Shard:
    specs = [TensorSpec(str(i), (n,), (1,), "float32", 0) for i, n in enumerate(NUMEL)]
    layout = Layout(tuple(specs))
    rate_of_one = optimizer_spec(SGD([nn.Parameter(torch.zeros(1))], lr=1.0))
    return Shard(layout, place(layout, 1, "bytes"), 0, rate_of_one)


def values(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(n, generator=generator) for n in NUMEL]


def push(shard: Shard, slot: Slot, number: int, weight: float = 0.0, lacks: int | None = None) -> None:
    for piece in shard.pieces:
        flat(slot.memory, "float32", piece.offset, piece.numel).copy_(values(number)[piece.tensor])
    slot.weight = weight
    slot.mask = b"" if lacks is None else bytes([0b111 & ~(1 << lacks)])


def result(shard: Shard) -> list[torch.Tensor]:
    return [-flat(shard.memory, "float32", p.offset, p.numel) for p in shard.pieces]


def test_sums_and_slots_of_two_workers() -> None:
    shard = shard_of()
    first, second = shard.new_slot(), shard.new_slot()
    push(shard, first, 0)
    shard.add_up(first, is_first=True)
    push(shard, first, 1)
    shard.add_up(first, is_first=False)
    push(shard, first, 2)
    push(shard, second, 3)
    shard.add_up(second, is_first=True)
    shard.apply([(first, True, True), (second, True, False)])
    a, b, c, d = (values(n) for n in range(4))
    assert_same([(((a[i] + b[i]) + c[i]) + d[i]) / 4 for i in range(3)], result(shard), "mean")


@pytest.mark.parametrize("silent", [0, 1])
def test_a_weighted_sum_beside_somebody_of_unknown_weight(silent: int) -> None:
    """The one who knows has multiplied already; its mean counts as its two gradients, and nobody is weighted."""
    shard = shard_of()
    slots = [shard.new_slot(), shard.new_slot()]
    knows = slots[1 - silent]
    push(shard, knows, 0, weight=2)
    shard.add_up(knows, is_first=True)
    push(shard, knows, 1, weight=6)
    shard.add_up(knows, is_first=False)
    push(shard, slots[silent], 2)
    parts = [(knows, True, False), (slots[silent], False, True)]
    shard.apply(parts if silent else parts[::-1])
    a, b, c = (values(n) for n in range(3))
    for i, got in enumerate(result(shard)):
        assert torch.allclose((2 * (2 * a[i] + 6 * b[i]) / 8 + c[i]) / 3, got, atol=1e-6)


@pytest.mark.parametrize("weights_of", [(0, 5), (5, 0), (0, 5, 7), (5, 7, 0)])
def test_one_worker_that_knows_its_weight_only_sometimes(weights_of: tuple[float, ...]) -> None:
    """No gradient is lost, and none counts five times."""
    shard = shard_of()
    slot = shard.new_slot()
    for number, weight in enumerate(weights_of):
        push(shard, slot, number, weight)
        shard.add_up(slot, is_first=number == 0)
    shard.apply([(slot, True, False)])
    parts = [values(n) for n in range(len(weights_of))]
    means = [summed(each, len(weights_of)) for each in zip(*parts, strict=True)]
    if weights_of == (5, 7, 0):
        means = [(2 * (5 * a + 7 * b) / 12 + c) / 3 for a, b, c in zip(*parts, strict=True)]
    for want, got in zip(means, result(shard), strict=True):
        assert torch.allclose(want, got, atol=1e-6)


def test_gaps_in_a_sum_beside_gaps_in_a_slot() -> None:
    """Bytes of an older gradient lie where a push has none; they are in no sum."""
    shard = shard_of()
    first, second = shard.new_slot(), shard.new_slot()
    push(shard, first, 0, lacks=1)
    shard.add_up(first, is_first=True)
    push(shard, first, 1, lacks=1)
    shard.add_up(first, is_first=False)
    push(shard, second, 2, lacks=2)
    shard.apply([(first, True, False), (second, False, True)])
    a, b, c = (values(n) for n in range(3))
    want = [((a[0] + b[0]) + c[0]) / 3, c[1] / 3, (a[2] + b[2]) / 3]
    assert_same(want, result(shard), "mean")
