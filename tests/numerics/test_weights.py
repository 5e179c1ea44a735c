"""Unequal workers: a mean weighted by samples. Bit for bit one process on (n0 g0 + n1 g1 + …) / (n0 + n1 + …).

Every product is rounded before it is added, in worker order. Equal weights take the unweighted formula of I4, and so
does a round in which somebody does not know how many samples it has.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from alike import Job, Returned, assert_same, run_cluster, weights
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, TensorDataset
from toy import LANES, Gradient, batch, drawn, give, gradients, model_of

import paceline
from paceline.errors import TrainingFailed, UsageError

pytestmark = pytest.mark.filterwarnings("error")

STEPS = 4
SIZES = (10, 20, 70)


def weighted(parts: Sequence[torch.Tensor | None], samples: Sequence[float]) -> torch.Tensor | None:
    """(n0 g0 + n1 g1 + …) / (n0 + n1 + …); who has no gradient adds nothing, and its samples count."""
    products = [part * n for part, n in zip(parts, samples, strict=True) if part is not None]
    if not products:
        return None
    total = products[0]
    for product in products[1:]:
        total = total + product
    return total / sum(samples)


def unweighted(parts: Sequence[torch.Tensor | None], samples: Sequence[float]) -> torch.Tensor | None:
    present = [part for part in parts if part is not None]
    total = present[0]
    for part in present[1:]:
        total = total + part
    return total / len(parts)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return Adam(model.parameters(), lr=0.01)


def reference(
    rounds: Sequence[Sequence[tuple[Callable[[nn.Module], Gradient], float]]],
    mean: Callable[..., torch.Tensor | None] = weighted,
    make: Callable[[nn.Module], torch.optim.Optimizer] = adam,
) -> dict[str, torch.Tensor]:
    """One process. A round is a list, a worker each: how to take its gradient, and of how many samples it is."""
    model = model_of()
    optimizer = make(model)
    for given in rounds:
        taken = [[None if g is None else g.clone() for g in take(model)] for take, _ in given]
        give(model, [mean(parts, [n for _, n in given]) for parts in zip(*taken, strict=True)])
        optimizer.step()
    return weights(model)


def of(x: torch.Tensor) -> Callable[[nn.Module], Gradient]:
    return lambda model: gradients(model, x)


def batches(sizes: Sequence[int] = SIZES, steps: int = STEPS) -> list[list[tuple[Callable[..., Gradient], float]]]:
    return [[(of(batch(w, step, size)), size) for w, size in enumerate(sizes)] for step in range(steps)]


def same_everywhere(want: dict[str, torch.Tensor], recipe: Any, workers: int = 3, **options: Any) -> dict[str, Any]:
    got, summary = run_cluster(recipe, workers, mode=options.pop("mode", "sync"), save_every="none", **options)
    for index, each in enumerate(got):
        assert_same(want, each["model"], f"worker {index}")
    return summary


def loader_of(job: Job, sizes: Sequence[int] = SIZES, steps: int = STEPS) -> DataLoader[Any]:
    size = sizes[job.index]
    x = torch.cat([batch(job.index, step, size) for step in range(steps)])
    return DataLoader(TensorDataset(x), batch_size=size)


def from_the_loader(job: Job) -> Returned:
    model = model_of()
    model, optimizer, loader = job.prepare(model, adam(model), loader_of(job), shard=False)
    for (x,) in loader:
        gradients(model, x)
        optimizer.step()
    return {"model": weights(model)}


def said_once(job: Job) -> Returned:
    model = model_of()
    model, optimizer = job.prepare(model, adam(model))
    job.ctx.weight(SIZES[job.index])
    for step in range(STEPS):
        gradients(model, batch(job.index, step, SIZES[job.index]))
        optimizer.step()
    return {"model": weights(model)}


CASES = [(1, "inproc"), (2, "inproc"), (1, "shm"), (3, "shm"), (1, "tcp"), (2, "tcp")]


@pytest.mark.parametrize(("ps", "lane"), CASES)
@pytest.mark.parametrize("recipe", [from_the_loader, said_once])
def test_batches_of_10_20_and_70(recipe: Callable[[Job], Returned], ps: int, lane: str) -> None:
    want = reference(batches())
    assert not torch.equal(want["0.weight"], reference(batches(), unweighted)["0.weight"])
    same_everywhere(want, recipe, ps=ps, lane=lane)


@pytest.mark.parametrize("lane", LANES)
def test_they_are_nearly_one_batch_of_100(lane: str) -> None:
    """Within 1e-6 of one process on all samples together: nearly, because its sums have another order (traps 13)."""

    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer, loader = job.prepare(model, SGD(model.parameters(), lr=0.1), loader_of(job), shard=False)
        for (x,) in loader:
            gradients(model, x)
            optimizer.step()
        return {"model": weights(model)}

    whole = model_of()
    optimizer = SGD(whole.parameters(), lr=0.1)
    for step in range(STEPS):
        gradients(whole, torch.cat([batch(w, step, size) for w, size in enumerate(SIZES)]))
        optimizer.step()
    got, _ = run_cluster(recipe, 3, mode="sync", ps=2, lane=lane, save_every="none")
    for name, value in whole.state_dict().items():
        assert torch.allclose(value, got[0]["model"][name], rtol=0, atol=1e-6), name


def test_equal_weights_take_the_unweighted_formula() -> None:
    """(7 g0 + 7 g1 + 7 g2) / 21 would be other bits."""
    equal = batches((7, 7, 7))
    want = reference(equal, unweighted)
    assert not torch.equal(want["0.weight"], reference(equal)["0.weight"])

    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer, loader = job.prepare(model, adam(model), loader_of(job, (7, 7, 7)), shard=False)
        for (x,) in loader:
            gradients(model, x)
            optimizer.step()
        return {"model": weights(model)}

    same_everywhere(want, recipe, ps=2)


@pytest.mark.parametrize("lane", LANES)
def test_a_smaller_batch_at_the_end(lane: str) -> None:
    """25 samples in batches of 10 for two workers: 10 and 10, then 5 and (wrapped around) 10; two epochs."""
    x = torch.cat([batch(0, step) for step in range(5)])
    full = [x[:10], x[10:20], x[20:]]
    epoch = [[(of(full[0]), 10), (of(full[1]), 10)], [(of(full[2]), 5), (of(full[0]), 10)]]
    want = reference(epoch * 2, lambda parts, n: (weighted if n[0] != n[1] else unweighted)(parts, n))

    def recipe(job: Job) -> Returned:
        model = model_of()
        loader = DataLoader(TensorDataset(x), batch_size=10)
        loader, model, optimizer = job.prepare(loader, model, adam(model))
        for _ in range(2):
            for (part,) in loader:
                gradients(model, part)
                optimizer.step()
        return {"model": weights(model)}

    same_everywhere(want, recipe, 2, ps=2, lane=lane)


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_if_one_does_not_know_its_weight_nobody_is_weighted(silent: int) -> None:
    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer = job.prepare(model, adam(model))
        if job.index != silent:
            job.ctx.weight(SIZES[job.index])
        for step in range(STEPS):
            gradients(model, batch(job.index, step, SIZES[job.index]))
            optimizer.step()
        return {"model": weights(model)}

    same_everywhere(reference(batches(), unweighted), recipe, ps=2)


def test_a_weight_said_before_prepare_counts() -> None:
    def recipe(job: Job) -> Returned:
        job.ctx.weight(SIZES[job.index])
        model = model_of()
        model, optimizer = job.prepare(model, adam(model))
        for step in range(STEPS):
            gradients(model, batch(job.index, step, SIZES[job.index]))
            optimizer.step()
        return {"model": weights(model)}

    same_everywhere(reference(batches()), recipe, ps=1)


def test_what_the_script_says_goes_before_what_the_loader_gave() -> None:
    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer, loader = job.prepare(model, adam(model), loader_of(job), shard=False)
        for (x,) in loader:
            job.ctx.weight(2.5 if job.index == 1 else 1)
            gradients(model, x)
            optimizer.step()
        return {"model": weights(model)}

    rounds = [[(take, 2.5 if w == 1 else 1) for w, (take, _) in enumerate(each)] for each in batches()]
    same_everywhere(reference(rounds), recipe, ps=2)


def test_a_weight_may_change_with_every_step() -> None:
    def samples(worker: int, step: int) -> int:
        return 1 + (3 * worker + 5 * step) % 7

    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer = job.prepare(model, adam(model))
        for step in range(8):
            job.ctx.weight(samples(job.index, step))
            gradients(model, batch(job.index, step))
            optimizer.step()
        return {"model": weights(model)}

    rounds = [[(of(batch(w, step)), samples(w, step)) for w in range(2)] for step in range(8)]
    assert all(a != b for (_, a), (_, b) in rounds)
    same_everywhere(reference(rounds), recipe, 2, ps=2, lane="tcp")


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("ps", [1, 2])
def test_no_gradient_on_one_worker(ps: int, lane: str) -> None:
    """It adds nothing to that tensor, and its samples count; where nobody has a gradient, nothing moves."""

    def without(worker: int, gradient: Gradient) -> Gradient:
        gradient = list(gradient)
        gradient[5] = None  # nobody has this one
        if worker == 1:
            gradient[0] = None
        if worker != 2:
            gradient[3] = None
        return gradient

    def take(worker: int, step: int) -> Callable[[nn.Module], Gradient]:
        return lambda model: without(worker, gradients(model, batch(worker, step, SIZES[worker])))

    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer = job.prepare(model, adam(model))
        job.ctx.weight(SIZES[job.index])
        for step in range(STEPS):
            give(model, take(job.index, step)(model))
            optimizer.step()
        return {"model": weights(model)}

    want = reference([[(take(w, step), SIZES[w]) for w in range(3)] for step in range(STEPS)])
    assert torch.equal(want["4.bias"], model_of().state_dict()["4.bias"])
    same_everywhere(want, recipe, ps=ps, lane=lane)


def test_accumulation_over_two_batches_counts_both() -> None:
    """Worker 0 steps after two batches of 4, worker 1 after one of 5."""

    def both(step: int) -> Callable[[nn.Module], Gradient]:
        def take(model: nn.Module) -> Gradient:
            model.zero_grad()
            for number in (0, 1):
                (model(batch(0, 2 * step + number, 4)).square().mean() / 2).backward()
            return [p.grad for p in model.parameters()]

        return take

    def recipe(job: Job) -> Returned:
        model = model_of()
        size = 4 if job.index == 0 else 5
        x = torch.cat([batch(job.index, step, size) for step in range(8 if job.index == 0 else 4)])
        loader = DataLoader(TensorDataset(x), batch_size=size)
        model, optimizer, loader = job.prepare(model, adam(model), loader, shard=False)
        for number, (part,) in enumerate(loader):
            if job.index == 1:
                gradients(model, part)
                optimizer.step()
                continue
            if number % 2 == 0:
                optimizer.zero_grad()
            (model(part).square().mean() / 2).backward()
            if number % 2:
                optimizer.step()
        return {"model": weights(model)}

    rounds = [[(both(step), 8), (of(batch(1, step, 5)), 5)] for step in range(4)]
    same_everywhere(reference(rounds), recipe, 2, ps=2)


@pytest.mark.parametrize("how", ["the same loader", "a second loader", "a loader prepared before"])
def test_what_the_chief_evaluates_is_not_in_its_push(how: str) -> None:
    """Only batches that train count: an evaluation's are taken without gradients, or from another loader."""

    def recipe(job: Job) -> Returned:
        model = model_of()
        test = DataLoader(TensorDataset(batch(9, 9, 50)), batch_size=25)
        if how == "a loader prepared before":
            test = job.prepare(test, shard=False)
        model, optimizer, loader = job.prepare(model, adam(model), loader_of(job), shard=False)
        if how == "a second loader":
            test = job.prepare(test, shard=False)
        for (x,) in loader:
            gradients(model, x)
            if job.index == 0:
                with torch.set_grad_enabled(how != "the same loader"):
                    seen = [model(part) for (part,) in (loader if how == "the same loader" else test)]
                assert len(seen) in (STEPS, 2)
            optimizer.step()
        return {"model": weights(model)}

    same_everywhere(reference(batches()), recipe, ps=2)


