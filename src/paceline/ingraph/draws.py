"""WHO draws random numbers now? One at a time from each of torch's generators, which all threads of a task share.

Used by ingraph/copies around what may draw, and by ingraph/mirror, which steps aside while it waits for another task.
Must never be held while another task is waited for: to answer, that one may need a turn here.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Turn:
    """One generator, and whose turn it is.

    >>> turn = Turn(torch.Generator().manual_seed(1))
    >>> with turn.taken() as generator:
    ...     first = torch.rand(1, generator=generator)
    >>> bool(torch.rand(1, generator=turn.generator) == first)
    True
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self._lock = threading.Lock()
        self._before: torch.Tensor | None = None  # the state to go back to

    @contextmanager
    def taken(self, is_undone: bool = True) -> Iterator[torch.Generator]:
        """Nobody else draws inside; afterwards it is as if nothing had been drawn, unless that is not wanted."""
        self._begin(is_undone)
        _here.turns.append(self)
        try:
            yield self.generator
        finally:
            _here.turns.remove(self)
            self._end()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Others may draw inside; afterwards it goes on where it was."""
        is_undone, mine = self._before is not None, self.generator.get_state()
        self._end()
        try:
            yield
        finally:
            self._begin(is_undone)
            if is_undone:
                self.generator.set_state(mine)

    def _begin(self, is_undone: bool) -> None:
        self._lock.acquire()
        self._before = self.generator.get_state() if is_undone else None

    def _end(self) -> None:
        if self._before is not None:
            self.generator.set_state(self._before)
        self._lock.release()


class _Here(threading.local):
    def __init__(self) -> None:
        self.turns: list[Turn] = []


_here = _Here()


@functools.cache
def turn_of(device: torch.device) -> Turn:
    """The turn of a device's generator; CUDA has started by then."""
    return Turn(torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0])


@contextmanager
def aside() -> Iterator[None]:
    """While this thread waits for another task, others may draw."""
    if not _here.turns:
        yield
        return
    with _here.turns[0].lent():  # a thread computes on one device at a time
        yield
