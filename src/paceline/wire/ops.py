"""WHAT is said to call an op on another task? A call and one answer; what they are about lies in the bulk behind.

Used by ingraph/remote and ingraph/calls. The bulk is a description (ingraph/values), padding, and the tensors' bytes.
No code travels: an op is a name, and only what the other side has imported itself has one there.
"""

import msgspec

from paceline.errors import ProtocolError

ALIGN = 64  # where tensors lie in the bulk: how they lie must not change what is computed
MAX_TEXT = 1 << 14  # of a name, a message, a traceback: they fit the tail of a client


class OpMessage(msgspec.Struct, frozen=True, tag=True):
    """Base of what is said about ops."""


class Call(OpMessage, frozen=True):
    """Run `op` with the arguments in the bulk, whose first `described` bytes describe it. `device`: on which hardware
    of the task, as a device string; empty: as the op likes."""

    op: str
    described: int
    device: str = ""


class Returned(OpMessage, frozen=True):
    """It returned what is in the bulk."""

    described: int


class Raised(OpMessage, frozen=True):
    """It raised, or could not be run. `kind` is the class of a paceline error, else of the op's own; `text` its
    traceback, which is empty where that would add nothing."""

    kind: str
    message: str
    text: str = ""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Call | Returned | Raised] = msgspec.msgpack.Decoder(Call | Returned | Raised)

encode = _ENCODER.encode


def decode(data: bytes) -> Call | Returned | Raised:
    """A message from bytes that may be anything.

    >>> decode(encode(Call("work:double", 12)))
    Call(op='work:double', described=12, device='')
    """
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a message about ops that does not parse: {error}") from error


def shortened(text: str) -> str:
    """At most so much of a text as fits; its middle is left out.

    >>> len(shortened("x" * 100_000)) <= MAX_TEXT
    True
    """
    if len(text.encode("utf-8", "replace")) <= MAX_TEXT:
        return text
    part = MAX_TEXT // 10  # a character has up to four bytes
    return f"{text[:part]}\n… ({len(text) - 2 * part} characters left out) …\n{text[-part:]}"
