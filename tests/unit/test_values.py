"""WHAT may travel to an op and back? Kind, type, shape and order in memory are kept; the rest is refused by name."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PacelineError, ProtocolError, UsageError
from paceline.ingraph import values
from paceline.wire import ops
from paceline.wire.ops import ALIGN


def there(value: object) -> Any:
    """As it comes out on the other side."""
    description, buffers = values.pack(value)
    return values.unpack(description, values.block_of(buffers))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=20,
)


@given(JSON)
def test_json_values_come_out_as_they_went_in(value: object) -> None:
    came = there(value)
    assert came == value and type(came) is type(value)


def test_numbers_keep_their_kind() -> None:
    came = there((1, 1.0, True, -0.0, math.inf, [2.0, (3,)]))
    assert [type(each) for each in came[:3]] == [int, float, bool] and type(came) is tuple
    assert math.copysign(1, came[3]) == -1 and came[4] == math.inf and came[5] == [2.0, (3,)]
    assert math.isnan(there(math.nan))


@pytest.mark.parametrize("dtype", sorted(values._TENSOR_DTYPES))
def test_tensors_keep_type_shape_and_bits(dtype: str) -> None:
    raw = torch.randint(0, 255, (3, 5, 16), dtype=torch.uint8)
    if dtype == "bool":
        raw = raw % 2
    tensor = raw.view(values._TENSOR_DTYPES[dtype])
    came = there([tensor, tensor[0, 0, 0]])
    for sent, got in zip([tensor, tensor[0, 0, 0]], came, strict=True):
        assert got.dtype == sent.dtype and got.shape == sent.shape
        assert torch.equal(
            got.contiguous().reshape(-1).view(torch.uint8), sent.contiguous().reshape(-1).view(torch.uint8)
        )


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    ],
    ids=["transposed", "channels_last", "permuted"],
)
def test_the_order_in_memory_is_kept(tensor: torch.Tensor) -> None:
    came = there(tensor)
    assert torch.equal(came, tensor) and came.stride() == tensor.stride()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0)[::2],
        torch.arange(2.0)[::2],
        torch.ones(3, 1).expand(3, 4),
        torch.empty(0, 3),
        torch.tensor(5),
        torch.complex(torch.ones(3), torch.ones(3)).conj(),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True) * 2,
    ],
    ids=["strided", "one of two", "expanded", "empty", "scalar", "conjugate", "parameter", "with a history"],
)
def test_any_plain_tensor_comes_as_a_plain_one(tensor: torch.Tensor) -> None:
    came = there(tensor)
    assert torch.equal(came, tensor.detach().resolve_conj()) and came.shape == tensor.shape
    assert type(came) is torch.Tensor and not came.requires_grad


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6, dtype=">i4"),
        np.array(["ab", "c"]),
        np.array([b"ab", b"c"]),
        np.array([True, False]),
        np.empty((0, 2)),
        np.array(3.0),
        np.arange(12).reshape(3, 4)[:, ::2],
    ],
    ids=["float32", "big endian", "text", "bytes", "bool", "empty", "scalar", "strided"],
)
def test_arrays_keep_type_and_shape(array: Any) -> None:
    came = there(array)
    assert type(came) is np.ndarray and came.dtype == array.dtype and came.shape == array.shape
    assert np.array_equal(came, array)


def test_a_numpy_number_stays_one() -> None:
    came = there(np.float64(0.1))
    assert type(came) is np.float64 and came == 0.1


def test_every_tensor_is_aligned_and_writable_and_alone() -> None:
    came = there([torch.ones(1), torch.ones(3), np.ones(5), torch.ones(7)])
    for each in came:
        address = each.data_ptr() if isinstance(each, torch.Tensor) else each.ctypes.data
        assert address % ALIGN == 0
    came[0] += 1
    assert came[1].tolist() == [1.0, 1.0, 1.0] and came[1]._version == 0


class Meters(float):
    pass


@dataclasses.dataclass
class Own:
    x: int = 1


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({1, 2}, "a set"),
        (object(), "an object"),
        (Own(), "test_values.Own"),
        (len, "builtin_function_or_method"),
        (Meters(2), "test_values.Meters"),
        ({1: 2}, "a key of type int"),
        (1 << 70, "more than 64 bits"),
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta"),
        (np.array([object()]), "an array of type object"),
        (np.zeros(2, dtype=[("a", "i4")]), "an array of type"),
        (range(3), "a range"),
        (complex(1, 2), "a complex"),
        ("\ud800", "cannot travel"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else type(value).__name__,
)
def test_anything_else_is_refused_by_its_name(value: object, name: str) -> None:
    with pytest.raises(UsageError, match=name):
        values.pack([value])


def test_a_value_in_itself_is_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(UsageError, match="nested more than"):
        values.pack(endless)


@pytest.mark.parametrize("array", [np.zeros(3, [("none", "S0"), ("n", "i4")])["none"], np.empty(2, "V0")])
def test_an_array_without_bytes_is_refused(array: Any) -> None:
    assert array.dtype.itemsize == 0
    with pytest.raises(UsageError, match="an array of type"):
        values.pack(array)


@pytest.mark.parametrize(
    "item",
    [
        values._Array("|S0", [1 << 45], 0),
        values._Array("<U0", [1 << 45], 0),
        values._Array("|V0", [1 << 45], 0),
        values._Array("|u1", [1] * 65, 0),
        values._Tensor("uint8", [1] * 1000, list(range(1000)), 0),
        values._Array("<f8", [1 << 45], 0),
        values._Tensor("float64", [1 << 45], [0], 0),
    ],
    ids=lambda item: f"{item.dtype} of {len(item.shape)}",
)
def test_no_memory_is_taken_for_what_a_description_claims(item: object) -> None:
    with pytest.raises(ProtocolError, match="does not fit its bytes"):
        values.unpack(values._ENCODER.encode(item), values.block_of([b"12345678"]))


def test_more_bytes_than_this_host_has_are_refused() -> None:
    with pytest.raises(ProtocolError, match=r"at once, this host has .* GB left"):
        values.new_block(1 << 50)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_no_bytes_do_more_than_be_refused(description: bytes, block: bytes) -> None:
    try:
        values.unpack(description, values.block_of([block]))
    except PacelineError:
        return


@given(st.data())
def test_a_changed_description_is_refused_or_harmless(data: st.DataObject) -> None:
    description, buffers = values.pack([torch.ones(4, 4), np.ones(3), {"a": [1, 2]}])
    changed = bytearray(description)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        values.unpack(bytes(changed), values.block_of(buffers))
    except ProtocolError:
        return


@given(st.binary(max_size=200))
def test_no_bytes_are_a_message_about_ops_by_accident(data: bytes) -> None:
    try:
        ops.decode(data)
    except ProtocolError:
        return


def test_a_long_traceback_keeps_both_ends() -> None:
    short = ops.shortened("begin" + "ü" * 100_000 + "end")
    assert short.startswith("begin") and short.endswith("end") and len(short.encode()) <= ops.MAX_TEXT
