"""WHICH types do TensorFlow's programs name? `tf.float32` and its kin, and how a Python value becomes one of them.

Used by ingraph/tf1 for constants, placeholders and what is fed to them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.errors import UsageError


@dataclass(frozen=True)
class DType:
    """A type of tensor elements; strings are bytes, as in TensorFlow.

    >>> float32.tensor([[1, 2]], None)
    tensor([[1., 2.]])
    >>> string.tensor("hello", None)
    b'hello'
    """

    name: str
    torch_dtype: torch.dtype | None

    def tensor(self, value: Any, shape: Any) -> Any:
        """The value in this type; refused where it does not fit the shape, in which None is any size."""
        if self.torch_dtype is None:
            return _as_bytes(value)
        try:
            made = torch.as_tensor(value, dtype=self.torch_dtype)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"{_short(value)} cannot become {self.name}: {error}.") from None
        if shape is not None and not _fits(made.shape, shape):
            raise UsageError(f"A value of shape {tuple(made.shape)} was given where {tuple(shape)} belongs.")
        return made

    def __repr__(self) -> str:
        return f"tf.{self.name}"


float16 = DType("float16", torch.float16)
float32 = DType("float32", torch.float32)
float64 = DType("float64", torch.float64)
bfloat16 = DType("bfloat16", torch.bfloat16)
int8 = DType("int8", torch.int8)
int16 = DType("int16", torch.int16)
int32 = DType("int32", torch.int32)
int64 = DType("int64", torch.int64)
uint8 = DType("uint8", torch.uint8)
bool_ = DType("bool", torch.bool)
string = DType("string", None)
ALL = (float16, float32, float64, bfloat16, int8, int16, int32, int64, uint8, bool_, string)


def guessed(value: Any) -> DType:
    """The type that TensorFlow gives to a value: Python's floats are float32, its whole numbers int32."""
    if isinstance(value, torch.Tensor):
        return _of(value.dtype, value)
    array = _array(value)
    if array.dtype.kind in "SU":
        return string
    if isinstance(value, np.ndarray | np.generic):
        try:
            return _of(torch.from_numpy(np.empty(0, array.dtype)).dtype, value)
        except TypeError:
            raise UsageError(f"An array of type {array.dtype} is no tensor.") from None
    plain = {"b": bool_, "i": int32, "u": int64, "f": float32}
    if array.dtype.kind not in plain:
        raise UsageError(f"{_short(value)} is no tensor; give numbers, strings, or nested lists of them.")
    return plain[array.dtype.kind]


def _of(dtype: torch.dtype, value: Any) -> DType:
    for each in ALL:
        if each.torch_dtype == dtype:
            return each
    raise UsageError(f"{_short(value)} has the type {dtype}, which TensorFlow's programs have no name for here.")


def _fits(shape: torch.Size, wanted: Any) -> bool:
    return len(shape) == len(wanted) and all(w is None or s == w for s, w in zip(shape, wanted, strict=True))


def _as_bytes(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    array = _array(value)
    if array.dtype.kind not in "SU":
        raise UsageError(f"{_short(value)} is no string.")
    return np.char.encode(array, "utf-8") if array.dtype.kind == "U" else array


def _array(value: Any) -> Any:
    try:
        return np.asarray(value)
    except ValueError:
        raise UsageError(f"{_short(value)} is no tensor: its lists differ in length.") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
