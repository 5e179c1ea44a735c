"""A placed part does what the same module does here, or says in a sentence that it does not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from alike import assert_same
from ops_cluster import Tasks, tasks
from torch import nn
from torch.optim import SGD
from toy import batch

from paceline.errors import ConnectionLost, PacelineError, UsageError
from paceline.ingraph.op import op
from paceline.ingraph.place import place
from paceline.ingraph.towers import towers

pytestmark = pytest.mark.filterwarnings("error")

__all__ = ["tasks"]  # a fixture
THERE = "/job:worker/task:1"


def part_on(device: str | None) -> nn.Sequential:
    torch.manual_seed(3)
    part = nn.Sequential(nn.Linear(37, 9), nn.Tanh(), nn.Linear(9, 3))
    if device:
        place(part, device)
    return part


# --- between forward and backward ---------------------------------------------------------------------------------


def test_a_task_that_ends_takes_the_activations_along_and_nobody_waits_for_it(tasks: Tasks) -> None:
    part = part_on(THERE)
    loss = part(batch(0, 0)).sum()
    tasks.stop(1)
    with pytest.raises(ConnectionLost, match=r"task:1 at .* went away since.*held for the placed Sequential is lost"):
        loss.backward()


def weight(part: nn.Sequential, x: torch.Tensor, loss: torch.Tensor) -> None:
    part[2].weight.mul_(2)


def stepped(part: nn.Sequential, x: torch.Tensor, loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    SGD(part.parameters(), lr=0.1).step()


def given(part: nn.Sequential, x: torch.Tensor, loss: torch.Tensor) -> None:
    x.mul_(2)


def bias(part: nn.Sequential, x: torch.Tensor, loss: torch.Tensor) -> None:
    part[0].bias.mul_(2)


def used_up(part: nn.Sequential, x: torch.Tensor, loss: torch.Tensor) -> None:
    loss.backward()


@pytest.mark.parametrize("device", [None, THERE], ids=["here", "there"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (weight, "modified by an inplace operation"),
        (stepped, "modified by an inplace operation"),
        (given, "modified by an inplace operation"),
        (bias, None),
        (used_up, "backward through the graph a second time"),
    ],
)
def test_what_changes_before_backward_is_refused_where_torch_refuses_it(
    change: Callable[..., None], said: str | None, device: str | None, tasks: Tasks
) -> None:
    part, x = part_on(device), batch(0, 0)
    loss = part(x).square().mean()
    with torch.no_grad() if change not in (stepped, used_up) else torch.enable_grad():
        change(part, x, loss)
    if said is None:
        loss.backward()
        return
    with pytest.raises((RuntimeError, PacelineError), match=said) as caught:
        loss.backward()
    assert not isinstance(caught.value, ConnectionLost)


# --- autocast -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_goes_along(dtype: torch.dtype, tasks: Tasks) -> None:
    def run(device: str | None) -> Any:
        part = part_on(device)
        told = [part(batch(0, 0)).detach()]
        with torch.autocast("cpu", dtype=dtype):
            out = part(batch(0, 0))
            with torch.autocast("cpu", enabled=False):
                told.append(part(batch(0, 1)).detach())
        out.float().square().mean().backward()
        assert out.dtype == dtype
        return told, out.detach(), [p.grad for p in part.parameters()]

    assert_same(run(None), run(THERE), "outputs and gradients")


@op
def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


@pytest.mark.parametrize("devices", [["/cpu:0"], [THERE], [THERE, "/cpu:0"]], ids=["here", "there", "in threads"])
def test_autocast_reaches_towers_wherever_they_compute(devices: list[str], tasks: Tasks) -> None:
    plain, model = part_on(None), part_on(None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = squares(plain, batch(0, 0))
    want.backward()
    with towers(model, SGD(model.parameters(), lr=0.1), devices) as several, torch.autocast("cpu"):
        told = several.backward(squares, [(batch(0, 0),)] * len(devices))
    want_all = [want.detach(), *(p.grad for p in plain.parameters())]
    assert_same(want_all, [told, *(p.grad for p in model.parameters())], "loss and gradients")


# --- layers that change after they were placed --------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = 2.0
        self.rank = 0  # of a copy: its own
        self.seen: Any = None
        self.inner = nn.Dropout(0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.detach()
        return self.inner(x) * self.scale + self.rank


@op
def make_scaled() -> nn.Module:
    made = Scaled()
    made.rank = 5
    return made


def test_a_changed_attribute_reaches_the_copy(tasks: Tasks) -> None:
    layers = place(nn.Sequential(nn.Dropout(0.9)), THERE)
    own = place(Scaled(), THERE, build=make_scaled)
    one = nn.Sequential(nn.Dropout(0.9), nn.Linear(9, 1))
    x = torch.ones(4, 9)
    early = layers(x.requires_grad_(True))
    own(x)
    with towers(one, SGD(one.parameters(), lr=0.0), [THERE, "/cpu:0"]) as both:
        both.backward(squares, [(x,), (x,)])
        for layer in (layers[0], own.inner, one[0]):
            layer.p = 0.0
        own.scale = 3
        assert torch.equal(layers(x), x)
        Scaled.forward(own, x)  # leaves something here, which is nobody else's
        assert torch.equal(own(x), 3 * x + 5), "and what was not changed is the copy's own"
        assert torch.equal(both.backward(squares, [(x,), (x,)]), squares.fn(one, x))
        layers[0].p = 0.9
        assert not torch.equal(layers(x), x), "changed back"
        early.sum().backward()
    own.scale = torch.ones(())
    with pytest.raises(UsageError, match="The module itself had a plain 'scale' when it was copied"):
        own(x)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda part: part.append(nn.ReLU()), r"Layer '3' \(ReLU\) is new, or another since this Sequential"),
        (lambda part: part.pop(2), r"Layer '2' \(Linear\) has gone"),
        (lambda part: setattr(part, "1", nn.ReLU()), r"Layer '1' \(ReLU\) is new, or another"),
        (lambda part: setattr(part[0], "bias", nn.Parameter(torch.ones(1))), r"Layer '0' \(Linear\) is new, or"),
    ],
)
def test_layers_that_come_or_go_are_refused(change: Callable[[nn.Sequential], None], said: str, tasks: Tasks) -> None:
    part, model = part_on(THERE), part_on(None)
    with towers(model, SGD(model.parameters(), lr=0.1), ["/cpu:0"]) as one:
        change(part)
        change(model)
        with pytest.raises(UsageError, match=said):
            part(batch(0, 0))
        with pytest.raises(UsageError, match=said):
            one.backward(squares, [(batch(0, 0),)])


def test_a_part_of_a_placed_part_is_named_where_it_needs_a_build(tasks: Tasks) -> None:
    outer = nn.Sequential(nn.Linear(3, 3), nn.Sequential(place(nn.Linear(3, 3), THERE)))
    with pytest.raises(UsageError, match=r"its part '1\.0' \(Linear\) is itself placed on .*task:1.* Give build="):
        place(outer, "/job:worker/task:0")
