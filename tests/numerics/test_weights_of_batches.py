"""The weight of a push is the number of samples of the batches that are in its gradient, whatever the loop does.

The model has one weight, and the gradient of worker w is w + 1, so a round with n0 and n1 samples moves the weight by
(n0 + 2 n1) / (n0 + n1). Worker 1 trains plainly; worker 0 runs the loop of the case. Batches differ in size.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import pytest
import torch
from alike import Job, run_cluster
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

Steps = list[float]
SIZES = [8, 5, 7, 2, 6, 4]
OTHER = [3, 9, 1, 4, 4, 8]  # worker 1's


class Ones(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.ones(len(index), 1) if isinstance(index, list) else torch.ones(1)


def loader_of(sizes: Sequence[int], **options: Any) -> DataLoader[Any]:
    return DataLoader(Ones(), batch_sampler=[list(range(n)) for n in sizes], **options)


def one_weight() -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


class Loop:
    """What a loop has; `bad` is the number of the batch that something is wrong with."""

    bad = 2

    def __init__(self, job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> None:
        self.job, self.model, self.optimizer, self.loader = job, model, optimizer, loader
        self.steps: Steps = []
        self.before = 0.0

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(x).mean() * (self.job.index + 1)
        return loss

    def value(self) -> float:
        return sum(p.detach().sum().item() for p in self.model.parameters())

    def step(self) -> None:
        self.optimizer.step()
        self.moved()

    def moved(self) -> None:
        self.steps.append(self.before - self.value())
        self.before = self.value()

    def plain(self) -> None:
        for x in self.loader:
            self.optimizer.zero_grad()
            self.loss(x).backward()
            self.step()


def trained(
    loop: Callable[[Loop], None],
    loaders: Sequence[Callable[[], DataLoader[Any]]] = (lambda: loader_of(SIZES), lambda: loader_of(OTHER)),
    make: Callable[[], nn.Module] = one_weight,
    **options: Any,
) -> tuple[Steps, list[str]]:
    """Run `loop` on worker 0 and a plain one on worker 1; return how each step has moved the weight, as worker 1 has
    seen it, and what worker 0 has said about weights."""
    said: list[str] = []

    def recipe(job: Job) -> dict[str, Any]:
        if job.index == 0:
            job.ctx._session.say = said.append
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        prepared = job.prepare(model, optimizer, loaders[job.index](), shard=False)
        own = Loop(job, *prepared)
        (loop if job.index == 0 else Loop.plain)(own)
        return {"steps": own.steps}

    got, _ = run_cluster(recipe, 2, **{"mode": "sync", "save_every": "none", **options})
    return got[1]["steps"], [line for line in said if "ctx.weight(n)" in line]


def wanted(first: Sequence[int], second: Sequence[int] = OTHER) -> Steps:
    """The steps of rounds in which the two workers push gradients of so many samples."""
    rounds = zip_longest(first, second, fillvalue=0)
    return [(a + 2 * b) / (a + b) for a, b in rounds]


def check(loop: Callable[[Loop], None], pushes: Sequence[int], **options: Any) -> None:
    want = wanted(pushes)
    assert len(want) == len(OTHER)
    got, said = trained(loop, **options)
    assert not said
    assert got == pytest.approx(want, abs=1e-5)


WITHOUT_BAD = [8, 5, 2, 6, 4]


# --- steps that are left out ----------------------------------------------------------------------------------------


def clear_none(loop: Loop) -> None:
    loop.optimizer.zero_grad()


def clear_zeros(loop: Loop) -> None:
    loop.optimizer.zero_grad(set_to_none=False)


def clear_model(loop: Loop) -> None:
    loop.model.zero_grad()


def clear_model_zeros(loop: Loop) -> None:
    loop.model.zero_grad(set_to_none=False)


def clear_by_hand(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        parameter.grad = None


def clear_in_place(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()


CLEARS = [clear_none, clear_zeros, clear_model, clear_model_zeros, clear_by_hand, clear_in_place]


@pytest.mark.parametrize("clear", CLEARS)
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("has_backward", [True, False])
def test_a_batch_whose_step_is_left_out_does_not_count(
    clear: Callable[[Loop], None], is_before: bool, has_backward: bool
) -> None:
    """Gradients are cleared before the next batch is taken, or after; the bad batch has a backward pass or none."""

    def loop(own: Loop) -> None:
        for number, x in enumerate(own.loader):
            if not is_before:
                clear(own)
            if number != own.bad or has_backward:
                own.loss(x).backward()
            if number != own.bad:
                own.step()
            if is_before:
                clear(own)

    check(loop, WITHOUT_BAD)


def test_the_first_batch_of_a_pass_may_be_left_out() -> None:
    def loop(own: Loop) -> None:
        for number, x in enumerate(own.loader):
            own.optimizer.zero_grad()
            if number == 0:
                continue
            own.loss(x).backward()
            own.step()

    check(loop, SIZES[1:])


def test_a_grad_scaler_that_skips_a_step() -> None:
    def loop(own: Loop) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number, x in enumerate(own.loader):
            own.optimizer.zero_grad()
            scaler.scale(own.loss(x) * (float("inf") if number == own.bad else 1.0)).backward()
            scaler.unscale_(own.optimizer)
            nn.utils.clip_grad_norm_(own.model.parameters(), 10.0)
            scaler.step(own.optimizer)
            if number != own.bad:
                own.moved()
            scaler.update()

    check(loop, WITHOUT_BAD)


# --- several batches, several passes --------------------------------------------------------------------------------


def test_accumulated_batches_count_together_and_a_bad_one_among_them_does_not() -> None:
    """Pairs of batches; of the second pair only one is accumulated."""

    def loop(own: Loop) -> None:
        for number, x in enumerate(own.loader):
            if number != 3:
                (own.loss(x) / (1 if number == 2 else 2)).backward()
                nn.utils.clip_grad_norm_(own.model.parameters(), 10.0)
            if number % 2:
                own.step()
                own.optimizer.zero_grad()

    check(loop, [13, 7, 10])


def test_several_backward_passes_of_one_batch_count_once() -> None:
    def loop(own: Loop) -> None:
        for x in own.loader:
            own.optimizer.zero_grad()
            (own.loss(x) / 2).backward()
            (own.loss(x) / 2).backward()
            own.step()

    check(loop, SIZES)


def test_several_steps_of_one_batch_count_it_each_time() -> None:
    def loop(own: Loop) -> None:
        for number, x in enumerate(own.loader):
            for _ in range(2 if number == 1 else 1):
                own.optimizer.zero_grad()
                own.loss(x).backward()
                own.step()
            if number == 4:
                break

    check(loop, [8, 5, 5, 7, 2, 6])


def test_gradients_of_the_rest_of_a_pass_count_in_the_next() -> None:
    def loop(own: Loop) -> None:
        own.optimizer.zero_grad()
        count = 0
        for _ in range(2):
            for x in own.loader:
                (own.loss(x) / 4).backward()
                count += 1
                if count % 4 == 0:
                    own.step()
                    own.optimizer.zero_grad()

    check(loop, [22, 23, 19])


def test_a_step_without_a_gradient_weighs_what_the_last_one_did() -> None:
    """As in the mean over processes: it adds nothing, and is counted."""

    def loop(own: Loop) -> None:
        for number, x in enumerate(own.loader):
            own.optimizer.zero_grad()
            if number != own.bad:
                own.loss(x).backward()
            own.step()

    want = wanted([8, 5, 5, 2, 6, 4])
    want[2] = 2 * OTHER[2] / (5 + OTHER[2])
    got, _ = trained(loop)
    assert got == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("at", ["before the backward pass", "before the step"])
def test_an_evaluation_with_the_same_loader_does_not_count(at: str) -> None:
    def loop(own: Loop) -> None:
        for x in own.loader:
            own.optimizer.zero_grad()
            loss = own.loss(x)
            if at == "before the step":
                loss.backward()
            with torch.no_grad():
                assert len([own.loss(each) for each in own.loader]) == len(SIZES)
            if at == "before the backward pass":
                loss.backward()
            own.step()

    check(loop, SIZES)


# --- batches that are taken ahead -----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("asks_on", [True, False])
def test_a_loop_that_takes_batches_ahead(depth: int, asks_on: bool) -> None:
    """Two passes. At their ends some loops ask for one more batch again and again, others once."""

    def ahead(loader: DataLoader[Any]) -> Iterator[torch.Tensor]:
        batches, held = iter(loader), []
        is_over = False
        while not is_over or held:
            while len(held) <= depth and not is_over:
                batch = next(batches, None)
                is_over = batch is None
                held += [] if batch is None else [batch]
            if asks_on:
                is_over = False
            if held:
                yield held.pop(0)
            elif asks_on:
                return

    def loop(own: Loop) -> None:
        for _ in range(2):
            for x in ahead(own.loader):
                own.optimizer.zero_grad()
                own.loss(x).backward()
                own.step()

    loaders = [lambda: loader_of(SIZES), lambda: loader_of(OTHER * 2)]
    got, _ = trained(loop, loaders)
    assert got == pytest.approx(wanted(SIZES * 2, OTHER * 2), abs=1e-5)


def test_batches_taken_ahead_that_are_moved_elsewhere_weigh_the_same_and_that_is_said() -> None:
    """Nothing says then whether the first batch of the pass was left out or is trained later."""

    def loop(own: Loop) -> None:
        held: list[torch.Tensor] = []
        for x in own.loader:
            held.append(x.clone())  # as to an accelerator
            del x
            if len(held) == 2:
                own.optimizer.zero_grad()
                own.loss(held.pop(0)).backward()
                own.step()

    got, said = trained(loop)
    assert got[:5] == pytest.approx([1.5] * 5, abs=1e-5)
    assert len(said) == 1


def test_gradients_that_the_script_assigns_weigh_the_same_and_that_is_said() -> None:
    def loop(own: Loop) -> None:
        for x in own.loader:
            parameters = list(own.model.parameters())
            for parameter, gradient in zip(parameters, torch.autograd.grad(own.loss(x), parameters), strict=True):
                parameter.grad = gradient
            own.step()

    got, said = trained(loop)
    assert got == pytest.approx([1.5] * 6, abs=1e-5)
    assert len(said) == 1


def test_gradients_that_the_script_assigns_have_the_weight_that_it_says() -> None:
    def loop(own: Loop) -> None:
        for x in own.loader:
            own.job.ctx.weight(len(x))
            own.model.weight.grad = torch.autograd.grad(own.loss(x), own.model.weight)[0]
            own.step()

    check(loop, SIZES)


# --- models ---------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """One parameter in two places, used through checkpointed activations, beside a layer that is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = one_weight(), one_weight()
        self.second.weight = self.first.weight
        self.frozen = one_weight().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        both = checkpoint(self.first, x, use_reentrant=True) + checkpoint(self.second, x, use_reentrant=False)
        return (both / 2) + self.frozen(x)  # type: ignore[no-any-return]


