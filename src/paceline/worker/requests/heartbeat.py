"""Send heartbeats on a second connection to ps:0, and ask beside the training there.

Used by worker/requests/client. The heartbeat's thread attaches again by itself when its connection ends, so that a
worker which computes for long stays in although ps:0 was started again meanwhile. It never joins and never decides.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from paceline.errors import ClusterError, ConnectionLost, ProtocolError, Refused, WaitTimeout
from paceline.transport.channel import Channel
from paceline.wire import messages as m
from paceline.wire.frames import Kind
from paceline.worker.requests.rpc import Once, call

R = TypeVar("R")
ATTACH_S = 5.0
STATUS_S = 5.0
BEATS_A_LEASE = 5


class Heartbeat:
    """One worker's heartbeats. Each carries what `tail` returns: where this worker is (wire/messages Position)."""

    def __init__(self, connect: Callable[[], Channel], worker: int, lease_s: float, tail: Callable[[], bytes]) -> None:
        self._connect = connect
        self._tail = tail
        self._worker = worker
        self._lease_s = lease_s
        self._incarnation = 0
        self._channel: Channel | None = None
        self._swapping = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def attach(self, incarnation: int) -> None:
        """Connect, and beat from now on; raise ConnectionLost if ps:0 does not answer or does not know it."""
        channel = self._connect()
        try:
            call(Once(channel, "ps:0"), m.Attach(self._worker, incarnation), m.Done, limit_s=ATTACH_S)
        except (Refused, WaitTimeout, ProtocolError) as error:
            channel.close()
            raise ConnectionLost(f"ps:0 takes no heartbeat: {error}") from error
        except ConnectionLost:
            channel.close()
            raise
        with self._swapping:
            old, self._channel, self._incarnation = self._channel, channel, incarnation
        if old is not None:
            old.close()
        if self._ended.is_set():
            channel.close()
            raise ConnectionLost("this worker has ended")
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._thread.start()

    def _beat(self) -> None:
        while not self._ended.wait(self._lease_s / BEATS_A_LEASE):
            channel = self._channel
            try:
                if channel is not None:
                    channel.send(Kind.BEAT, worker=self._worker, incarnation=self._incarnation, tail=self._tail())
            except ConnectionLost:
                with suppress(ClusterError):  # the next beat tries again; the thread that trains reports what is wrong
                    self.attach(self._incarnation)

    def ask(self, request: m.Request, expects: type[R], limit_s: float) -> R:
        """Ask on the heartbeat's connection; raise WaitTimeout when no answer comes in time."""
        return call(_Beside(self, limit_s), request, expects, limit_s=limit_s)[0]

    def status(self) -> m.Status | None:
        """Ask who is missing and for whom the round waits; return None if ps:0 does not answer in time."""
        try:
            return self.ask(m.AskStatus(), m.Status, STATUS_S)
        except WaitTimeout:
            return None

    def close(self) -> None:
        self._ended.set()
        if self._channel is not None:
            self._channel.close()


class _Beside:
    """ps:0 for a question beside the training."""

    name = "ps:0"

    def __init__(self, heartbeat: Heartbeat, limit_s: float) -> None:
        self._heartbeat = heartbeat
        self._until_s = time.monotonic() + limit_s

    @property
    def channel(self) -> Channel:
        if self._heartbeat._channel is None:
            raise ConnectionLost("not attached")
        return self._heartbeat._channel

    def reconnect(self, error: ClusterError) -> None:
        """Attach after a moment, at most until the deadline."""
        heartbeat = self._heartbeat
        if isinstance(error, WaitTimeout):
            self.channel.close()  # a late reply may still come on it; the next beat attaches again
            raise error
        pause_s = min(heartbeat._lease_s / BEATS_A_LEASE, max(0.0, self._until_s - time.monotonic()))
        if heartbeat._ended.wait(pause_s) or time.monotonic() >= self._until_s:
            raise WaitTimeout(f"ps:0 does not answer: {error}") from error
        with suppress(ClusterError):  # asking again meets the same end
            heartbeat.attach(heartbeat._incarnation)
