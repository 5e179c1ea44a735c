"""HOW does a task answer calls? One connection at a time in its own thread: receive, run, answer, again.

Used by ingraph/server. A call names either an op that this process has registered, or one of the server's own verbs
(names without a colon). What an op raises goes back as text and ends nothing. Must never import what a call names, nor
let one role do what is another's: ops and sessions are the client's, the end of this task is a worker's, the chief.
"""

from collections.abc import Callable, Mapping
from typing import Any

from paceline.cluster.devices import Device
from paceline.errors import ProtocolError, UsageError
from paceline.ingraph import scope, values
from paceline.ingraph.hardware import run_on
from paceline.ingraph.neighbours import Neighbours, say, serving
from paceline.ingraph.op import find, is_internal
from paceline.ingraph.raised import message_of
from paceline.ingraph.remote import STOP, receive
from paceline.transport.base import Buffer, Stream
from paceline.transport.channel import Channel
from paceline.transport.security import Role
from paceline.wire import ops
from paceline.wire.frames import Kind

Verbs = Mapping[str, Callable[..., Any]]


class Calls:
    """What one server answers. `verbs` are its own: they run without a scope, on no device. `stop` is called with the
    name of the task that asks for it; `on_end` with a connection that has ended."""

    def __init__(
        self,
        neighbours: Neighbours,
        verbs: Verbs,
        stop: Callable[[str], None],
        on_end: Callable[[Stream], None] = lambda stream: None,
    ) -> None:
        self._neighbours = neighbours
        self._verbs = {**verbs, STOP: self._refuse_to_stop}
        self._stop = stop
        self._on_end = on_end

    def serve(self, channel: Channel) -> None:
        """All calls of one connection, until it ends."""
        if channel.role not in (Role.CLIENT, Role.WORKER):
            return  # another kind of task, at the wrong door
        try:
            self._serve(channel)
        finally:
            self._on_end(channel.stream)

    def _serve(self, channel: Channel) -> None:
        with serving(self._neighbours, channel.stream):
            while True:
                try:
                    message, value = receive(channel, channel.recv())
                except ProtocolError as error:  # what it sent cannot be trusted, and where the next call begins is lost
                    say(f"Refused, and the connection ended: {error}")
                    return
                if not isinstance(message, ops.Call) or (channel.role is Role.WORKER and message.op != STOP):
                    return
                answer, bulk = self._answer(message, value, channel.role)
                value = None  # an op's arguments are not kept until the next call
                channel.send(Kind.COLD, tail=ops.encode(answer), bulk=bulk)

    def _answer(self, call: ops.Call, value: Any, role: Role) -> tuple[ops.Returned | ops.Raised, list[Buffer]]:
        try:
            result = self._run(call, value, role)
            try:
                description, buffers = values.pack(result)
                return ops.Returned(len(description)), values.bulk(description, buffers)
            except UsageError as error:
                what = "was computed" if is_internal(call.op) else f"{call.op} returned"
                raise UsageError(f"What {what} on {self._neighbours.task.device}: {error}") from None
        except BaseException as error:  # an op may raise anything; this task goes on
            return message_of(error), []

    def _run(self, call: ops.Call, value: Any, role: Role) -> Any:
        args, kwargs = value if value is not None else ([], {})
        if role is Role.WORKER:
            return self._stop(*args)
        if ":" not in call.op:
            if call.op not in self._verbs:
                raise UsageError(f"{self._neighbours.task.device} knows no {call.op!r}; is it of another version?")
            return self._verbs[call.op](*args, **kwargs)
        found = find(call.op)
        with scope.fresh():
            return run_on(Device.parse(call.device), found.fn, args, kwargs)

    def _refuse_to_stop(self, *_: object) -> None:
        self._stop("a client")
