"""WHAT do a launcher and the agent of a host say to each other? Messages in frames, over the agent's stdin and stdout.

Used by hosts/agent, and here by hosts/many, hosts/far and hosts/far_host. Pure values; no
pickle: msgpack of fixed shapes. Must never be printed: Hello holds the secret of the run, which is why it travels here
and not in a command line.

A frame is its length, four bytes, and a message. The agent begins with MAGIC, because a login shell may have said
something before.
"""

import struct
from typing import IO

import msgspec

from paceline.cluster.settings import Settings
from paceline.cluster.spec import Task
from paceline.errors import ProtocolError
from paceline.launchers.entry import Program
from paceline.launchers.mirror import PIECE_BYTES
from paceline.launchers.pieces import Piece
from paceline.telemetry.losses import Loss

MAGIC = b"\x00paceline agent 1\n"
LONGEST_NOISE = 64 << 10  # what a shell may say before
MAX_BYTES = 16 << 20
_LENGTH = struct.Struct(">I")

assert PIECE_BYTES < MAX_BYTES


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To an agent, first: the run."""

    version: str  # of paceline
    host: str = ""  # what the launcher calls it
    settings: Settings
    program: Program
    ps: list[Task]
    secret: bytes
    certificate: bytes = b""  # with --tls
    key: bytes = b""
    run_dir: str  # the run folder, below the host's own folder; one that lies elsewhere is used only if it is shared
    token: str  # a file of the run folder: where it is seen, the folder is shared
    is_going_on: bool = False  # with a run that the launcher's folder holds already
    num_workers: int  # of this host
    threads: str = ""  # of every task; "": what the host's environment says, or its cores over its workers
    gpus: int | None = None  # how many of its cards; None: all
    environ: dict[str, str] = {}
    ports: list[int] = []  # of its tasks: held until they listen
    num_spare_ports: int = 0  # for tasks that come from a host that was lost
    between: tuple[int, int] | None = None  # where those may lie
    silence_s: float = 30.0  # without a word from the launcher it is gone

    def __repr__(self) -> str:
        return "Hello(…)"


class Start(msgspec.Struct, frozen=True, tag=True):
    """Start a task."""

    task: Task
    cluster: dict[str, list[str]]
    incarnation: int
    at: str | None = None  # its address, where it is not the cluster's: it comes from a host that was lost
    resume: str = ""  # the checkpoint, in the run folder there; "": as the settings say


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to a task; `is_all`: to all that it has started, too."""

    task: Task
    number: int
    is_all: bool = False


class Forget(msgspec.Struct, frozen=True, tag=True):
    """The next start of this ps is an empty one."""

    task: Task


class Put(msgspec.Struct, frozen=True, tag=True):
    """A piece of a file that the run folder there must have; it does not come back."""

    piece: Piece


class Moved(msgspec.Struct, frozen=True, tag=True):
    """Tasks that are at another address now, by their names."""

    addresses: dict[str, str]


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Both ways, once a second: I am there. From an agent: what its system says of the tasks that run."""

    states: dict[str, str] = {}


class End(msgspec.Struct, frozen=True, tag=True):
    """The run is over: send what is left. A second one, after Over: all has come, and nothing need stay there."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From an agent, first: what it found."""

    host: str
    cores: int
    threads: str
    cards: int
    run_dir: str
    is_shared: bool
    spare_ports: list[int]
    aside: str = ""  # where a folder of another run of this name is now


class Refused(msgspec.Struct, frozen=True, tag=True):
    """From an agent: why it does nothing, in a sentence."""

    why: str


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A task has ended; all that it has told is here already."""

    task: Task
    code: int


class News(msgspec.Struct, frozen=True, tag=True):
    """A piece of the run folder."""

    piece: Piece


class Lost(msgspec.Struct, frozen=True, tag=True):
    """From an agent: files that its tasks could not write."""

    losses: list[Loss]


class Over(msgspec.Struct, frozen=True, tag=True):
    """The last word of an agent: everything has been sent, and nothing runs; its folder goes after another End."""

    left: list[str] = []  # but for this, which cannot be sent: then the folder stays


Told = Hello | Start | Signal | Forget | Put | Moved | Beat | End  # to an agent
Heard = Ready | Refused | Exited | News | Lost | Beat | Over  # from one

_encoder = msgspec.msgpack.Encoder()
_told = msgspec.msgpack.Decoder(Told)
_heard = msgspec.msgpack.Decoder(Heard)


def frame(message: Told | Heard) -> bytes:
    """A message as it travels.

    >>> len(frame(End()))
    14
    """
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def read_told(stream: IO[bytes]) -> Told | None:
    """The next message to an agent; None: the launcher is gone."""
    body = _body(stream)
    try:
        return None if body is None else _told.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a message that no launcher of this paceline sends: {error}") from None


def read_heard(stream: IO[bytes]) -> Heard | None:
    """The next message from an agent; None: it is gone."""
    body = _body(stream)
    try:
        return None if body is None else _heard.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a message that no agent of this paceline sends: {error}") from None


def skip_noise(stream: IO[bytes]) -> bytes | None:
    """What was said before the agent began; None: it never did."""
    noise = bytearray()
    while len(noise) < LONGEST_NOISE + len(MAGIC):
        if not (byte := stream.read(1)):
            return None
        noise += byte
        if noise.endswith(MAGIC):
            return bytes(noise[: -len(MAGIC)])
    return None


def _body(stream: IO[bytes]) -> bytes | None:
    """One frame's message; None at the end, also in the middle of a frame: who wrote it is gone."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    [size] = _LENGTH.unpack(head)
    if size > MAX_BYTES:
        raise ProtocolError(f"a message of {size} bytes, which nobody sends")
    body = stream.read(size)
    return body if len(body) == size else None
