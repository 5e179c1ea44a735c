"""WHAT is trained? Names, shapes, strides and places in flat memory."""

import msgspec
import pytest

from paceline.params.layout import (
    ALIGN_BYTES,
    ITEM_BYTES,
    Layout,
    TensorSpec,
    align,
    difference,
    offsets_of,
    total_bytes,
)

W = TensorSpec("w", (3, 5), (5, 1), "float32", 0)
B = TensorSpec("b", (5,), (1,), "float32", 1)
RUNNING = TensorSpec("bn.mean", (7,), (1,), "float64")
COUNT = TensorSpec("bn.count", (), (), "int64")
LAYOUT = Layout((W, RUNNING, B, COUNT))


def test_trained_and_carried_are_told_apart_by_their_group() -> None:
    assert LAYOUT.trained == (W, B)
    assert LAYOUT.carried == (RUNNING, COUNT)
    assert W.is_trained and not RUNNING.is_trained


def test_sizes() -> None:
    assert (W.numel, W.size_bytes) == (15, 60)
    assert (COUNT.numel, COUNT.size_bytes) == (1, 8)
    assert TensorSpec("e", (4, 0), (1, 1), "bfloat16", 0).size_bytes == 0


@pytest.mark.parametrize(("size", "aligned"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128)])
def test_align(size: int, aligned: int) -> None:
    assert align(size) == aligned


def test_every_tensor_starts_at_a_multiple_of_64_bytes_and_none_overlap() -> None:
    tensors = [TensorSpec(str(n), (n,), (1,), dtype, 0) for n in (0, 1, 16, 17, 100) for dtype in ITEM_BYTES]
    offsets = offsets_of(tensors)
    assert all(offset % ALIGN_BYTES == 0 for offset in offsets)
    ends = [offset + t.size_bytes for offset, t in zip(offsets, tensors, strict=True)]
    assert all(end <= start for end, start in zip(ends, offsets[1:], strict=False))
    assert total_bytes(tensors) >= ends[-1]
    assert total_bytes(tensors) % ALIGN_BYTES == 0


def test_the_carried_block() -> None:
    assert LAYOUT.carried_offsets == (0, 64)
    assert LAYOUT.carried_bytes == 128
    assert Layout((W,)).carried_bytes == 0


def test_a_layout_travels() -> None:
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(LAYOUT), type=Layout)
    assert again == LAYOUT
    assert again.fingerprint == LAYOUT.fingerprint
    assert Layout((W, B)).fingerprint != Layout((B, W)).fingerprint


def test_equal_layouts_differ_in_nothing() -> None:
    assert difference(LAYOUT, Layout(LAYOUT.tensors)) == []


@pytest.mark.parametrize(
    ("theirs", "line"),
    [
        ((W,), "- b: only here"),
        ((W, B, COUNT), "+ bn.count: only there"),
        ((msgspec.structs.replace(W, shape=(5, 3), stride=(3, 1)), B), "~ w: here float32[3, 5]"),
        ((msgspec.structs.replace(W, stride=(1, 3)), B), "there float32[3, 5] stride [1, 3]"),
        ((msgspec.structs.replace(W, dtype="float16"), B), "there float16"),
        ((msgspec.structs.replace(W, group=-1), B), "stride [5, 1] carried"),
        ((msgspec.structs.replace(W, group=2), B), "stride [5, 1] trained in group 2"),
        ((B, W), "a different order"),
    ],
)
def test_a_difference_is_told_by_tensor(theirs: tuple[TensorSpec, ...], line: str) -> None:
    lines = difference(Layout((W, B)), Layout(theirs))
    assert len(lines) == 1
    assert line in lines[0]
