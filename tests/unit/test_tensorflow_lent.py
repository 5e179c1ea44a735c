"""Values handed to a graph: without a copy, and never changed under anybody who reads them."""

from typing import Any

import numpy as np
import pytest

from paceline.frameworks.keras.aligned_arrays import ALIGNMENT, MOST, Lent


def test_a_set_is_taken_again_only_when_nobody_holds_an_array_or_a_view_of_it() -> None:
    source = np.zeros((3, 5), np.float32)
    lent = Lent([source])
    (first,) = lent.filled()
    address, part = first.ctypes.data, first[1:2]
    assert address % ALIGNMENT == 0
    del first
    (second,) = lent.filled()
    assert second.ctypes.data != address, "a view of it was still there"
    del part, second
    assert address in {lent.filled()[0].ctypes.data for _ in range(3)}


def test_who_keeps_every_value_keeps_them_unchanged() -> None:
    source = np.zeros(4, np.float32)
    lent = Lent([source, source.reshape(2, 2)])
    kept = []
    for number in range(3 * MOST):
        source[:] = number
        kept.append(lent.filled())
    assert [float(flat[0]) for flat, _ in kept] == list(range(3 * MOST))
    assert all((flat == square.reshape(-1)).all() for flat, square in kept)


def test_tensorflow_keeps_a_set_as_long_as_it_reads_it_and_gives_it_back() -> None:
    tf: Any = pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")
    source = np.zeros(100_000, np.float32)
    lent = Lent([source])
    addresses: list[int] = []

    def call() -> Any:
        (array,) = lent.filled()
        addresses.append(array.ctypes.data)
        return array

    variable = tf.Variable(tf.zeros(source.shape))

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> None:
        value = tf.numpy_function(call, [], tf.float32)
        value.set_shape(source.shape)
        variable.assign(value)

    read, read_later = [], []
    for number in range(20):
        source[:] = number
        step()
        assert float(variable[-1]) == number
        if number < 3:
            read.append(variable.read_value())
            read_later.append(variable.numpy())
    assert [float(each[0]) for each in read] == [0.0, 1.0, 2.0]
    assert [float(each[0]) for each in read_later] == [0.0, 1.0, 2.0]
    assert len(set(addresses[10:])) <= MOST, "TensorFlow gave none of them back"
