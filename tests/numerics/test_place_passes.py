"""What happens between a part's forward and its backward: parameters that change, and who draws meanwhile."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from alike import assert_same
from ops_cluster import Tasks, tasks
from torch import nn
from torch.optim import SGD
from toy import batch

from paceline.errors import PacelineError
from paceline.ingraph import copies
from paceline.ingraph.draws import Turn, turn_of
from paceline.ingraph.op import op
from paceline.ingraph.place import place

pytestmark = pytest.mark.filterwarnings("error")

__all__ = ["tasks"]  # a fixture
CPU = torch.device("cpu")


def two_parts() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(37, 9), nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3)))


def gradients(model: nn.Module) -> list[Any]:
    return [p.grad for p in model.parameters()]


# --- parameters that are frozen or trained meanwhile --------------------------------------------------------------


def frozen_between(model: nn.Module) -> None:
    loss = model(batch(0, 0)).square().mean()
    model[1][0].requires_grad_(False)
    loss.backward()


def trained_between(model: nn.Module) -> None:
    model[1][0].requires_grad_(False)
    loss = model(batch(0, 0)).square().mean()
    model[1][0].requires_grad_(True)
    loss.backward()


def frozen_before_another_forward(model: nn.Module) -> None:
    """The other side hears of it with the second forward, and the first one's backward comes then."""
    first = model(batch(0, 0)).square().mean()
    model[1][0].requires_grad_(False)
    second = model(batch(0, 1)).square().mean()
    first.backward()
    model[1][0].requires_grad_(True)
    second.backward()


CHANGES = [frozen_between, trained_between, frozen_before_another_forward]


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_trained_at_the_forward_pass_counts(change: Callable[[nn.Module], None], tasks: Tasks) -> None:
    plain, model = two_parts(), two_parts()
    place(model[1], "/job:worker/task:1")
    change(plain)
    change(model)
    assert_same(gradients(plain), gradients(model), "gradients")


@pytest.mark.parametrize("change", CHANGES)
def test_with_the_parts_own_optimizer_too(change: Callable[[nn.Module], None], tasks: Tasks) -> None:
    def run(is_placed: bool) -> Any:
        model = two_parts()
        optimizer = SGD(model[1].parameters(), lr=0.1)
        if is_placed:
            place(model[1], "/job:worker/task:1", optimizer)
        change(model)
        optimizer.step()
        return gradients(model[0]), dict(model.state_dict())

    assert_same(run(False), run(True), "gradients and values")


def test_values_that_change_before_backward_are_refused_as_torch_does(tasks: Tasks) -> None:
    """And not silently mixed with the activations of the old ones."""
    for device in (None, "/job:worker/task:1"):
        model = two_parts()
        if device:
            place(model[1], device)
        early = model(batch(0, 0)).square().mean()
        with torch.no_grad():
            for parameter in model[1].parameters():
                parameter.mul_(2)
        model(batch(0, 0))  # carries them there
        with pytest.raises((RuntimeError, PacelineError), match="modified by an inplace operation"):
            early.backward()


def test_values_of_another_dtype_or_order_in_memory_are_heard(tasks: Tasks) -> None:
    def run(device: str | None) -> Any:
        torch.manual_seed(1)
        part = nn.Conv2d(3, 4, 3)
        if device:
            place(part, device)
        told = []
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        for change in (lambda: None, lambda: part.to(memory_format=torch.channels_last), part.double):
            change()
            told.append(part(x.to(part.weight.dtype)).detach())
        return told

    assert_same(run(None), run("/job:worker/task:0"), "outputs")


# --- random numbers -----------------------------------------------------------------------------------------------


@op
def nested_parts() -> nn.Module:
    """A part of a part: on worker:0, and a piece of it on worker:1, which draws too."""
    torch.manual_seed(3)
    inner = nn.Sequential(nn.Dropout(0.5), nn.Linear(9, 9))
    return nn.Sequential(nn.Dropout(0.5), place(inner, "/job:worker/task:1"), nn.Dropout(0.5))


@pytest.mark.timeout(20)
def test_a_part_inside_a_part_draws_in_its_turn(tasks: Tasks) -> None:
    """Both tasks are in this process, as both parts may be on one task: there is one generator, and nobody waits."""

    def run(device: str | None) -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5), nn.Linear(9, 9)), nn.Dropout(0.5))
        if device:
            place(model, device, build=nested_parts)
        torch.manual_seed(8)
        outputs = [model(torch.ones(5, 9)) for _ in range(2)]
        sum(each.square().sum() for each in outputs).backward()
        return [each.detach() for each in outputs], gradients(model), torch.rand(3)

    assert_same(run(None), run("/job:worker/task:0"), "outputs, gradients and what is drawn next")


@pytest.mark.timeout(20)
def test_a_part_that_draws_nothing_waits_for_nobody(tasks: Tasks) -> None:
    model = two_parts()
    place(model[1], "/job:worker/task:1")
    model(batch(0, 0))
    is_taken, may_end = threading.Event(), threading.Event()

    def draw() -> None:
        with turn_of(CPU).taken():
            is_taken.set()
            may_end.wait(20)

    other = threading.Thread(target=draw)
    other.start()
    try:
        assert is_taken.wait(20)
        model(batch(0, 0))
    finally:
        may_end.set()
        other.join(60)


def test_a_cards_generator_is_as_before_after_a_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card's generator differs in nothing that is used here; this is one of the CPU in its place."""
    generator = torch.Generator().manual_seed(1)
    turn = Turn(generator)
    monkeypatch.setattr(copies, "turn_of", lambda device: turn)
    before = generator.get_state()
    drawn = []
    for _ in range(2):
        with copies.seeded(7, torch.device("cuda", 0)):
            drawn.append(torch.rand(3, generator=generator))
    assert torch.equal(*drawn) and torch.equal(before, generator.get_state())


def test_whoever_waits_for_another_task_lends_its_turn() -> None:
    generator = torch.Generator().manual_seed(1)
    outside = generator.get_state()
    turn = Turn(generator)
    with turn.taken():
        generator.manual_seed(7)
        first = torch.rand(1, generator=generator)
        with turn.lent():
            assert torch.equal(generator.get_state(), outside)
            with turn.taken(is_undone=False):  # somebody else, who draws for good
                torch.rand(1, generator=generator)
            after = generator.get_state()
        second = torch.rand(1, generator=generator)
    want = torch.rand(2, generator=torch.Generator().manual_seed(7))
    assert torch.equal(torch.cat([first, second]), want)
    assert torch.equal(generator.get_state(), after)
