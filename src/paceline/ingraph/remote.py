"""HOW is an op called on another task? A pool of authenticated connections to it, one for each call at a time.

Used by ingraph/neighbours, session and master. Every wait ends: at the answer, at the connection's end, or when the
task has not even said that it lives for `wait_s`. Must never send a call twice: an op may not bear it.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline import forks
from paceline.cluster.settings import PACELINE
from paceline.errors import AuthenticationError, ConnectionLost, ProtocolError, UsageError, WaitTimeout
from paceline.ingraph import values
from paceline.ingraph.raised import error_of
from paceline.transport.channel import Channel, connect
from paceline.transport.security import Role
from paceline.wire import ops
from paceline.wire.frames import Frame, Kind
from paceline.wire.messages import AskStatus, Failed
from paceline.worker.requests.deadline import Deadline
from paceline.worker.script import check_owner

RETRY_S = 0.1
SLOWEST_RETRY_S = 1.0
CONNECT_S = 5.0
SHORTEST_S = 0.05  # for a last attempt
PROBE_S = 10.0  # of silence, after which a task is asked whether it lives
PROBES = 3  # at least, before it is given up
PROBE_ANSWER_S = 5.0
ALIVE = "alive"  # the question that every server answers; ingraph/calls
STOP = "stop"  # what only the chief may say


class Remote:
    """The task called `name` (its device string), at `address`."""

    def __init__(
        self,
        name: str,
        address: str,
        secret: bytes,
        wait_s: float = 300.0,
        lane: str = "auto",
        say: Callable[[str], None] = lambda line: None,
        role: Role = Role.CLIENT,
        log_style: str = PACELINE,
    ) -> None:
        self.name = name
        self.address = address
        self._secret = secret
        self._wait_s = wait_s
        self._lane = lane
        self._say = say
        self._role = role
        self._style = log_style
        self.is_ps = False  # as far as is known
        self._has_answered = False
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        self._is_closed = False
        self._owner = forks.Owner()

    def call(
        self,
        op: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        device: str = "",
        wait_s: float | None = None,
        limit_s: float | None = None,
        what: str | None = None,
        on_held: bool = False,
    ) -> Any:
        """Run an op there and return what it returns; what it raises is raised here as RemoteOpError.

        `wait_s`: how long to wait for a task that is not there; None, or more than that: as long as this process waits
        for anybody.
        `limit_s`: how long the op may take; None: as long as it likes, as long as its task lives.
        `what`: what an error calls it; None: the op. `on_held`: it is about what lies there on the connection of the
        last call, and nobody waits for another one.
        """
        check_owner(self._owner, f"{what or op} at {self.name}")
        description, buffers = values.pack((list(args), dict(kwargs or {})))
        bulk = values.bulk(description, buffers)
        what = what or op
        patience_s = self._wait_s if wait_s is None else min(wait_s, self._wait_s)
        channel = self._held(what) if on_held else self._take(patience_s)
        try:
            call = ops.Call(op, len(description), device)
            channel.send(Kind.COLD, tail=ops.encode(call), bulk=bulk)
            message, value = _receive(channel, self._await(channel, what, limit_s))
        except ConnectionLost as error:
            channel.close()
            if not self._has_answered and self._asks_whether_ps():
                raise UsageError(f"{self.name} at {self.address} holds parameters and runs no ops.") from None
            who = f"{self.name} at {self.address}"
            why = str(error).replace(who, "it")
            raise ConnectionLost(f"{who} went away while it ran {what}: {why}") from error
        except BaseException:
            channel.close()  # its answer may still come; nobody else is to get it
            raise
        self._has_answered = True
        self._give_back(channel)
        if isinstance(message, ops.Raised):
            raise error_of(message, self.name, what)
        return value

    def close(self) -> None:
        """Calls that wait, in other threads, end soon."""
        if not self._owner.is_here:
            return
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()

    # --- connections ------------------------------------------------------------------------------------------

    def _take(self, wait_s: float) -> Channel:
        """One that lies idle and still has its other end, else a new one."""
        return self._idle_one() or self._persist(wait_s)

    def _held(self, what: str) -> Channel:
        """The one of the last call; what lay on it has ended with it."""
        channel = self._idle_one()
        if channel is None:
            raise ConnectionLost(
                f"{self.name} at {self.address} went away since it was last called, and what it held for {what} is lost"
            )
        return channel

    def _idle_one(self) -> Channel | None:
        while True:
            with self._lock:
                channel = self._idle.pop() if self._idle else None
            if channel is None or not channel.stream.is_ended():
                return channel
            channel.close()

    def _give_back(self, channel: Channel) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(channel)
                return
        channel.close()

    def _persist(self, wait_s: float) -> Channel:
        """Connect, now and then, until the deadline: tasks start in any order."""
        waiting = Deadline(wait_s, [self.name], self._say if wait_s else _say_nothing, style=self._style)
        pause_s = RETRY_S
        while True:
            self._check_open()
            try:
                return self._connect(min(CONNECT_S, max(waiting.left_s, SHORTEST_S)) if wait_s else CONNECT_S)
            except ConnectionLost as error:
                waiting.again(f"{self.name} at {self.address} did not answer ({error})", error=error)
            time.sleep(min(pause_s, waiting.left_s))  # between attempts to connect: nobody can wake us
            pause_s = min(SLOWEST_RETRY_S, 2 * pause_s)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConnectionLost("this process has closed the connection")

    def _connect(self, timeout_s: float) -> Channel:
        channel = connect(self.address, self._lane, self._secret, timeout_s, self._role)
        channel.stream.name = f"{self.name} at {self.address}"
        return channel

    # --- answers ----------------------------------------------------------------------------------------------

    def _await(self, channel: Channel, what: str, limit_s: float | None) -> Frame:
        """The answer, however long the op takes, as long as its task lives; unless a limit was asked for."""
        probe_s = min(PROBE_S, self._wait_s / PROBES)
        began_s = time.monotonic()
        silent = Deadline(
            self._wait_s, [self.name], self._say, since_s=began_s, style=self._style
        )  # since it was last known to live
        next_s = began_s + probe_s
        while True:
            try:
                return channel.recv()
            except WaitTimeout:
                self._check_open()
                if limit_s is not None and time.monotonic() > began_s + limit_s:
                    raise WaitTimeout(f"gave up after {limit_s:g} s: {self.name} has not ended {what}") from None
                if time.monotonic() < next_s:
                    continue
            if self._is_alive(min(PROBE_ANSWER_S, max(silent.left_s, SHORTEST_S))):
                silent = Deadline(self._wait_s, [self.name], self._say, style=self._style)
            else:
                silent.again(f"{self.name} at {self.address} has our call and says nothing: it is stopped, or lost")
            next_s = time.monotonic() + min(probe_s, silent.left_s)

    def _is_alive(self, answer_s: float) -> bool:
        """Whether the task answers on a new connection; the one with the call is busy."""
        deadline = time.monotonic() + answer_s
        try:
            channel = self._connect(answer_s)
        except (ConnectionLost, AuthenticationError):
            return False
        try:
            channel.send(Kind.COLD, tail=ops.encode(ops.Call(ALIVE, 0)))
            while time.monotonic() < deadline:
                try:
                    _receive(channel, channel.recv())
                    return True
                except WaitTimeout:
                    continue
        except (ConnectionLost, ProtocolError):
            return False
        finally:
            channel.close()
        return False

    def _asks_whether_ps(self) -> bool:
        """Whether a ps listens there, which ends a connection on which it is called for an op; but it answers what a
        client may not ask."""
        try:
            channel = self._connect(PROBE_ANSWER_S)
        except (ConnectionLost, AuthenticationError):
            return False
        try:
            reply, _ = channel.ask(AskStatus(), limit_s=PROBE_ANSWER_S)
            self.is_ps = isinstance(reply, Failed)
        except (ConnectionLost, ProtocolError, WaitTimeout):
            self.is_ps = False
        finally:
            channel.close()
        return self.is_ps


def _say_nothing(line: str) -> None:
    """For whom nobody waits."""


def _receive(channel: Channel, frame: Frame) -> tuple[ops.OpMessage, Any]:
    message, value = receive(channel, frame)
    if isinstance(message, ops.Call):
        raise ProtocolError("a task answered a call with a call")
    return message, value


def receive(channel: Channel, frame: Frame) -> tuple[ops.Call | ops.Returned | ops.Raised, Any]:
    """What a frame says, and the value behind it (None where there is none). Used by both sides."""
    if frame.kind != Kind.COLD:
        raise ProtocolError(f"a frame of kind {frame.kind} where ops are called")
    message = ops.decode(frame.tail)
    if frame.bulk_bytes > ops.MAX_BULK_BYTES:
        raise ProtocolError(f"a value of {frame.bulk_bytes} bytes; {ops.MAX_BULK_BYTES} is the limit")
    block = values.new_block(frame.bulk_bytes)
    channel.recv_bulk(frame, block)
    if isinstance(message, ops.Raised) or not message.described:
        return message, None
    start = message.described + -message.described % ops.ALIGN
    if not 0 < message.described <= start <= block.nbytes:
        raise ProtocolError("a value whose description is longer than itself")
    return message, values.unpack(bytes(block[: message.described]), block[start:])
