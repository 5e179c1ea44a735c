"""Trap 16: uneven ends and barriers deadlock sync, unless a round counts those who train and not those who live."""

import threading

import pytest
import torch
from torch import nn

import paceline
from paceline.cluster.membership import Membership
from paceline.modes.full_sync import FullSync
from paceline.modes.spec import ModeSpec
from paceline.server.control.actions import Answer, Apply, Part
from paceline.server.control.state import ShardState

LOCK = threading.Lock()
SYNC = FullSync(ModeSpec(name="sync"))


def test_a_round_of_all_who_live_waits_for_one_in_a_barrier() -> None:
    members = Membership(2)
    for worker in (0, 1):
        members.join(worker, incarnation=1, now_s=0.0)
    state = ShardState(SYNC, members, is_coordinator=True)
    members.pause(0)  # worker 0 is in barrier(): it waits for worker 1, who waits for its round
    assert not SYNC.is_due({1: 1}, set(members.live)), "the wrong way: both wait for ever"
    actions = state.push((1, 1), push_id=1, base=0)
    assert [a for a in actions if isinstance(a, Apply)] == [Apply((Part((1, 1), 1),), round=0)]
    assert any(isinstance(a, Answer) and a.key == (1, 1) for a in actions)


def test_whoever_waits_when_another_goes_into_a_barrier_is_let_go() -> None:
    """The other order: the vote is in, then the last one who was awaited pauses, closes or dies."""
    for ends in ("pause", "close", "leave"):
        members = Membership(2)
        for worker in (0, 1):
            members.join(worker, incarnation=1, now_s=0.0)
        state = ShardState(SYNC, members, is_coordinator=True)
        assert state.push((1, 1), push_id=1, base=0) == []
        if ends == "leave":
            actions = state.left((0, 1))
        else:
            getattr(members, ends)(0)
            actions = state.changed()
        assert Apply((Part((1, 1), 1),), round=0) in actions, ends


@pytest.mark.parametrize("ps", [1, 2, 3])
def test_barriers_between_uneven_epochs(ps: int) -> None:
    def work(ctx: paceline.Context) -> None:
        with LOCK:
            model = nn.Linear(4, 4)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for epoch in range(3):
            for _ in range(1 + (ctx.worker_index + epoch) % 3):
                optimizer.zero_grad()
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
            ctx.barrier()

    summary = paceline.launch(work, ps=ps, workers=3, mode="sync")
    assert [row["steps"] for row in summary["workers"]] == [6, 6, 6]
    assert summary["global_step"] == 9, "an epoch is as long as its longest worker"
