"""WHEN may a node run? Each counts what it still waits for; at zero it enters the ready queue (document 002).

One for each part of a step, asked by ingraph/parts. Pure: that a node is done, or that its value was received, comes
in; which node is next goes out. Must never run anything, nor wait.
"""

from collections import deque
from collections.abc import Collection, Mapping


class Schedule:
    """The counts and the ready queue of one part.

    >>> schedule = Schedule({"a": [], "b": ["a"], "c": ["a", "x"]})  # x comes from another device
    >>> schedule.next(), schedule.next()
    ('a', None)
    >>> schedule.done("a"); schedule.next()
    'b'
    >>> schedule.done("x"); schedule.next()
    'c'
    >>> schedule.done("b"); schedule.done("c"); schedule.is_over
    True
    """

    def __init__(self, needs: Mapping[str, Collection[str]]) -> None:
        self._waits_for = {name: len(set(needed)) for name, needed in needs.items()}
        self._needed_by: dict[str, list[str]] = {}
        for name, needed in needs.items():
            for each in dict.fromkeys(needed):
                self._needed_by.setdefault(each, []).append(name)
        self._ready = deque(name for name, count in self._waits_for.items() if count == 0)
        self._left = set(needs)
        self._known: set[str] = set()

    def next(self) -> str | None:
        """The node to run now, if any is ready."""
        return self._ready.popleft() if self._ready else None

    def done(self, name: str) -> None:
        """A node has run here, or its value came from elsewhere: those that waited for it count down, once."""
        if name in self._known:
            return
        self._known.add(name)
        self._left.discard(name)
        for each in self._needed_by.get(name, ()):
            self._waits_for[each] -= 1
            if self._waits_for[each] == 0:
                self._ready.append(each)

    @property
    def is_over(self) -> bool:
        """Every node of this part has run."""
        return not self._left

    @property
    def awaited(self) -> list[str]:
        """What has to come from elsewhere before the rest can run."""
        return [name for name in self._needed_by if name not in self._known and name not in self._waits_for]
