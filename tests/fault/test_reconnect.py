"""A connection that ends is made again, and what was not answered is sent again: every push counts, and counts once.

The model is one weight that counts: each push adds exactly 1. Connections are cut by the worker's own steps, on the
real lanes, between threads of one process; what happens between processes is in test_worker_killed.py and others.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.worker.requests import link as links
from paceline.worker.requests.client import Client

pytestmark = pytest.mark.timeout(60)

STEPS = 12
LARGE = 1 << 19  # two megabytes: sent from where the gradient lies, not through a buffer


class Counter(nn.Module):
    """Every step adds 1 to every element, if it is applied once."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.counts = nn.ParameterList([nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(3))])

    def forward(self) -> torch.Tensor:
        return -sum(c.sum() for c in self.counts)  # type: ignore[return-value]

    def seen(self) -> set[float]:
        return {value for c in self.counts for value in c.detach().unique().tolist()}


def client_of(ctx: Any) -> Client:
    client: Client = ctx._session.training_step.client
    return client


def cut(client: Client, ps: int) -> None:
    """Both ends of one connection see it end; what was sent before arrives."""
    client.links[ps].channel.stream.shutdown()


def counting(cuts: Callable[[Any, int, str], None], size: int = 5, steps: int = STEPS, lr: float = 1.0) -> Any:
    """A script that calls `cuts(ctx, step, where)` before and after every push, and says what it ended with."""
    seen: list[set[float]] = []

    def script(ctx: Any) -> None:
        model = Counter(size)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        model, optimizer = ctx.prepare(model, optimizer)
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            model().backward()
            cuts(ctx, step, "before")
            optimizer.step()
            cuts(ctx, step, "after")
        ctx.barrier()
        seen.append(model.seen())

    script.seen = seen  # type: ignore[attr-defined]
    return script


MODES: dict[str, dict[str, Any]] = {
    "async": {"mode": "async"},
    "sync": {"mode": "sync"},
    "bounded": {"mode": "bounded", "staleness": 1},
    "local": {"mode": "local", "local_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0},
}


@pytest.mark.parametrize("num_ps", [1, 2])
@pytest.mark.parametrize("lane", ["shm", "tcp"])
@pytest.mark.parametrize("mode", MODES)
def test_I2_every_push_counts_once_though_every_connection_is_cut(mode: str, lane: str, num_ps: int) -> None:
    """Before a push its frame is lost; after it, the answer: the ps has applied it and nobody heard of it."""
    fired = 0

    def cuts(ctx: Any, step: int, where: str) -> None:
        nonlocal fired
        if step % 2 == (where == "after"):
            cut(client_of(ctx), step // 2 % num_ps)
            fired += 1

    script = counting(cuts)
    summary = paceline.launch(script, ps=num_ps, workers=1, lane=lane, placement="round_robin", **MODES[mode])
    assert fired == STEPS
    assert script.seen == [{float(STEPS)}]
    assert summary["global_step"] == STEPS
    assert [row["updates"] for row in summary["ps"]] == [STEPS] * num_ps


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_that_was_sent_from_where_it_lay_is_sent_again_bit_for_bit(set_to_none: bool) -> None:
    """Also when the script clears it in place right after the step, before the answer was taken."""

    def script(ctx: Any) -> None:
        model = Counter(LARGE)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        assert ctx._session.training_step._outgoing.direct
        for step in range(1, STEPS + 1):
            model().backward()
            if step % 3 == 0:
                cut(client_of(ctx), 0)  # the frame of this push is lost: the whole payload is needed again
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        ctx.pull()
        assert model.seen() == {float(STEPS)}

    assert paceline.launch(script, workers=1, lane="tcp")["global_step"] == STEPS


def test_a_gradient_that_was_changed_since_its_push_is_not_sent_again() -> None:
    """Ctrl+C ended the wait for an answer, the connection is lost, and the script goes on: the push is void."""

    def script(ctx: Any) -> None:
        model = Counter(LARGE)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        client = client_of(ctx)
        take = client.take

        def interrupted() -> Any:
            client.take = take
            raise KeyboardInterrupt

        for step in range(1, STEPS + 1):
            model().backward()
            if step == 6:
                cut(client, 0)
                client.take = interrupted
            with pytest.raises(KeyboardInterrupt) if step == 6 else nullcontext():
                optimizer.step()
            for parameter in model.parameters():
                parameter.grad.mul_(7.0)  # type: ignore[union-attr]
            optimizer.zero_grad()
        ctx.pull()
        assert model.seen() == {STEPS - 1.0}

    assert paceline.launch(script, workers=1, lane="tcp")["global_step"] == STEPS - 1


@pytest.mark.parametrize("where", ["before", "after"])
def test_buckets_are_sent_again_as_a_whole(where: str) -> None:
    """--overlap: what lay in the old slot is gone with the connection."""

    def script(ctx: Any) -> None:
        model = Counter(LARGE)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        assert ctx._session.training_step._overlap.shards
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            if step % 3 == 0 and where == "before":
                cut(client_of(ctx), 0)  # before the first bucket leaves
            model().backward()
            if step % 3 == 1:
                cut(client_of(ctx), 0)  # between the buckets and the push
            optimizer.step()
            if step % 3 == 2 and where == "after":
                cut(client_of(ctx), 0)
        ctx.pull()
        assert model.seen() == {float(STEPS)}

    assert paceline.launch(script, workers=1, lane="tcp", overlap=True)["global_step"] == STEPS


def test_the_options_and_the_weight_of_a_push_survive_a_new_connection() -> None:
    """They are said when they change; whoever connects again has another slot, which must know them."""

    def script(ctx: Any) -> None:
        model = Counter(5)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=8.0))
        ctx.weight(4)
        for step in range(1, STEPS + 1):
            if step == 2:
                optimizer.param_groups[0]["lr"] = 1.0
            optimizer.zero_grad()
            model().backward()
            if step > 3:
                cut(client_of(ctx), 0)
            optimizer.step()
        ctx.pull()
        assert model.seen() == {8.0 + STEPS - 1}

    paceline.launch(script, workers=1, lane="tcp")


