"""A placed part does what the same module does here, or says in a sentence that it does not."""

from collections.abc import Callable

import pytest
import torch
from ops_cluster import Tasks, tasks
from torch import nn
from torch.optim import SGD
from toy import batch

from paceline.errors import ConnectionLost, PacelineError
from paceline.ingraph.place import place

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