def test_tied_frozen_hooked_and_checkpointed_parameters() -> None:
    def loop(own: Loop) -> None:
        own.model.first.weight.register_hook(lambda gradient: gradient * 1.0)
        own.model.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        for number, x in enumerate(own.loader):
            own.optimizer.zero_grad()
            own.loss(x).backward()
            if number != own.bad:
                own.step()

    check(loop, WITHOUT_BAD, make=Tied)


def test_a_parameter_that_is_thawed_later_counts_too() -> None:
    def loop(own: Loop) -> None:
        for x in own.loader:
            own.optimizer.zero_grad()
            if len(own.steps) == 3:
                own.model.first.weight.requires_grad_(False)
                own.model.frozen.weight.requires_grad_(True)
            own.loss(x).backward()
            own.step()

    check(loop, SIZES, make=Tied)


def test_a_compiled_model() -> None:
    def loop(own: Loop) -> None:
        compiled = torch.compile(own.model, backend="aot_eager")
        for number, x in enumerate(own.loader):
            own.optimizer.zero_grad()
            (compiled(x).mean() * 1).backward()
            if number != own.bad:
                own.step()

    check(loop, WITHOUT_BAD)


def test_a_copy_of_the_model_has_no_hooks_of_ours() -> None:
    def loop(own: Loop) -> None:
        for number, x in enumerate(own.loader):
            if number == 1:
                other = copy.deepcopy(own.model)
            if number >= 1:
                other(x).mean().backward()
            if number == own.bad:
                continue
            own.optimizer.zero_grad()
            own.loss(x).backward()
            own.step()

    check(loop, WITHOUT_BAD)


