"""HOW many? What ctx.steps and ctx.epochs take for a number, alone and in a cluster, and what they refuse."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import paceline
from paceline.errors import TrainingFailed, UsageError
from paceline.worker.context import Context
from paceline.worker.session import WorkerSession

WRONG = ["x", None, 2.5, math.inf, math.nan, -1, [3], 10**30]


def alone() -> Context:
    return Context(WorkerSession(None, lambda line: None))


@pytest.mark.parametrize("given", [600 / 100, 6, np.int64(6), np.float32(6), torch.tensor(6)])
def test_a_whole_number_is_taken_however_it_was_computed(given: object) -> None:
    assert list(alone().steps(given)) == list(alone().epochs(given)) == list(range(6))  # type: ignore[arg-type]


@pytest.mark.parametrize("given", WRONG, ids=str)
@pytest.mark.parametrize("what", ["steps", "epochs"])
def test_what_is_none_is_refused_in_one_sentence(what: str, given: object) -> None:
    with pytest.raises(UsageError, match=rf"^ctx\.{what}\(.*\): .*whole number") as refused:
        list(getattr(alone(), what)(given))
    assert "\n" not in str(refused.value)


def in_cluster(totals: list[object], tmp_path: Path) -> dict[str, object]:
    def train(ctx: paceline.Context) -> None:
        model = nn.Linear(4, 3)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for total in totals:
            for _ in ctx.steps(total):  # type: ignore[arg-type]
                optimizer.zero_grad()
                model(torch.ones(2, 4)).square().mean().backward()
                optimizer.step()

    return paceline.launch(train, ps=1, workers=2, run_dir=str(tmp_path), lane="inproc")


def test_a_cluster_takes_what_one_process_takes(tmp_path: Path) -> None:
    assert in_cluster([70 / 10], tmp_path)["global_step"] == 7


def test_a_cluster_refuses_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match=r"ctx\.steps\(2\.5\).*whole number"):
        in_cluster([2.5], tmp_path)


def test_no_steps_at_first_and_some_afterwards(tmp_path: Path) -> None:
    """As one process does it."""
    assert in_cluster([0, 7], tmp_path)["global_step"] == 7


def test_another_total_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match=r"3 steps, not 7.*the same total"):
        in_cluster([3, 7], tmp_path)
