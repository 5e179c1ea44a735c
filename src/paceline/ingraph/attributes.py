"""WHAT else is there to a module besides its tensors? Its layers, and their plain attributes, such as a dropout's `p`.

Used by ingraph/mirror for copies on other tasks and by ingraph/replicas for those here: a copy hears of an attribute
that has changed since it was made; that layers came or went it cannot follow. Must never set what is not plain.
"""

from types import NoneType
from typing import Any

from torch import nn

from paceline.errors import UsageError

Attributes = dict[str, dict[str, Any]]  # of each layer, by its name
Structure = list[
    tuple[str, str, list[tuple[str, list[int]]]]
]  # of each layer: name, class, names and shapes of tensors

_PLAIN = (bool, int, float, str, NoneType)
_TORCHS = frozenset(vars(nn.Module()))


def attributes_of(module: nn.Module) -> Attributes:
    """All that is plain: numbers, strings, None, and tuples of them.

    >>> attributes_of(nn.Sequential(nn.Dropout(0.5)))
    {'': {}, '0': {'p': 0.5, 'inplace': False}}
    """
    return {
        name: {key: value for key, value in vars(part).items() if key not in _TORCHS and _is_plain(value)}
        for name, part in module.named_modules()
    }


def changed(now: Attributes, before: Attributes) -> Attributes:
    """What is other than before. A number or a text that is none any more cannot be told, and is refused; where None
    was, a module keeps what its forward pass has left, and each copy its own.

    >>> changed({"": {"p": 0.1, "kept": 1}}, {"": {"p": 0.5, "kept": 1, "seen": None}})
    {'': {'p': 0.1}}
    """
    told: Attributes = {}
    for name, its in now.items():
        known = before.get(name, {})
        for key in (key for key, value in known.items() if key not in its and value is not None):
            raise UsageError(
                f"{_layer(name)} had a plain {key!r} when it was copied, and now it is none; copies hear of numbers, "
                "strings and tuples of them. Make a buffer of it before."
            )
        new = {key: value for key, value in its.items() if key not in known or not _is_same(value, known[key])}
        if new:
            told[name] = new
    return told


def put(module: nn.Module, told: Attributes) -> None:
    """Make a copy's attributes what they are at its model."""
    parts = dict(module.named_modules())
    for name, its in told.items():
        if name not in parts:
            raise UsageError(f"{_layer(name)} has new attributes, and its copy has no such layer.")
        for key, value in its.items():
            if not _is_plain(value):
                raise UsageError(f"{_layer(name)} cannot hear of its {key!r}: it is no plain value.")
            setattr(parts[name], key, value)


def structure_of(module: nn.Module) -> Structure:
    """What layers there are."""
    return [(name, type(part).__qualname__, _shapes(part)) for name, part in module.named_modules()]


def check_structure(module: nn.Module, before: Structure) -> None:
    """Refuse a module that is not made of what it was made of when it was copied."""
    now = structure_of(module)
    if now == before:
        return
    first = next((its for its in now if its not in before), None) or next(its for its in before if its not in now)
    came = "is new, or another" if first in now else "has gone"
    raise UsageError(
        f"{_layer(first[0])} ({first[1]}) {came} since this {type(module).__name__} was placed or got its towers, and "
        "its copies cannot follow: build the model first."
    )


def _shapes(part: nn.Module) -> list[tuple[str, list[int]]]:
    named = [*part._parameters.items(), *part._buffers.items()]
    return [(name, list(tensor.shape)) for name, tensor in named if tensor is not None]


def _layer(name: str) -> str:
    return f"Layer {name!r}" if name else "The module itself"


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _is_same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or one != one)
