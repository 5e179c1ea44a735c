"""A round's update on all cores: blocks of 2^18 elements are shared out, and the bits are those of one core.

The model has more blocks than `MIN_BLOCKS`; each test makes sure that the other threads really took part.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import Job, Returned, check, weights
from torch import nn
from torch.optim import SGD, Adam, AdamW

from paceline.cluster import cores
from paceline.frameworks.torch.layout import optimizer_spec
from paceline.modes import make as make_mode
from paceline.modes.spec import ModeSpec
from paceline.params.layout import Layout, TensorSpec
from paceline.params.placement import place
from paceline.server.control.config import PsConfig
from paceline.server.core import Core
from paceline.server.numbers.blocks import BLOCK_ELEMENTS
from paceline.server.numbers.shard import MIN_BLOCKS, Shard
from paceline.views import flat
from paceline.wire.messages import OptimizerSpec

pytestmark = pytest.mark.filterwarnings("error")

STEPS = 3


class Wide(nn.Module):
    """Six blocks: two of one tensor and a bit, one of several small tensors, and so on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 90_001)
        self.second = nn.Linear(11, 50_021)
        self.unused = nn.Linear(3, 70_003)
        self.small = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.first(x[:, :7]).mean(), self.second(x).square().mean(), self.small(x[:, :5]).mean()
        return parts[0] + parts[1] + parts[2]


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "Adam": lambda p: Adam(p, lr=0.01),
    "fused": lambda p: AdamW(p, lr=0.01, fused=True),
}


def have_cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Whatever this machine has, and a container may use of it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))
    monkeypatch.setattr(cores, "QUOTA", Path("/nowhere"))


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Four cores, whatever this machine has; gives the threads that updated blocks. The first one waits
    until another has come, so that it is no matter of luck that several take part."""
    threads: set[int] = set()
    met = threading.Event()
    update = Shard._update

    def noted(self: Shard, indices: Any, *rest: Any) -> None:
        def each() -> Any:
            for index in indices:
                if threading.get_ident() not in threads:
                    threads.add(threading.get_ident())
                    if len(threads) > 1:
                        met.set()
                    assert met.wait(10)
                yield index

        update(self, each(), *rest)

    have_cores(monkeypatch, 4)
    monkeypatch.setattr(Shard, "_update", noted)
    return threads


def trained(job: Job, make: Callable[[Any], torch.optim.Optimizer], has_gaps: bool) -> Returned:
    model = job.make(Wide)
    if not has_gaps:
        model.unused.requires_grad_(False)
    parameters = [p for p in model.parameters() if has_gaps or p.requires_grad]
    model, optimizer = job.prepare(model, make(parameters))
    for step in range(STEPS):
        optimizer.zero_grad()
        model(job.randn(3, 11)).backward()
        if has_gaps and (step + job.index) % 2:
            model.first.bias.grad = None
        optimizer.step()
    return {"model": weights(model), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("has_gaps", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_a_round_on_all_cores(name: str, has_gaps: bool, helpers: set[int], tmp_path: Path) -> None:
    check(lambda job: trained(job, MAKERS[name], has_gaps), tmp_path, workers=2, mode="sync", ps=1)
    assert len(helpers) >= 2


@pytest.mark.nightly("a round on all cores whose bits depend on the lane")
@pytest.mark.parametrize("lane", ["shm", "tcp"])
@pytest.mark.parametrize("name", MAKERS)
def test_on_lanes(name: str, lane: str, helpers: set[int], tmp_path: Path) -> None:
    check(lambda job: trained(job, MAKERS[name], True), tmp_path, workers=2, mode="sync", ps=1, lane=lane)
    assert len(helpers) >= 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_averages_and_masters_on_all_cores(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same shard updated by one core and by four: parameters, averages, masters and state."""
    have_cores(monkeypatch, 4)
    numel = (MIN_BLOCKS + 2) * BLOCK_ELEMENTS + 77
    layout = Layout((TensorSpec("w", (numel,), (1,), dtype, 0),))
    spec = optimizer_spec(Adam([nn.Parameter(torch.zeros(1))], lr=0.01))
    both = [Shard(layout, place(layout, 1, "bytes"), 0, spec, ema=0.9) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(numel, generator=generator).to(getattr(torch, dtype))
    slots = [[shard.new_slot() for _ in range(2)] for shard in both]
    for shard in both:
        values = bytearray(shard.size_bytes)
        flat(memoryview(values), dtype, 0, numel).copy_(start)
        shard.fill(memoryview(values))
    for _ in range(2):
        given = [torch.randn(numel, generator=generator).to(start.dtype) for _ in range(2)]
        for shard, own in zip(both, slots, strict=True):
            for slot, gradient in zip(own, given, strict=True):
                flat(slot.memory, dtype, 0, numel).copy_(gradient)
            shard.apply([(slot, False, True) for slot in own], is_waited_for=shard is both[0])
    assert both[0]._pool is not None and both[1]._pool is None
    assert bytes(both[0].memory) == bytes(both[1].memory) != bytes(both[0].size_bytes)
    assert both[0].copy_of(None, is_averaged=True) == both[1].copy_of(None, is_averaged=True)
    (entries, data), (others, more) = (shard.slots() for shard in both)
    assert entries == others
    assert [bytes(d) for d in data] == [bytes(d) for d in more]
    assert len(both[0].blocks) >= MIN_BLOCKS


def test_an_error_on_another_core_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever meets it: the update has failed."""
    have_cores(monkeypatch, 2)
    layout = Layout((TensorSpec("w", ((MIN_BLOCKS + 2) * BLOCK_ELEMENTS,), (1,), "float32", 0),))
    shard = Shard(layout, place(layout, 1, "bytes"), 0, optimizer_spec(SGD([nn.Parameter(torch.zeros(1))], lr=0.1)))
    slots = [shard.new_slot(), shard.new_slot()]
    mine, met = threading.get_ident(), threading.Event()

    def step(optimizer: Any) -> None:
        if threading.get_ident() == mine:
            assert met.wait(10)
        else:
            met.set()
            raise ZeroDivisionError

    monkeypatch.setattr(shard, "_step", step)
    with pytest.raises(ZeroDivisionError):
        shard.apply([(slot, False, True) for slot in slots], is_waited_for=True)
    assert shard._sequence[0] % 2 == 0, "readers would wait for ever"


@pytest.mark.parametrize(
    ("elements", "owns_process", "threads"), [(1 << 18, True, 1), (1 << 20, True, 3), (9, False, 3)]
)
def test_threads_of_a_ps(elements: int, owns_process: bool, threads: int) -> None:
    """A small shard is updated on one thread, if no user's program shares the process."""
    config = PsConfig(
        0, 1, 1, "run", make_mode(ModeSpec(name="async"), 1), "bytes", lease_s=9.0, owns_process=owns_process
    )
    layout = Layout((TensorSpec("w", (elements,), (1,), "float32", 0),))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        Core(config).make_shard(layout, OptimizerSpec("SGD", [{"lr": 0.1}]))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
