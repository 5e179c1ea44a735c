"""HOW does a record reach the disk while training goes on? A bounded buffer, emptied by one daemon thread.

Called by `sink` (JSON lines) and `summaries` (TensorBoard), which say what writing an item means.
Must never make `put` wait or raise: what does not fit or cannot be written is dropped and counted.
"""

import threading
import time
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from paceline import forks

PACE_S = 0.25  # after a batch the thread rests this long, so that a burst becomes few writes

Item = TypeVar("Item")
ItemIn = TypeVar("ItemIn", contravariant=True)


class Writer(Protocol[ItemIn]):
    """What the thread does with items; only the thread calls it, and any method may raise or take long."""

    def write(self, item: ItemIn) -> None:
        """Write one item; one that raises counts as dropped."""

    def flush(self) -> None:
        """Make everything written so far visible to readers."""

    def finish(self, dropped: int) -> None:
        """The buffer is empty and closed: write the last words, let go of the file."""


class Background(Generic[Item]):
    """Items go in from any thread, and come out in order at `writer`."""

    def __init__(self, name: str, writer: Writer[Item], capacity: int = 1024) -> None:
        self._writer = writer
        self._capacity = capacity
        self._items: list[Item] = []
        self._dropped = 0
        self._closed = False
        self.cpu_s = 0.0  # processor time of the thread so far
        self._wake = threading.Condition()  # its lock is reentrant: a signal handler may put as well
        self._owner = forks.Owner()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """How many items were lost so far."""
        return self._dropped

    def put(self, item: Item) -> None:
        """Hand over one item; drop it when the buffer is full or closed."""
        if self._is_forked():
            return
        with self._wake:
            if self._closed or len(self._items) >= self._capacity:
                self._dropped += 1
                return
            self._items.append(item)
            self._wake.notify()

    def drop(self) -> None:
        """Count an item that the caller could not even make."""
        if self._is_forked():
            return
        with self._wake:
            self._dropped += 1

    def close(self, timeout_s: float) -> bool:
        """Write what is left and end the thread; False when the disk was too slow for the time given."""
        if self._is_forked():
            return True
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _is_forked(self) -> bool:
        """A forked child has no such thread, and may have inherited the lock while it was held."""
        return not self._owner.is_here

    def _run(self) -> None:
        is_last = False
        while not is_last:
            with self._wake:
                self._wake.wait_for(lambda: self._items or self._closed)
                batch, self._items = self._items, []
                is_last = self._closed
            self._write(batch)
            self.cpu_s = time.thread_time()
            with self._wake:
                self._wake.wait_for(lambda: self._closed, timeout=PACE_S)
        with suppress(Exception):  # the last words did not fit on the disk either: nobody is left to tell
            self._writer.finish(self._dropped)

    def _write(self, batch: list[Item]) -> None:
        failed = 0
        for item in batch:
            try:
                self._writer.write(item)
            except Exception:
                failed += 1
        try:
            self._writer.flush()
        except Exception:
            failed = len(batch)
        with self._wake:
            self._dropped += failed
