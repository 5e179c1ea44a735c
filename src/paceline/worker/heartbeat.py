"""HOW does a worker show that it lives? A second connection to ps:0: heartbeats, and questions beside the training.

Used by worker/client. The heartbeat's thread attaches again by itself when its connection ends, so that a worker which
computes for long stays in although ps:0 was started again meanwhile. It never joins and never decides.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from paceline.errors import ClusterError, ConnectionLost, ProtocolError, WaitTimeout
from paceline.transport.channel import Channel
from paceline.wire import messages as m
from paceline.wire.frames import Kind

ATTACH_S = 5.0
STATUS_S = 5.0
BEATS_A_LEASE = 5


class Heartbeat:
    """`tail` is told with every beat: where this worker is (wire/messages Position)."""

    def __init__(self, connect: Callable[[], Channel], worker: int, lease_s: float, tail: Callable[[], bytes]) -> None:
        self._connect = connect
        self._tail = tail
        self._worker = worker
        self._lease_s = lease_s
        self._incarnation = 0
        self._channel: Channel | None = None
        self._owed = 0  # answers that are still to come on that connection
        self._swapping = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def attach(self, incarnation: int) -> None:
        """Begin, or go on; raises ConnectionLost when ps:0 is not there, or does not know this incarnation."""
        channel = self._connect()
        try:
            reply, _ = channel.ask(m.Attach(self._worker, incarnation), limit_s=ATTACH_S)
            if isinstance(reply, m.Failed):
                raise ConnectionLost(f"ps:0 takes no heartbeat: {reply.reason}")
        except (WaitTimeout, ProtocolError) as error:
            channel.close()
            raise ConnectionLost(f"ps:0 takes no heartbeat: {error}") from error
        except ConnectionLost:
            channel.close()
            raise
        with self._swapping:
            old, self._channel, self._incarnation, self._owed = self._channel, channel, incarnation, 0
        if old is not None:
            old.close()
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
                with suppress(ClusterError):  # the next beat tries again; what is wrong is told by whoever trains
                    self.attach(self._incarnation)

    def ask(self, request: m.Request, limit_s: float) -> m.Reply:
        """A question that the heartbeat's connection carries; WaitTimeout when nobody answers in time. An answer that
        came too late for another one is read and left alone."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                with self._swapping:
                    channel = self._channel
                    if channel is None:
                        raise ConnectionLost("not attached")
                    self._owed += 1
                    channel.say(request)
                return self._answer(channel, deadline)
            except (ConnectionLost, ProtocolError) as error:
                if self._ended.wait(self._lease_s / BEATS_A_LEASE) or time.monotonic() >= deadline:
                    raise WaitTimeout(f"ps:0 does not answer: {error}") from error
                with suppress(ClusterError):
                    self.attach(self._incarnation)

    def _answer(self, channel: Channel, deadline: float) -> m.Reply:
        while True:
            try:
                frame = channel.recv_cold()
            except WaitTimeout:
                if time.monotonic() >= deadline:
                    raise
                continue
            self._owed -= 1
            if self._owed <= 0:
                return m.decode(frame.tail)  # type: ignore[return-value]

    def status(self) -> m.Status | None:
        """Who is missing and whom the round waits for; None: ps:0 does not answer, so it is what we wait for."""
        try:
            reply = self.ask(m.AskStatus(), STATUS_S)
        except WaitTimeout:
            return None
        if not isinstance(reply, m.Status):
            raise ProtocolError(f"ps:0 answered AskStatus with {type(reply).__name__}")
        return reply

    def close(self) -> None:
        self._ended.set()
        if self._channel is not None:
            self._channel.close()
