"""Towers: several devices equal, bit for bit, one process that averages their gradients in the order of the devices."""

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from alike import assert_same, mean, weights
from ops_cluster import Tasks, tasks
from torch import nn
from torch.optim import SGD, Adam
from toy import batch, gradients, model_of

import paceline
from paceline.errors import ConnectionLost, PacelineError, RemoteOpError, UsageError
from paceline.ingraph.op import op
from paceline.ingraph.towers import towers

pytestmark = pytest.mark.filterwarnings("error")

STEPS = 5
HERE = ("/cpu:0", "/cpu:0")
THERE = ("/job:worker/task:0", "/job:worker/task:1/cpu:0")
MIXED = ("/cpu:0", "/job:worker/task:1")

__all__ = ["tasks"]  # a fixture


@op
def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@op
def odd_model(width: int) -> nn.Module:
    return Odd(width)


class Odd(nn.Module):
    """A user's own class, with a parameter of no layer and one that never gets a gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((37,), 0.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.inner = nn.Linear(37, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x * self.scale)
        return out


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def single(model: nn.Module, optimizer: torch.optim.Optimizer, towers: int, steps: int = STEPS) -> list[Any]:
    """The same arithmetic in one loop: every part's gradient, their mean in order, a step."""
    seen = []
    for step in range(steps):
        given = [[g if g is None else g.clone() for g in gradients(model, batch(t, step))] for t in range(towers)]
        for parameter, *parts in zip(model.parameters(), *given, strict=True):
            parameter.grad = mean(list(parts))
        optimizer.step()
        seen.append(weights(model))
    return seen


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, devices: Sequence[str], **options: Any) -> list[Any]:
    seen = []
    with towers(model, optimizer, devices, **options) as made:
        for step in range(STEPS):
            made.step(squares, [(batch(tower, step),) for tower in range(len(made))])
            seen.append(weights(model))
    return seen


@pytest.mark.parametrize("devices", [HERE, THERE, MIXED, ("/cpu:0",), ("/cpu:0", *THERE)], ids=str)
@pytest.mark.parametrize("make", [momentum, lambda m: Adam(m.parameters(), lr=0.01)], ids=["momentum", "adam"])
def test_equal_the_single_process_bit_for_bit(devices: Sequence[str], make: Any, tasks: Tasks) -> None:
    plain, model = model_of(), model_of()
    assert_same(single(plain, make(plain), len(devices)), trained(model, make(model), devices), "after each step")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype, tasks: Tasks) -> None:
    @op(name=f"test:in_{dtype}")
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x.to(dtype)).square().mean()

    plain, model = model_of(dtype=dtype), model_of(dtype=dtype)
    want = single(plain, momentum(plain), 2)
    with towers(model, momentum(model), MIXED) as both:
        for step in range(STEPS):
            both.step(loss, [(batch(0, step),), (batch(1, step),)])
    assert_same(want[-1], weights(model), "model")


@pytest.mark.parametrize("devices", [HERE, THERE], ids=["here", "there"])
def test_a_class_of_ones_own_and_parameters_without_gradients(devices: Sequence[str], tasks: Tasks) -> None:
    torch.manual_seed(1)
    plain, model = odd_model.fn(5), odd_model.fn(5)
    model.load_state_dict(plain.state_dict())
    got = trained(model, momentum(model), devices, build=partial(odd_model, width=5))
    assert_same(single(plain, momentum(plain), 2), got, "after each step")
    assert model.unused.grad is None


def test_frozen_then_trained(tasks: Tasks) -> None:
    def run(devices: Sequence[str]) -> Any:
        model = model_of()
        model[0].requires_grad_(False)
        with towers(model, momentum(model), devices) as both:
            both.step(squares, [(batch(0, 0),), (batch(1, 0),)])
            assert model[0].weight.grad is None
            model[0].requires_grad_(True)
            both.step(squares, [(batch(0, 1),), (batch(1, 1),)])
            assert model[0].weight.grad is not None
        return weights(model)

    assert_same(run(HERE), run(THERE), "model")


