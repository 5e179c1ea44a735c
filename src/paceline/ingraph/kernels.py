"""WHICH ops are there without anybody writing them? The few that graphs and TensorFlow's small programs need.

Registered in every process that serves ops or runs a session, under TensorFlow's names. Each is one call of torch.
"""

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from paceline.ingraph.op import Op, register


def const(value: Any) -> Any:
    """What it was given."""
    return value


def matmul(a: Any, b: Any) -> Any:
    return torch.matmul(a, b)


def add(a: Any, b: Any) -> Any:
    return a + b


def subtract(a: Any, b: Any) -> Any:
    return a - b


def multiply(a: Any, b: Any) -> Any:
    return a * b


def divide(a: Any, b: Any) -> Any:
    return a / b


def add_n(inputs: list[Any]) -> Any:
    """The sum, from the first to the last."""
    return reduce(operator.add, inputs)


def identity(value: Any) -> Any:
    return value


def no_op() -> None:
    """Nothing, in its turn."""


def item(value: Any, key: int | str) -> Any:
    """One element of what an op returned."""
    return value[key]


NAMES: dict[str, Callable[..., Any]] = {
    "Const": const,
    "MatMul": matmul,
    "Add": add,
    "Sub": subtract,
    "Mul": multiply,
    "RealDiv": divide,
    "AddN": add_n,
    "Identity": identity,
    "NoOp": no_op,
    "Item": item,
}
KERNELS: dict[str, Op[..., Any]] = {kind: register(Op(fn, kind=kind)) for kind, fn in NAMES.items()}