# --- loaders --------------------------------------------------------------------------------------------------------


def time_first(samples: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence([each.expand(9 + len(samples) % 2, 1) for each in samples])


class Upward(BatchSampler):
    """Batches of 1, 2, 3, ... samples."""

    def __init__(self) -> None:
        super().__init__(SequentialSampler(range(100)), 1, False)

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(n)) for n in range(1, 7)])

    def __len__(self) -> int:
        return 6


LOADERS: dict[str, tuple[Callable[[], DataLoader[Any]], list[int]]] = {
    "time first": (lambda: loader_of(SIZES, collate_fn=time_first), SIZES),
    "text and no tensor": (lambda: loader_of(SIZES, collate_fn=lambda samples: ["text"] * 3), SIZES),
    "a smaller batch at the end": (lambda: DataLoader(Ones(), batch_size=19), [19, 19, 19, 19, 19, 5]),
    "own batch sampler": (lambda: DataLoader(Ones(), batch_sampler=Upward()), [1, 2, 3, 4, 5, 6]),
    "lists of indices": (lambda: DataLoader(Ones(), sampler=Upward(), batch_size=None), [1, 2, 3, 4, 5, 6]),
    "a process that loads": (lambda: loader_of(SIZES, num_workers=1, collate_fn=time_first), SIZES),
    "two processes that load": (lambda: loader_of(SIZES, num_workers=2, prefetch_factor=2), SIZES),
}


def without_bad(own: Loop) -> None:
    for number, x in enumerate(own.loader):
        own.optimizer.zero_grad()
        if number != own.bad:
            own.loss(x if isinstance(x, torch.Tensor) else torch.ones(1, 1)).backward()
            own.step()