def test_a_batch_that_is_only_looked_at_is_in_no_push() -> None:
    """next(iter(loader)) for the shapes, and a loop that ends one batch too late."""

    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer, loader = job.prepare(model, adam(model), loader_of(job), shard=False)
        for _ in range(2):
            if job.index == 0:
                next(iter(loader))
            for number, (x,) in enumerate(loader):
                if number == 2:
                    break
                gradients(model, x)
                optimizer.step()
        return {"model": weights(model)}

    same_everywhere(reference(batches(steps=2) * 2), recipe, ps=2)


def test_after_a_gradient_that_is_not_finite_the_weights_still_hold() -> None:
    """Only ps:0 hears of that push; the other ps must not keep an old weight."""
    sizes = [(3, 11, 5), (4, 4, 6), (4, 4, 6), (7, 2, 9)]  # round 1: worker 1 has 4 from now on, in a bad push

    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer = job.prepare(model, adam(model))
        for step, size in enumerate(sizes):
            job.ctx.weight(size[job.index])
            gradients(model, batch(job.index, step))
            if (step, job.index) == (1, 1):
                model[4].bias.grad[0] = float("nan")
            optimizer.step()
        return {"model": weights(model)}

    rounds = [[(of(batch(w, step)), size[w]) for w in range(3)] for step, size in enumerate(sizes)]
    del rounds[1][1]
    with pytest.warns(UserWarning, match=r"worker:1: step 2 discarded, gradient not finite in 4\.bias$"):
        summary = same_everywhere(reference(rounds), recipe, ps=3, lane="tcp")
    assert summary["workers"][1]["discarded"] == 1


