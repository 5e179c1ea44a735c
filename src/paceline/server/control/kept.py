"""Fields of the control plane that outlive the process; each is marked where it is declared.

KNOWN fields are written to the journal after every event, before anything is sent; COUNTED fields four times a second,
so that a death costs a moment of them; all other fields begin anew. A field is found through the dataclasses
that lead to it, and encoded under no name, so a new one costs one line and a kept memory is readable by the same
version of the program only.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
KNOWN, COUNTED = {"kept": "known"}, {"kept": "counted"}  # metadata of a field


class KeptFields(Generic[T]):
    """The fields of one kind in a dataclass and in those that it holds.

    >>> import msgspec
    >>> from dataclasses import dataclass, field
    >>> @dataclass
    ... class Ps:
    ...     version: int = field(default=0, metadata=KNOWN)
    ...     applied: dict[tuple[int, int], int] = field(default_factory=dict, metadata=KNOWN)
    ...     is_busy: bool = False
    >>> kept, ps = KeptFields(Ps, KNOWN), Ps()
    >>> data = msgspec.msgpack.encode(kept.values(Ps(7, {(0, 1): 5}, True)))
    >>> kept.take(ps, msgspec.msgpack.decode(data, type=kept.type))
    >>> ps
    Ps(version=7, applied={(0, 1): 5}, is_busy=False)
    """

    def __init__(self, of: type[T], kind: dict[str, str]) -> None:
        found = list(_fields(of, kind, ""))
        self._paths = [path for path, _ in found]
        self.type: Any = tuple[tuple(each for _, each in found)]  # type: ignore[misc]
        self.values = attrgetter(*self._paths)  # of an object, in the order of the paths

    def take(self, into: T, values: tuple[Any, ...]) -> None:
        """Set the fields of an object to values that were kept."""
        for path, value in zip(self._paths, values, strict=True):
            way, _, name = path.rpartition(".")
            setattr(attrgetter(way)(into) if way else into, name, value)


def _fields(of: type, kind: dict[str, str], way: str) -> Iterator[tuple[str, Any]]:
    types = get_type_hints(of)
    for each in fields(of):
        if each.metadata == kind:
            yield way + each.name, types[each.name]
        elif is_dataclass(types[each.name]):
            yield from _fields(types[each.name], kind, f"{way}{each.name}.")


def counters(kind: Any, value: Any) -> Any:
    """Decode what msgspec does not know: counters, counters by worker, and sums by worker.

    It also asks for values of no type: options of optimizers and schedulers, which stay as they are.
    """
    if kind is object:
        return value
    if get_origin(kind) is defaultdict:
        if get_args(kind)[1] is float:
            return defaultdict(float, value)
        return defaultdict(Counter, {key: Counter(counts) for key, counts in value.items()})
    if get_origin(kind) is Counter:
        return Counter(value)
    raise NotImplementedError(kind)