@pytest.mark.parametrize("kind", LOADERS)
def test_samples_are_counted_by_the_indices_of_the_sampler(kind: str) -> None:
    make, sizes = LOADERS[kind]
    got, _ = trained(without_bad, [make, lambda: loader_of(OTHER)])
    assert got == pytest.approx(wanted(sizes[:2] + sizes[3:]), abs=1e-5)


def test_processes_that_stay_between_passes() -> None:
    """The first pass is left early, with batches loaded that are never given."""

    def loop(own: Loop) -> None:
        for number, x in enumerate(own.loader):
            own.optimizer.zero_grad()
            own.loss(x).backward()
            own.step()
            if number == 1:
                break
        without_bad(own)

    loaders = [lambda: loader_of(SIZES, num_workers=2, persistent_workers=True), lambda: loader_of([*OTHER, 5])]
    got, _ = trained(loop, loaders)
    assert got == pytest.approx(wanted([8, 5, *WITHOUT_BAD], [*OTHER, 5]), abs=1e-5)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(35, 1))


class Backwards(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(list(super().__iter__())[::-1])


UNCOUNTED: dict[str, Callable[[], DataLoader[Any]]] = {
    "a stream": lambda: DataLoader(Stream(), batch_size=6),
    "one by one": lambda: DataLoader(Ones(), sampler=range(6), batch_size=None),
    "in any order": lambda: loader_of(SIZES, num_workers=2, in_order=False),
    "an iterator of its own": lambda: Backwards(Ones(), batch_sampler=[list(range(n)) for n in SIZES]),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] * (kind in ("in any order", "an iterator of its own")))
        for kind in UNCOUNTED
    ],
)
def test_where_no_index_counts_samples_gradients_weigh_the_same_and_that_is_said(kind: str) -> None:
    got, said = trained(Loop.plain, [UNCOUNTED[kind], lambda: loader_of(OTHER)])
    assert got == pytest.approx([1.5] * 6, abs=1e-5)
    assert len(said) == 1


# --- modes ----------------------------------------------------------------------------------------------------------


def test_a_delta_weighs_the_samples_of_the_steps_that_were_made() -> None:
    """Mode local: worker 0 leaves out a step, so that its first two exchanges are of batches 8, 5 and 2, 6."""

    def recipe(job: Job) -> dict[str, Any]:
        model = one_weight()
        loader = loader_of(SIZES if job.index == 0 else OTHER)
        prepared = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader, shard=False)
        own = Loop(job, *prepared)
        for number, x in enumerate(own.loader):
            own.optimizer.zero_grad()
            own.loss(x).backward()
            if job.index or number != own.bad:
                own.optimizer.step()
                if len(own.steps) % 2:
                    own.moved()
                else:
                    own.steps.append(0.0)
        return {"steps": own.steps[1::2]}

    got, _ = run_cluster(recipe, 2, mode="local", local_steps=2, outer_lr=1.0, outer_momentum=0.0, save_every="none")
    want = wanted([13, 8], [12, 5])
    assert got[0]["steps"][:2] == pytest.approx([2 * each for each in want], abs=1e-5)


def test_a_step_that_a_fused_optimizer_skips_is_not_in_the_delta() -> None:
    """Mode local: there a GradScaler lets the optimizer look for overflows by itself."""

    def recipe(job: Job) -> dict[str, Any]:
        model = one_weight()
        loader = loader_of(SIZES if job.index == 0 else OTHER)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
        own = Loop(job, *job.prepare(model, optimizer, loader, shard=False))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number, x in enumerate(own.loader):
            own.optimizer.zero_grad()
            scaler.scale(own.loss(x) * (float("inf") if (number, job.index) == (1, 0) else 1.0)).backward()
            scaler.step(own.optimizer)
            scaler.update()
            own.moved()
        return {"moved": own.steps[0] + own.steps[1]}

    got, _ = run_cluster(recipe, 2, mode="local", local_steps=2, outer_lr=1.0, outer_momentum=0.0, save_every="none")
    assert got[0]["moved"] == pytest.approx((8 * 1 + 12 * 4) / 20, abs=1e-5)


def test_workers_that_may_come_and_go() -> None:
    check(without_bad, WITHOUT_BAD, started_workers=2)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_one_worker_counts_nothing(mode: str) -> None:
    def recipe(job: Job) -> dict[str, Any]:
        model = one_weight()
        loader = loader_of(SIZES)
        prepared = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
        Loop(job, *prepared).plain()
        return {"samples": job.ctx._session.training_step.samples, "indices": "_index_sampler" in vars(type(loader))}

    got, _ = run_cluster(recipe, 1, mode=mode, save_every="none")
    assert got == [{"samples": None, "indices": False}]
