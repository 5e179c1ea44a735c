"""Trap 1: optimizer bits. A flat vector, another implementation, a product for a division: all give other bits."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from paceline.frameworks.torch.layout import optimizer_spec
from paceline.params.layout import Layout, TensorSpec
from paceline.params.placement import place
from paceline.server.numbers.shard import Shard
from paceline.views import flat

SHAPES = [(33, 20), (33,), (5, 33), (5,), (101, 7), (3,), (64, 257)]
STEPS = 12
Make = Callable[[Any], torch.optim.Optimizer]

MAKE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p, **o: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3, **o),
    "Adam": lambda p, **o: torch.optim.Adam(p, lr=0.01, **o),
    "AdamW": lambda p, **o: torch.optim.AdamW(p, lr=0.01, **o),
    "Adagrad": lambda p, **o: torch.optim.Adagrad(p, lr=0.01, **o),
}


def drawn() -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    first = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return first, [[torch.randn(s, generator=generator) * 10 ** (-i % 4) for s in SHAPES] for i in range(STEPS)]


def plain(make: Make) -> torch.Tensor:
    """What the user's own process computes: a parameter a tensor."""
    first, gradients = drawn()
    parameters = [torch.nn.Parameter(t.clone()) for t in first]
    optimizer = make(parameters)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in parameters])


def one_flat_vector(make: Make, cuts: Sequence[int]) -> torch.Tensor:
    """The wrong way: all tensors in a row, cut where it suits the ps."""
    first, gradients = drawn()
    vector = torch.cat([t.flatten() for t in first])
    ends = [*cuts, vector.numel()]
    pieces = [torch.nn.Parameter(vector[a:b]) for a, b in zip([0, *cuts], ends, strict=True)]
    optimizer = make(pieces)
    for step in gradients:
        whole = torch.cat([g.flatten() for g in step])
        for piece, part in zip(pieces, torch.tensor_split(whole, list(cuts)), strict=True):
            piece.grad = part.clone()
        optimizer.step()
    return vector.detach()


def on_shards(make: Make, num_ps: int) -> torch.Tensor:
    """Ours: a parameter a tensor piece, cut at multiples of 64 bytes from the tensor's start."""
    first, gradients = drawn()
    specs = [TensorSpec(str(i), s, torch.empty(s).stride(), "float32", 0) for i, s in enumerate(SHAPES)]
    layout = Layout(tuple(specs))
    plan = place(layout, num_ps, "bytes")
    assert num_ps == 1 or any(len(plan.owners(i)) > 1 for i in range(len(SHAPES))), "nothing was cut"
    optimizer = optimizer_spec(make([torch.nn.Parameter(t) for t in first]))
    shards = [Shard(layout, plan, i, optimizer) for i in range(num_ps)]
    slots = [shard.new_slot() for shard in shards]
    results = [t.flatten().clone() for t in first]
    for shard in shards:
        for piece in shard.pieces:
            view = flat(shard.memory, "float32", piece.offset, piece.numel)
            view.copy_(results[piece.tensor][piece.start : piece.stop])
    for step in gradients:
        for shard, slot in zip(shards, slots, strict=True):
            for piece in shard.pieces:
                part = step[piece.tensor].flatten()[piece.start : piece.stop]
                flat(slot.memory, "float32", piece.offset, piece.numel).copy_(part)
            shard.apply([(slot, False, True)])
    for shard in shards:
        for piece in shard.pieces:
            view = flat(shard.memory, "float32", piece.offset, piece.numel)
            results[piece.tensor][piece.start : piece.stop] = view
    return torch.cat(results)


def fused(name: str) -> Make:
    return lambda p: MAKE[name](p, fused=True)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_fused_on_a_flat_vector_is_not_what_the_user_asked_for(name: str) -> None:
    want = plain(fused(name))
    ways = [one_flat_vector(fused(name), cuts) for cuts in ([], [7, 123, 5001])]
    assert not all(torch.equal(want, got) for got in ways)


@pytest.mark.parametrize("name", MAKE)
def test_fused_must_not_be_switched_on_behind_the_users_back(name: str) -> None:
    assert not torch.equal(plain(MAKE[name]), plain(fused(name)))
    for num_ps in (1, 2, 3, 5):
        assert torch.equal(plain(fused(name)), on_shards(fused(name), num_ps)), f"fused, {num_ps} ps"
        assert torch.equal(plain(MAKE[name]), on_shards(MAKE[name], num_ps)), f"default, {num_ps} ps"


@pytest.mark.parametrize("cls", [torch.optim.NAdam, torch.optim.RAdam])
def test_foreach_must_not_be_switched_on_behind_the_users_back(cls: Any) -> None:
    default, foreach = (lambda p: cls(p, lr=0.01)), (lambda p: cls(p, lr=0.01, foreach=True))
    assert not torch.equal(plain(default), plain(foreach))
    assert torch.equal(plain(default), on_shards(default, 3))
    assert torch.equal(plain(foreach), on_shards(foreach, 3))
    assert optimizer_spec(default([torch.nn.Parameter(torch.ones(1))])).groups[0]["foreach"] is None


def test_a_mean_is_a_sum_in_worker_order_and_a_true_division() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b, c = (torch.randn(4096, generator=generator) for _ in range(3))
    right = (a + b + c) / 3
    assert not torch.equal(right, (a + b + c) * (1 / 3))
    assert not torch.equal(right, a / 3 + b / 3 + c / 3)
    assert not torch.equal(right, (c + b + a) / 3)
    layout = Layout((TensorSpec("w", (4096,), (1,), "float32", 0),))
    rate_of_one = optimizer_spec(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    shard = Shard(layout, place(layout, 1, "bytes"), 0, rate_of_one)
    slots = [shard.new_slot() for _ in range(3)]
    for slot, gradient in zip(slots, (a, b, c), strict=True):
        flat(slot.memory, "float32", 0, 4096).copy_(gradient)
    shard.apply([(slot, False, True) for slot in slots])
    assert torch.equal(flat(shard.memory, "float32", 0, 4096), -right)