# --- the user's own loop ------------------------------------------------------------------------------------------


def test_backward_leaves_the_mean_in_the_gradients_and_adds_to_what_is_there() -> None:
    model, plain = model_of(), model_of()
    optimizer = momentum(model)
    with towers(model, optimizer, HERE) as both:
        loss = both.backward(squares, [(batch(0, 0),), (batch(1, 0),)])
        want = [mean(list(parts)) for parts in zip(
            *([g.clone() for g in gradients(plain, batch(t, 0))] for t in range(2)), strict=True)]  # fmt: skip
        assert_same(want, [p.grad for p in model.parameters()], "gradients")
        losses = [squares.fn(plain, batch(t, 0)).detach() for t in range(2)]
        assert_same((losses[0] + losses[1]) / 2, loss, "loss")
        both.backward(squares, [(batch(0, 0),), (batch(1, 0),)])
        assert_same([g + g for g in want], [p.grad for p in model.parameters()], "twice")
    assert_same(weights(plain), weights(model), "nothing has stepped")


def test_one_batch_is_split_in_order() -> None:
    model = model_of()
    with towers(model, momentum(model), ["/cpu:0"] * 3) as three:
        parts = three.split((batch(0, 0, 8), torch.arange(8), "a word"))
        assert [part[1].tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7]]
        assert [part[2] for part in parts] == ["a word"] * 3
        assert [part["x"].tolist() for part in three.split({"x": torch.arange(3)})] == [[0], [1], [2]]
        with pytest.raises(UsageError, match="2 samples cannot be cut for 3 towers"):
            three.split((torch.ones(2),))
        with pytest.raises(UsageError, match="tensors of 2, 3 samples"):
            three.split((torch.ones(2), torch.ones(3)))


def test_arrays_and_lists_of_samples_are_cut_too_and_others_refused() -> None:
    model = model_of()
    with towers(model, momentum(model), HERE) as both:
        batch_of_3 = (torch.arange(3), np.arange(6).reshape(3, 2), [7, 8, 9], {"names": ["a", "b", "c"], "rate": 0.5})
        first, second = both.split(batch_of_3)
        assert first[0].tolist() == [0, 1] and first[1].tolist() == [[0, 1], [2, 3]] and first[2] == [7, 8]
        assert second[3] == {"names": ["c"], "rate": 0.5}
        assert [part[0].tolist() for part in both.split((np.arange(2), "a word"))] == [[0], [1]]
        nested = both.split((torch.arange(2), [torch.arange(2), (torch.arange(2), "both")]))
        assert nested[1] == (torch.tensor([1]), [torch.tensor([1]), (torch.tensor([1]), "both")])
        with pytest.raises(UsageError, match=r"a list of 2 beside 3 samples"):
            both.split((torch.arange(3), [0.1, 0.2]))
        with pytest.raises(UsageError, match="2, 3 samples"):
            both.split((torch.arange(3), np.arange(2)))


def test_an_optimizer_that_towers_cannot_step_is_refused() -> None:
    model, other = model_of(), model_of()
    for made in (momentum(other), SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)):
        with pytest.raises(UsageError, match=r"parameter\(s\) that the model does not have"):
            towers(model, made, HERE)
    with pytest.raises(UsageError, match=r"LBFGS computes the loss several times"):
        towers(model, torch.optim.LBFGS(model.parameters()), HERE)


def test_what_a_dataloader_gives_is_not_taken_for_two_batches() -> None:
    """A list of images and labels has two items, as two towers want two batches."""
    model = model_of()
    with towers(model, momentum(model), HERE) as both:
        with pytest.raises(UsageError, match=r"such as \(images, labels\), not a Tensor; towers.split"):
            both.step(squares, [torch.ones(4, 37), torch.ones(4)])
        with pytest.raises(UsageError, match="2 towers take a list of 2 batches, one for each, not 3"):
            both.step(squares, [(torch.ones(4, 37),)] * 3)