def test_deltas_of_local_steps_are_weighted_by_all_their_samples() -> None:
    def trained(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, steps: range) -> None:
        for step in steps:
            gradients(model, batch(worker, step, (3, 8)[worker]))
            optimizer.step()

    def recipe(job: Job) -> Returned:
        model = model_of()
        loader = loader_of(job, (3, 8))
        model, optimizer, loader = job.prepare(model, SGD(model.parameters(), lr=0.05), loader, shard=False)
        for (x,) in loader:
            gradients(model, x)
            optimizer.step()
        return {"model": weights(model)}

    def take(worker: int, exchange: int) -> Callable[[nn.Module], Gradient]:
        def delta(model: nn.Module) -> Gradient:
            own = model_of()
            own.load_state_dict(model.state_dict())
            trained(own, SGD(own.parameters(), lr=0.05), worker, range(2 * exchange, 2 * exchange + 2))
            return [w.detach() - v.detach() for w, v in zip(model.parameters(), own.parameters(), strict=True)]

        return delta

    rounds = [[(take(0, exchange), 6), (take(1, exchange), 16)] for exchange in range(2)]
    want = reference(rounds, make=lambda model: SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True))
    same_everywhere(want, recipe, 2, mode="local", local_steps=2, ps=2)


def test_in_async_a_weight_changes_nothing() -> None:
    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer = job.prepare(model, adam(model))
        for step in range(STEPS):
            job.ctx.weight(3 + step)
            give(model, drawn(model, step))
            optimizer.step()
        return {"model": weights(model)}

    want = reference([[((lambda model, step=step: drawn(model, step)), 1)] for step in range(STEPS)], unweighted)
    same_everywhere(want, recipe, 1, mode="async", ps=2)


@pytest.mark.parametrize("samples", [0, -3, float("nan"), float("inf")])
def test_a_weight_is_a_number_above_0(samples: float) -> None:
    def recipe(job: Job) -> Returned:
        model = model_of()
        job.prepare(model, adam(model))
        job.ctx.weight(samples)
        return {}

    with pytest.raises(TrainingFailed, match="a push holds a number of samples above 0"):
        run_cluster(recipe, 1, ps=1)


def test_without_a_cluster_a_weight_is_checked_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    for name in ("TF_CONFIG", "PACELINE_TASK"):
        monkeypatch.delenv(name, raising=False)
    ctx = paceline.init()
    ctx.weight(10)
    with pytest.raises(UsageError, match="above 0"):
        ctx.weight(0)
