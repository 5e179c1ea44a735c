"""Wherever a plan and blocks cut a tensor, its constraint gives the bits that it gives of the whole tensor."""

import numpy as np
import pytest
import torch
from lives import small_blocks, spec_by_name
from msgspec.structs import replace

from paceline.params.constraint import LONGEST_ROW, Constraint, NormRange
from paceline.params.layout import ALIGN_BYTES, ITEM_BYTES, Layout, TensorSpec, difference, problems
from paceline.params.placement import PLACEMENTS, Piece, place
from paceline.server.numbers.shard import Shard
from paceline.views import flat, shaped

BOUNDED = Constraint(max_norm=0.7)
COLUMNS = Constraint(norm=NormRange(0.2, 0.6, 0.8, (0,), 1e-7))
HELD = [
    ((50, 37), (37, 1), BOUNDED),
    ((700, 16), (16, 1), BOUNDED),
    ((20, 3, 5, 5), (75, 1, 15, 3), BOUNDED),  # channels_last
    ((40, 30), (1, 40), BOUNDED),  # transposed: no row lies in one piece
    ((2, LONGEST_ROW), (LONGEST_ROW, 1), BOUNDED),
    ((33, 7), (7, 1), COLUMNS),
    ((1, 9), (9, 1), BOUNDED),
    ((0, 9), (9, 1), BOUNDED),
    ((1000,), (1,), Constraint(min=-0.5, max=0.25)),
]


def layout_of(dtype: str = "float32") -> Layout:
    """A tensor without a constraint between those that have one."""
    made = [TensorSpec(f"held.{i}", shape, stride, dtype, 0, c) for i, (shape, stride, c) in enumerate(HELD)]
    free = [TensorSpec(f"free.{i}", (101,), (1,), dtype, 0) for i in range(len(made))]
    return Layout(tuple(each for pair in zip(made, free, strict=True) for each in pair))


def whole(values: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """What plain PyTorch makes of it."""
    tensor = shaped(values.clone(), spec.shape, spec.stride)
    if spec.constraint == BOUNDED:
        tensor.renorm_(2, 0, 0.7)
    elif spec.constraint is not None and spec.constraint.norm is None:
        tensor.clamp_(-0.5, 0.25)
    return tensor


@pytest.mark.parametrize("rule", PLACEMENTS)
@pytest.mark.parametrize(("num_ps", "block"), [(1, 512), (3, 512), (3, 1 << 18), (7, 100)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pieces_and_blocks_are_as_the_whole(
    rule: str, num_ps: int, block: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update whose gradient is zero, by plain SGD, leaves the constraint's work alone."""
    small_blocks(monkeypatch, block)
    layout = layout_of(dtype)
    plan = place(layout, num_ps, rule)
    generator = torch.Generator().manual_seed(1)
    first = [
        torch.randn(max(t.numel, 1), generator=generator)[: t.numel].to(getattr(torch, dtype)) for t in layout.trained
    ]
    got = [torch.full_like(values, float("nan")) for values in first]
    for index, pieces in enumerate(plan.shards):
        shard = Shard(layout, plan, index, spec_by_name("SGD plain"), master="model")
        for piece in pieces:
            on_shard(shard, piece, dtype).copy_(first[piece.tensor][piece.start : piece.stop])
        slot = shard.new_slot()
        shard.apply([(slot, False, True)])
        for piece in pieces:
            got[piece.tensor][piece.start : piece.stop] = on_shard(shard, piece, dtype)
            every, item = layout.trained[piece.tensor].cut_every, ITEM_BYTES[dtype]
            assert piece.start % every == 0 and piece.start * item % ALIGN_BYTES == 0
    for spec, before, after in zip(layout.trained, first, got, strict=True):
        if spec.constraint == COLUMNS:
            continue  # below
        want = whole(before, spec)
        assert torch.equal(want, shaped(after, spec.shape, spec.stride)), spec.name
        if spec.constraint is not None and spec.numel > 9:
            assert not torch.equal(before, after), "a constraint that is left out would be seen"


def on_shard(shard: Shard, piece: Piece, dtype: str) -> torch.Tensor:
    return flat(shard.memory, dtype, piece.offset, piece.numel)


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
def test_norms_of_keras(axes: tuple[int, ...]) -> None:
    """keras.constraints.MinMaxNorm in numpy."""
    values = np.random.default_rng(0).normal(size=(33, 7)).astype("float32")
    norms = np.sqrt(np.sum(np.square(values), axis=axes, keepdims=True))
    wanted = 0.8 * np.clip(norms, 0.2, 0.6) + 0.2 * norms
    tensor = torch.from_numpy(values.copy())
    NormRange(0.2, 0.6, 0.8, axes, 1e-7).hold(tensor)
    assert np.abs(tensor.numpy() - values * (wanted / (1e-7 + norms))).max() < 1e-6


def test_large_tables_are_cut_between_rows() -> None:
    table = TensorSpec("table", (10_000_000, 50), (50, 1), "float32", 0, BOUNDED)
    shares = place(Layout((table,)), 3, "bytes").shard_bytes
    assert max(shares) - min(shares) < 64 * 50 * 4


@pytest.mark.parametrize(
    ("spec", "constraint"),
    [
        (TensorSpec("t", (3,), (1,), "float32", 0), BOUNDED),
        (TensorSpec("t", (3, 2), (2, 1), "float32", 0), Constraint(min=1.0, max=0.0)),
        (TensorSpec("t", (3, 2), (2, 1), "int64", 0), Constraint(min=1.0)),
        (TensorSpec("t", (3, 2), (2, 1), "float32", 0), Constraint(norm=NormRange(0, 1, 1, (2,), 1e-7))),
        (TensorSpec("t", (3, 2), (2, 1), "float32", 0), Constraint(norm=NormRange(0, 1, 1, (), 1e-7))),
        (TensorSpec("t", (3, 2), (2, 1), "float32", -1), Constraint(min=1.0)),
    ],
)
def test_a_ps_refuses_what_no_tensor_can_satisfy(spec: TensorSpec, constraint: Constraint) -> None:
    held = replace(spec, constraint=constraint)
    assert problems(Layout((held,))) and not problems(Layout((spec,)))
    assert f"with {constraint}" in difference(Layout((held,)), Layout((spec,)))[0]