def test_buffers_are_those_of_the_first_tower(tasks: Tasks) -> None:
    def run(devices: Sequence[str]) -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(37, 5), nn.BatchNorm1d(5))
        with towers(model, momentum(model), devices) as both:
            for step in range(3):
                both.step(squares, [(batch(0, step),), (batch(1, step),)])
        return weights(model)

    got = run(HERE)
    assert got["1.num_batches_tracked"] == 3
    assert_same(got, run(THERE), "here and there")


def test_evaluation_mode_of_a_part_is_followed(tasks: Tasks) -> None:
    for devices in (HERE, THERE):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(37, 5), nn.Dropout(0.9))
        model[1].eval()
        plain = nn.Sequential(nn.Linear(37, 5), nn.Identity())
        plain.load_state_dict(model.state_dict())
        want = single(plain, momentum(plain), 2, 1)
        with towers(model, momentum(model), devices) as both:
            both.step(squares, [(batch(0, 0),), (batch(1, 0),)])
        assert_same(want[-1], weights(model), str(devices))


# --- averages -----------------------------------------------------------------------------------------------------


def test_ema() -> None:
    plain, model = model_of(), model_of()
    shadow = weights(plain)
    for after in single(plain, momentum(plain), 2):
        shadow = {name: 0.9 * shadow[name] + (1 - 0.9) * after[name] for name in shadow}
    optimizer = momentum(model)
    with towers(model, optimizer, HERE, ema=0.9) as both:
        for step in range(STEPS):
            both.step(squares, [(batch(0, step),), (batch(1, step),)])
        own = weights(model)
        with both.ema(), both.ema():
            assert_same(shadow, weights(model), "inside")
            with pytest.raises(PacelineError, match=r"a step inside towers\.ema\(\)"):
                optimizer.step()
        assert_same(own, weights(model), "after")
        assert_same(shadow, both.averages, "to be saved")


# --- async --------------------------------------------------------------------------------------------------------


def test_async_on_one_device_takes_turns_and_is_one_update_old() -> None:
    """Tower 1 computes from what was there before tower 0's gradient was applied."""
    plain, model = model_of(), model_of()
    reference, before = momentum(plain), [weights(plain), weights(plain)]
    stale = model_of()
    for step in range(6):
        stale.load_state_dict(before[step % 2])
        gradients(stale, batch(0, step))
        for parameter, its in zip(plain.parameters(), stale.parameters(), strict=True):
            parameter.grad = its.grad.clone()
        reference.step()
        before[step % 2] = weights(plain)
    with towers(model, momentum(model), HERE, mode="async") as both:
        told = list(both.train(squares, [(batch(0, step),) for step in range(6)]))
    assert_same(weights(plain), weights(model), "model")
    assert [each.towers for each in told] == [(0,), (1,)] * 3
    assert [each.step for each in told] == [1, 2, 3, 4, 5, 6]
    assert [each.staleness for each in told] == [0, 1, 1, 1, 1, 1]


def test_async_waits_for_nobody(tasks: Tasks) -> None:
    """While tower 0 stands still, tower 1 makes every update; its gradient counts when it comes."""
    gate = threading.Event()

    @op(name="test:gated")
    def gated(model: nn.Module, x: torch.Tensor, waits: bool) -> torch.Tensor:
        if waits:
            assert gate.wait(30)
        return model(x).square().mean()

    model = model_of()
    with towers(model, momentum(model), MIXED, mode="async") as both:
        told = []
        for each in both.train(gated, [(batch(0, step), step == 0) for step in range(6)]):
            told.append(each)
            if each.step == 5:
                gate.set()
    assert [each.towers for each in told] == [(1,)] * 5 + [(0,)]
    assert told[-1].staleness == 5


