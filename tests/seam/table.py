"""The table of things that PyTorch scripts do between `prepare()` and their end, and what a cluster makes of each.

A case is a training loop that gets a `Job` (tests/numerics/alike.py) and never knows where it runs. `test_seam.py` runs
each case as plain PyTorch, on 1 worker async and on 2 workers sync, and holds it to the verdict written here;
`page.py` renders docs/seam.md from the same rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from alike import Job, Returned
from torch import nn

STEPS = 8
Recipe = Callable[[Job], Returned]


@dataclass(frozen=True)
class Equal:
    """Every number that the script returns has the bits of plain PyTorch, and so has the checkpoint."""

    word = "equal"


@dataclass(frozen=True)
class Refused:
    """The run ends with an error; `words` must stand in it."""

    words: str
    word = "refused"


@dataclass(frozen=True)
class Different:
    """The run ends well with other numbers, for the reason in the note. `everywhere`: on every machine."""

    everywhere: bool = True
    word = "different"


@dataclass(frozen=True)
class NotCompared:
    """There is no plain PyTorch of two workers to compare with. The note of the case says why."""

    word = "–"


EQUAL = Equal()
Verdict = Equal | Refused | Different | NotCompared


@dataclass(frozen=True)
class Script:
    """A program in a file of its own, run in processes; `name` is what it calls this case."""

    file: str
    name: str


@dataclass(frozen=True)
class Case:
    """One row: `one` is the verdict on 1 worker async, `two` that on 2 workers sync."""

    topic: str
    name: str
    recipe: Recipe | Script
    one: Verdict
    two: Verdict
    note: str
    options: dict[str, Any] = field(default_factory=dict)  # of paceline.launch

    @property
    def is_equal(self) -> bool:
        """Whether every comparison that can be made gives equal bits."""
        return isinstance(self.one, Equal) and isinstance(self.two, Equal | NotCompared)


CASES: dict[str, Case] = {}


def case(
    topic: str, name: str, one: Verdict = EQUAL, two: Verdict = EQUAL, note: str = "", **options: Any
) -> Callable[[Recipe | Script], Recipe | Script]:
    """Add a row to the table."""

    def add(recipe: Recipe | Script) -> Recipe | Script:
        assert name not in CASES, f"two cases are called {name}"
        CASES[name] = Case(topic, name, recipe, one, two, note, options)
        return recipe

    return add


# --- what most recipes share ----------------------------------------------------------------------------------------


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, 19), nn.Tanh(), nn.Linear(19, 3))


def loss_of(job: Job, model: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return model(job.randn(5, 7)).square().mean()


def trained(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> Iterator[torch.Tensor]:
    """The plain loop; what comes between two steps is the caller's."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(job, model)
        loss.backward()
        optimizer.step()
        yield loss.detach()


def train(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> list[torch.Tensor]:
    """The plain loop; returns the losses."""
    return list(trained(job, model, optimizer, steps))
