"""WHICH slice lives on which ps? Every rule covers every element exactly once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.params.layout import ALIGN_BYTES, ITEM_BYTES, Layout, TensorSpec, align
from paceline.params.placement import PLACEMENTS, Plan, place, table


def layout_of(*tensors: tuple[int, str]) -> Layout:
    specs = [TensorSpec(f"t{i}", (n,), (1,), dtype, 0) for i, (n, dtype) in enumerate(tensors)]
    specs.insert(len(specs) // 2, TensorSpec("carried", (1000,), (1,), "float32"))
    return Layout(tuple(specs))


# Widest first, as a worker lays them out.
tensors = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2, 15, 16, 17, 31, 64, 100, 1000]), st.sampled_from(["float64", "float32", "float16"])
    ),
    min_size=1,
    max_size=8,
).map(lambda drawn: sorted(drawn, key=lambda t: -ITEM_BYTES[t[1]]))
layouts = tensors.map(lambda drawn: layout_of(*drawn))
every_rule = pytest.mark.parametrize("rule", PLACEMENTS)


def check(layout: Layout, plan: Plan) -> None:
    """1. every element once; 2. cuts at multiples of 64 bytes; 3. pieces in their shard, apart; 4. side by side."""
    for index, tensor in enumerate(layout.trained):
        item = ITEM_BYTES[tensor.dtype]
        pieces = [piece for _, piece in plan.owners(index)]
        assert [i for p in pieces for i in range(p.start, p.stop)] == list(range(tensor.numel))  # 1
        assert all(p.start * item % ALIGN_BYTES == 0 and p.offset % ALIGN_BYTES == 0 for p in pieces)  # 2
        if tensor.numel:  # 4
            at = [plan.base(shard) + piece.offset for shard, piece in plan.owners(index)]
            assert plan.tensor_offsets()[index] == at[0]
            assert at == [at[0] + p.start * item for p in pieces]
    for pieces, size in zip(plan.shards, plan.shard_bytes, strict=True):  # 3
        end = 0
        for piece in pieces:
            assert piece.offset >= end
            end = piece.offset + piece.numel * ITEM_BYTES[layout.trained[piece.tensor].dtype]
        assert end <= size
        assert size % ALIGN_BYTES == 0


@every_rule
@given(layout=layouts, num_ps=st.integers(1, 6))
def test_every_rule_covers_every_element_once(rule: str, layout: Layout, num_ps: int) -> None:
    plan = place(layout, num_ps, rule)
    assert plan.num_ps == num_ps
    assert plan.total_bytes == sum(align(t.size_bytes) for t in layout.trained)
    check(layout, plan)
    assert place(layout, num_ps, rule) == plan


@given(layout=layouts, num_ps=st.integers(1, 6))
def test_bytes_is_even_to_within_64_bytes(layout: Layout, num_ps: int) -> None:
    sizes = place(layout, num_ps, "bytes").shard_bytes
    assert max(sizes) - min(sizes) <= ALIGN_BYTES


@pytest.mark.parametrize("rule", ["round_robin", "greedy"])
@given(layout=layouts, num_ps=st.integers(1, 6))
def test_the_other_rules_cut_no_tensor(rule: str, layout: Layout, num_ps: int) -> None:
    plan = place(layout, num_ps, rule)
    assert all(len(plan.owners(i)) == 1 for i in range(len(layout.trained)))


def test_round_robin_is_tensorflows() -> None:
    plan = place(layout_of((100, "float32"), (1, "float32"), (50, "float32"), (2, "float32")), 3, "round_robin")
    assert [plan.owners(i)[0][0] for i in range(4)] == [0, 1, 2, 0]


def test_greedy_gives_the_largest_first_to_whoever_has_least() -> None:
    plan = place(layout_of((16, "float32"), (160, "float32"), (80, "float32"), (64, "float32")), 2, "greedy")
    assert [plan.owners(i)[0][0] for i in range(4)] == [1, 0, 1, 1]
    assert plan.shard_bytes == (640, 640)


@every_rule
def test_more_ps_than_there_is_to_place_leaves_some_empty(rule: str) -> None:
    layout = layout_of((16, "float32"))
    plan = place(layout, 4, rule)
    assert sorted(plan.shard_bytes) == [0, 0, 0, 64]
    assert sum(bool(pieces) for pieces in plan.shards) == 1
    check(layout, plan)


def test_a_big_tensor_is_split_over_all() -> None:
    plan = place(layout_of((1 << 16, "float32")), 4, "bytes")
    assert [p.numel for _, p in plan.owners(0)] == [1 << 14] * 4


def test_an_unknown_rule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="bytes, round_robin, greedy"):
        place(layout_of((1, "float32")), 1, "random")


def test_the_table_names_slices_and_tasks() -> None:
    layout = layout_of((64, "float32"), (3, "float32"))
    assert table(layout, place(layout, 2, "bytes")) == [
        "t0[0:48]: (Variable float32[64], 192 bytes): /job:ps/replica:0/task:0/device:CPU:0",
        "t0[48:64]: (Variable float32[64], 64 bytes): /job:ps/replica:0/task:1/device:CPU:0",
        "t1: (Variable float32[3], 12 bytes): /job:ps/replica:0/task:1/device:CPU:0",
    ]