@pytest.mark.parametrize("lane", ["inproc", "tcp"])
def test_whatever_is_asked_is_asked_again(lane: str) -> None:
    """Barrier, pause, tickets, state_dict, averages, save, kv and close: each on a connection that has just ended."""

    def script(ctx: Any) -> None:
        model = Counter(5)
        model, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters(), lr=1.0))
        client = client_of(ctx)
        for _ in ctx.steps(STEPS):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            ctx._session.training_step.settle()
            ctx._session.training_step.has_ticket = False  # so that it asks
            cut(client, 0)
        cut(client, 0)
        ctx.barrier()
        cut(client, 1)
        with ctx.pause():
            cut(client, 0)
        cut(client, 1)
        assert len(optimizer.state_dict()["state"]) == 2
        cut(client, 0)
        with ctx.ema():
            cut(client, 1)
        cut(client, 0)
        ctx.pull()
        assert ctx.global_step == STEPS
        for ps in (0, 1):
            cut(client, ps)

    summary = paceline.launch(script, ps=2, workers=1, lane=lane, ema=0.5, placement="round_robin")
    assert summary["global_step"] == STEPS and summary["ok"]


def test_readers_connect_again() -> None:
    """ctx.kv, and with it evaluators: they only read, so nothing is asked twice in vain."""

    def script(ctx: Any) -> None:
        model = Counter(5)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        model().backward()
        optimizer.step()
        ctx.pull()
        kv = ctx.kv
        for channel in kv._channels:
            channel.stream.shutdown()
        assert kv["counts.0"].tolist() == [1.0] * 5
        kv.close()

    paceline.launch(script, ps=2, workers=1, lane="tcp", placement="round_robin")


def test_a_barrier_whose_answer_got_lost_is_not_waited_in_again() -> None:
    """Two barriers of two workers: the answer to the first one never reaches worker 1."""
    released: list[int] = []

    def script(ctx: Any) -> None:
        model = Counter(5)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        client = client_of(ctx)
        if ctx.worker_index == 1:
            stream = client.links[0].channel.stream
            original = client.links[0].channel.recv_cold

            def deaf() -> Any:
                frame = original()
                stream.shutdown()
                client.links[0].channel.recv_cold = original  # type: ignore[method-assign]
                raise paceline_lost(frame)

            client.links[0].channel.recv_cold = deaf  # type: ignore[method-assign]
        ctx.barrier()
        released.append(ctx.worker_index)
        if ctx.worker_index == 0:
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        ctx.barrier()

    def paceline_lost(frame: Any) -> Exception:
        from paceline.errors import ConnectionLost

        return ConnectionLost(f"swallowed {frame.kind}")

    assert paceline.launch(script, workers=2)["global_step"] == 1
    assert sorted(released) == [0, 1]


def test_I6_what_can_never_be_answered_ends_with_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that ends every connection it is sent on is given up, and says so."""
    monkeypatch.setattr(links, "MAX_LOSSES", 3)

    def script(ctx: Any) -> None:
        model = Counter(5)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        client = client_of(ctx)
        join = client.joining._join_again

        def cursed(link: Any) -> Any:
            told = join(link)
            cut(client, 0)
            return told

        client.joining._join_again = cursed  # type: ignore[method-assign]
        cut(client, 0)
        model().backward()
        optimizer.step()

    with pytest.raises(paceline.PacelineError, match="4 connections to ps:0 ended without an answer"):
        paceline.launch(script, workers=1, lane="tcp")


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    before = {thread.ident for thread in threading.enumerate()}
    yield
    for thread in threading.enumerate():
        if thread.ident not in before and thread.name != "overlap":
            thread.join(10)
            assert not thread.is_alive(), f"{thread.name} was left behind"