def test_sync_train_takes_a_batch_for_each_tower() -> None:
    plain, model = model_of(), model_of()
    want = single(plain, momentum(plain), 2)
    with towers(model, momentum(model), HERE) as both:
        told = list(both.train(squares, [(batch(n % 2, n // 2),) for n in range(2 * STEPS)]))
        assert [each.step for each in told] == [1, 2, 3, 4, 5]
        assert_same(want[-1], weights(model), "model")
        assert [each.towers for each in both.train(squares, [(batch(0, 9),)] * 3)] == [(0, 1), (0,)]


def test_a_loop_that_is_left_leaves_nobody_computing(tasks: Tasks) -> None:
    model = model_of()
    with towers(model, momentum(model), THERE, mode="async") as both:
        for each in both.train(squares, ((batch(0, step),) for step in range(100))):
            if each.step == 4:
                break
        before = weights(model)
        assert next(iter(both.train(squares, [(batch(0, 0),)]))).step == 5
        assert not torch.equal(before["0.weight"], model[0].weight)


def test_backward_is_for_sync() -> None:
    model = model_of()
    with (
        towers(model, momentum(model), HERE, mode="async") as both,
        pytest.raises(UsageError, match="no two gradients meet"),
    ):
        both.backward(squares, [(batch(0, 0),), (batch(1, 0),)])


# --- on the ps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["prepared first", "towers first"])
def test_with_a_prepared_optimizer_the_variables_are_on_the_ps(order: str) -> None:
    seen: list[Any] = []

    def train() -> None:
        torch.set_num_threads(1)
        ctx = paceline.init()
        model = model_of()
        optimizer = momentum(model)
        if order == "prepared first":
            model, optimizer = ctx.prepare(model, optimizer)
        both = towers(model, optimizer, HERE)
        if order == "towers first":
            model, optimizer = ctx.prepare(model, optimizer)
        for step in range(STEPS):
            both.step(squares, [(batch(0, step),), (batch(1, step),)])
            seen.append(weights(model))
        both.close()

    plain = model_of()
    paceline.launch(train, ps=2, workers=1, mode="sync")
    assert_same(single(plain, momentum(plain), 2), seen, "after each step")


# --- what goes wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"devices": []}, "needs a list of devices"),
        ({"devices": "/cpu:0"}, "needs a list of devices"),
        ({"devices": ["/tpu:0"]}, "is a TPU"),
        ({"mode": "sink"}, "no mode 'sink'"),
        ({"ema": 1.5}, "the decay must lie between 0 and 1"),
        ({"variables": "/job:ps/task:0"}, r"ctx\.prepare\(model, optimizer\)"),
        ({"devices": ["/job:wroker/task:0"]}, "no job 'wroker'; did you mean 'worker'"),
        ({"devices": ["/job:worker/task:7"]}, "no task worker:7"),
    ],
)
def test_refused_in_one_sentence(options: dict[str, Any], said: str, tasks: Tasks) -> None:
    model = model_of()
    with pytest.raises(UsageError, match=said) as caught:
        towers(model, momentum(model), **{"devices": HERE, **options})
    assert "\n" not in str(caught.value)


def test_no_code_travels(tasks: Tasks) -> None:
    model = Odd(3)
    with pytest.raises(UsageError, match=r"test_towers\.Odd is no plain layer of torch\.nn.*Give build="):
        towers(model, momentum(model), THERE)
    with pytest.raises(UsageError, match=r"build=Odd is to run on another task.*@paceline\.op"):
        towers(model, momentum(model), THERE, build=partial(Odd, width=3))
    with (
        towers(model, momentum(model), THERE, build=partial(odd_model, width=3)) as both,
        pytest.raises(UsageError, match=r"loss=.*lambda.* is to run on another task.*@paceline\.op"),
    ):
        both.step(lambda model, x: model(x).mean(), [(batch(0, 0),)] * 2)
    with (
        towers(model, momentum(model), THERE, build=partial(odd_model, width=4)) as both,
        pytest.raises(UsageError, match=r"another one: it has inner.weight of shape \(4, 37\) where inner.weight of"),
    ):
        both.step(squares, [(batch(0, 0),)] * 2)


def test_an_error_in_a_far_tower_names_task_and_tower_and_the_next_step_works(tasks: Tasks) -> None:
    @op(name="test:picky")
    def picky(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if x.sum() == 0:
            raise ZeroDivisionError("nothing but zeros")
        return model(x).square().mean()

    plain, model = model_of(), model_of()
    want = single(plain, momentum(plain), 2, 1)
    with towers(model, momentum(model), THERE) as both:
        with pytest.raises(RemoteOpError, match=r"task:1.*ZeroDivisionError: nothing but zeros") as caught:
            both.step(picky, [(batch(0, 0),), (torch.zeros(5, 37),)])
        assert caught.value.__notes__ == ["in tower 1 on /job:worker/task:1/device:CPU:0"]
        both.step(picky, [(batch(0, 0),), (batch(1, 0),)])
    assert_same(want[-1], weights(model), "model")


def test_a_card_that_is_not_there_is_the_cpu_and_says_so() -> None:
    plain, model = model_of(), model_of()
    with towers(model, momentum(model), ["/gpu:70", "/gpu:71"]) as both:
        both.step(squares, [(batch(0, 0),), (batch(1, 0),)])
        missing = "/device:GPU:70 (missing: the CPU), /device:GPU:71 (missing: the CPU)"
        assert str(both) == f"2 towers, sync: {missing}; variables on cpu"
    assert_same(single(plain, momentum(plain), 2, 1)[-1], weights(model), "model")


def test_a_loss_that_is_no_number_is_refused() -> None:
    model = model_of()
    with towers(model, momentum(model), HERE) as both, pytest.raises(UsageError, match=r"shape \(5, 3\)"):
        both.step(lambda model, x: model(x), [(batch(0, 0),)] * 2)


def test_a_task_that_ends_is_named(tasks: Tasks) -> None:
    model = model_of()
    with towers(model, momentum(model), THERE) as both:
        both.step(squares, [(batch(0, 0),)] * 2)
        tasks.stop(1)
        with pytest.raises(ConnectionLost, match=r"task:1 at .* went away since.*held for tower 1"):
            both.step(squares, [(batch(0, 0),)] * 2)


def test_only_what_has_changed_is_sent(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.ingraph.remote import Remote

    sent: list[list[int]] = []
    plain_call = Remote.call

    def call(self: Remote, name: str, args: Any = (), **rest: Any) -> Any:
        sent.append([number for number, _ in args[0]["values"]])
        return plain_call(self, name, args, **rest)

    monkeypatch.setattr(Remote, "call", call)
    model = model_of()
    model[0].requires_grad_(False)
    with towers(model, momentum(model), THERE[:1]) as one:
        for step in range(3):
            one.step(squares, [(batch(0, step),)])
    assert sent == [[0, 1, 2, 3, 4, 5], [2, 3, 4, 5], [2, 3, 4, 5]]


@pytest.fixture
def seeded() -> Iterator[None]:
    before = torch.get_rng_state()
    torch.manual_seed(11)
    yield
    torch.set_rng_state(before)


def test_dropout_here_is_drawn_as_the_single_process_draws_it(seeded: None) -> None:
    def model_with_dropout() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(37, 5), nn.Dropout(0.5), nn.Linear(5, 3))

    plain = model_with_dropout()
    want = single(plain, momentum(plain), 2)
    model = model_with_dropout()
    assert_same(want, trained(model, momentum(model), HERE), "after each step")


def test_dropout_there_depends_on_the_seed_alone(seeded: None, tasks: Tasks) -> None:
    def run() -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(37, 5), nn.Dropout(0.5))
        return trained(model, momentum(model), THERE)

    first = run()
    torch.manual_seed(99)
    torch.randn(1000)
    assert_same(first, run(), "after each step")
