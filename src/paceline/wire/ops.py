"""Messages that call an op on another task: a call and its one answer; arguments and results are in their bulk.

Used by ingraph/remote and ingraph/calls. The bulk is a description (ingraph/values), padding, and the tensors' bytes.
No code travels: an op is a name, and only what the other side has imported itself has one there.
"""

import msgspec

from paceline.errors import ProtocolError

ALIGN = 64  # where tensors lie in the bulk: how they lie must not change what is computed
MAX_BULK_BYTES = 1 << 36  # of one call or answer, from a client that holds the secret
MAX_TEXT = 1 << 14  # of a name, a message, a traceback: they fit the tail of a client


class OpMessage(msgspec.Struct, frozen=True, tag=True):
    """Base of the messages about ops."""


class Call(OpMessage, frozen=True):
    """Run `op` with the arguments in the bulk, whose first `described` bytes describe it. `device`: on which hardware
    of the task, as a device string; empty: as the op likes."""

    op: str
    described: int
    device: str = ""


class Returned(OpMessage, frozen=True):
    """The op returned what is in the bulk."""

    described: int


class Raised(OpMessage, frozen=True):
    """It raised, or could not be run. `kind` is the name of its class: one of paceline's errors if `is_ours`, else the
    op's own. `text` is its traceback, which is empty where that would add nothing; `task` where it happened, if that
    is a task further on."""

    kind: str
    message: str
    text: str = ""
    is_ours: bool = False
    task: str = ""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Call | Returned | Raised] = msgspec.msgpack.Decoder(Call | Returned | Raised)

encode = _ENCODER.encode


def decode(data: bytes) -> Call | Returned | Raised:
    """Return the message in bytes that may be anything.

    >>> decode(encode(Call("work:double", 12)))
    Call(op='work:double', described=12, device='')
    """
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a message about ops that does not parse: {error}") from error


def sendable(text: str) -> str:
    """Return the text with an escape for each half of a pair that lacks the other half: UTF-8 has no bytes for it.

    >>> sendable("a\\ud800")
    'a\\\\ud800'
    """
    return text.encode("utf-8", "backslashreplace").decode()


def shortened(text: str) -> str:
    """Return as much of a text as fits; its middle is left out.

    >>> len(shortened("x" * 100_000)) <= MAX_TEXT
    True
    """
    text = sendable(text)
    if len(text.encode()) <= MAX_TEXT:
        return text
    part = MAX_TEXT // 10  # a character has up to four bytes
    return f"{text[:part]}\n… ({len(text) - 2 * part} characters left out) …\n{text[-part:]}"
