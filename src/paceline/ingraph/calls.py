"""HOW does a task answer calls? One connection at a time in its own thread: receive, run, answer, again.

Used by ingraph/server. A call names either an op that this process has registered, or one of the server's own verbs
(names without a colon). What an op raises goes back as text and ends nothing. Must never import what a call names.
"""

from collections.abc import Callable, Mapping
from typing import Any

from paceline.cluster.devices import Device
from paceline.errors import ProtocolError, UsageError
from paceline.ingraph import scope, values
from paceline.ingraph.hardware import run_on
from paceline.ingraph.neighbours import Neighbours, say, serving
from paceline.ingraph.op import find
from paceline.ingraph.raised import message_of
from paceline.ingraph.remote import receive
from paceline.transport.base import Buffer
from paceline.transport.channel import Channel
from paceline.transport.security import Role
from paceline.wire import ops
from paceline.wire.frames import Kind

Verbs = Mapping[str, Callable[..., Any]]


class Calls:
    """What one server answers. `verbs` are its own: they run without a scope, on no device."""

    def __init__(self, neighbours: Neighbours, verbs: Verbs) -> None:
        self._neighbours = neighbours
        self._verbs = verbs

    def serve(self, channel: Channel) -> None:
        """All calls of one connection, until it ends."""
        if channel.role is not Role.CLIENT:
            return  # another kind of task, at the wrong door
        with serving(self._neighbours, channel.stream):
            while True:
                try:
                    message, value = receive(channel, channel.recv())
                except ProtocolError as error:  # what it sent cannot be trusted, and where the next call begins is lost
                    say(f"Refused, and the connection ended: {error}")
                    return
                if not isinstance(message, ops.Call):
                    return
                answer, bulk = self._answer(message, value)
                value = None  # an op's arguments are not kept until the next call
                channel.send(Kind.COLD, tail=ops.encode(answer), bulk=bulk)

    def _answer(self, call: ops.Call, value: Any) -> tuple[ops.Returned | ops.Raised, list[Buffer]]:
        try:
            result = self._run(call, value)
            try:
                description, buffers = values.pack(result)
                return ops.Returned(len(description)), values.bulk(description, buffers)
            except UsageError as error:
                raise UsageError(f"What {call.op} returned on {self._neighbours.task.device}: {error}") from None
        except BaseException as error:  # an op may raise anything; this task goes on
            return message_of(error), []

    def _run(self, call: ops.Call, value: Any) -> Any:
        args, kwargs = value if value is not None else ([], {})
        if ":" not in call.op:
            if call.op not in self._verbs:
                raise UsageError(f"{self._neighbours.task.device} knows no {call.op!r}; is it of another version?")
            return self._verbs[call.op](*args, **kwargs)
        found = find(call.op)
        with scope.fresh():
            return run_on(Device.parse(call.device), found.fn, args, kwargs)
