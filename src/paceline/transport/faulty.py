"""Injected network faults: a stream around a stream that delays, limits, changes, cuts and swallows, and counts.

Used by a worker that `--chaos` names (worker/step/injection), and by tests. Only the worker's end is wrapped, after the
handshake: the ps sees a bad network. Must never change the memory that it is given to send.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from paceline.errors import ConnectionLost, WaitTimeout
from paceline.params.arena import Arena
from paceline.transport.base import Buffer, Stream
from paceline.transport.channel import Channel
from paceline.transport.security import Role
from paceline.wire.frames import FRAME_BYTES, Kind

LOOK_S = 0.1  # a read that is cut off raises WaitTimeout after so long
PUSH_ID = slice(16, 24)  # of a frame


class Connect(Protocol):
    """The type of transport/channel's connect."""

    def __call__(self, address: str, lane: str, secret: bytes, timeout_s: float = ..., role: Role = ...) -> Channel: ...


class Trouble:
    """The faults of all connections of one worker. `on_fault` is called with the kind of each, and how often."""

    def __init__(
        self,
        on_fault: Callable[[str, int], None],
        *,
        delay_s: float = 0.0,
        bytes_per_s: float = 0.0,
        flip_chance: float = 0.0,
        swallow_acks: int = 0,
        seed: str = "",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.needs_tcp = bool(bytes_per_s or swallow_acks)
        self._on_fault = on_fault
        self._delay_s = delay_s
        self._bytes_per_s = bytes_per_s
        self._flip_chance = flip_chance
        self._swallow_acks = swallow_acks
        self._random = random.Random(seed)
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_s = 0.0  # when the line will have carried all that it was given
        self._cut_until_s = 0.0
        self._flips_next = False
        self._swallowed: set[tuple[str, int]] = set()  # (ps, push id)
        self._pushes: set[int] = set()

    # --- triggers ---------------------------------------------------------------------------------------------

    def cut(self, seconds: float) -> None:
        """Let nothing in or out for so long."""
        self._cut_until_s = self._clock() + seconds

    def flip_next(self) -> None:
        """Flip a bit of the next message."""
        self._flips_next = True

    def around(self, connect: Connect) -> Connect:
        """Return a connect whose connections have these faults; while the worker is cut off, it raises."""

        def connected(
            address: str, lane: str, secret: bytes, timeout_s: float = 5.0, role: Role = Role.WORKER
        ) -> Channel:
            if self.cut_s() > 0:
                raise ConnectionLost(f"no way to {address}: cut off by --chaos")
            is_by_tcp = self.needs_tcp and lane == "auto"
            channel = connect(address, "tcp" if is_by_tcp else lane, secret, timeout_s, role)
            channel.stream = Faulty(channel.stream, self, address)
            return channel

        return connected

    # --- called by streams ------------------------------------------------------------------------------------

    def cut_s(self) -> float:
        """Return how long the cut still lasts; 0 or less: there is none."""
        return self._cut_until_s - self._clock()

    def before_send(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """Wait as long as these bytes have to; return what to send instead."""
        while (left_s := self.cut_s()) > 0:
            self._sleep(left_s)
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        if self._delay_s:
            self._on_fault("delay", 1)
            self._sleep(self._delay_s)
        self.carried(size)
        return self._flipped(buffers, size)

    def carried(self, size_bytes: int) -> None:
        """Wait until the line has carried so many bytes; all connections and both directions share it."""
        if not self._bytes_per_s:
            return
        with self._lock:
            self._free_s = max(self._clock(), self._free_s) + size_bytes / self._bytes_per_s
            wait_s = self._free_s - self._clock()
        if wait_s > 0:
            self._on_fault("limit", 1)
            self._sleep(wait_s)

    def _flipped(self, buffers: Sequence[Buffer], size_bytes: int) -> Sequence[Buffer]:
        if not self._flips_next and not self._flip_chance:
            return buffers
        with self._lock:  # heartbeats come from a thread of their own
            chance = 1.0 if self._flips_next else 1.0 - (1.0 - self._flip_chance) ** size_bytes
            if not size_bytes or self._random.random() >= chance:
                return buffers
            self._flips_next = False
            at, bit = self._random.randrange(size_bytes), 1 << self._random.randrange(8)
        self._on_fault("flip", 1)
        return flipped(buffers, at, bit)

    def swallows(self, head: memoryview, ps: str) -> bool:
        """Tell whether this is the first answer to a push whose answer is to be lost."""
        if not self._swallow_acks or head[0] != Kind.ANSWER:
            return False
        push_id = int.from_bytes(head[PUSH_ID], "little")
        is_one_of_them = push_id in self._pushes or len(self._pushes) < self._swallow_acks
        if not push_id or (ps, push_id) in self._swallowed or not is_one_of_them:
            return False
        self._swallowed.add((ps, push_id))
        self._pushes.add(push_id)
        self._on_fault("swallow-acks", 1)
        return True


def flipped(buffers: Sequence[Buffer], at: int, bit: int) -> list[Buffer]:
    """Return the same bytes with one bit changed, in a copy.

    >>> [bytes(b) for b in flipped([b"ab", b"cd"], 2, 1)]
    [b'ab', b'bd']
    """
    changed: list[Buffer] = []
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        if 0 <= at < view.nbytes:
            copy = bytearray(view)
            copy[at] ^= bit
            changed.append(copy)
        else:
            changed.append(buffer)
        at -= view.nbytes
    return changed


class Faulty(Stream):
    """A stream to one ps with injected faults."""

    def __init__(self, inner: Stream, trouble: Trouble, ps: str) -> None:
        self._inner = inner
        self._trouble = trouble
        self._ps = ps
        self.name = inner.name

    @property
    def shares_memory(self) -> bool:  # type: ignore[override]
        return self._inner.shares_memory

    @property
    def lane(self) -> str:  # type: ignore[override]
        return self._inner.lane

    def set_timeout(self, seconds: float) -> None:
        self._inner.set_timeout(seconds)

    def set_send_timeout(self, seconds: float) -> None:
        self._inner.set_send_timeout(seconds)

    def send(self, buffers: Sequence[Buffer], size_bytes: int = -1) -> None:
        self._inner.send(self._trouble.before_send(buffers), size_bytes)

    def recv_some(self, view: memoryview) -> int:
        self._wait_for_the_cut()
        count = self._inner.recv_some(view)
        self._trouble.carried(count)
        return count

    def recv_into(self, view: memoryview) -> None:
        self._wait_for_the_cut()
        self._inner.recv_into(view)
        self._trouble.carried(view.nbytes)
        if view.nbytes == FRAME_BYTES and self._trouble.swallows(view, self._ps):
            self.close()
            raise ConnectionLost(f"the connection to {self.name} ended: --chaos swallowed an answer")

    def _wait_for_the_cut(self) -> None:
        left_s = self._trouble.cut_s()
        if left_s > 0:
            time.sleep(min(left_s, LOOK_S))
            raise WaitTimeout("nothing came in time: cut off by --chaos")

    def kernel_bytes(self) -> tuple[int, int] | None:
        return self._inner.kernel_bytes()

    def send_arenas(self, arenas: Sequence[Arena]) -> None:
        self._inner.send_arenas(arenas)

    def recv_arenas(self, sizes: Sequence[int], writable: Sequence[bool]) -> list[Arena]:
        return self._inner.recv_arenas(sizes, writable)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def close(self) -> None:
        with suppress(OSError):
            self._inner.close()

    def close_in_child(self) -> None:
        self._inner.close_in_child()
