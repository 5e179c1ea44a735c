"""Mutual authentication by a challenge, before anything is allocated, and session keys for every later frame.

Called by transport/channel on both sides. The secret is never sent, logged or put into a message.

1. client: magic and a fresh nonce
2. server: its nonce, and a proof over both nonces
3. client: checks it, and sends its own proof, which also names its role
4. server: checks it, and says so; both derive one key per direction
"""

import hmac
import os
import time
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path

from paceline.errors import AuthenticationError, ConnectionLost, WaitTimeout
from paceline.transport.base import Stream

MAGIC = b"paceline/1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
ACCEPTED = b"\x01"
HANDSHAKE_S = 5.0  # for the whole handshake, with --tls too
POLL_S = 0.5  # read timeout of a client that waits: nothing may block for ever
INSECURE = bytes(32)  # the public secret of --insecure


class Role(StrEnum):
    """What a client is; server/control/roles says what each may request."""

    WORKER = "worker"  # trains; the chief is one of them
    READER = "reader"  # kv, an evaluator
    OPERATOR = "operator"  # paceline ctl
    LAUNCHER = "launcher"  # started the tasks
    CLIENT = "client"  # calls ops; a ps has none


class Secret(bytes):
    """The 32 bytes that all tasks of a run share. They do not print themselves. `keys_dir`: the folder with the
    certificate, when tcp is to be encrypted.

    >>> Secret(b"x" * 32)
    Secret(…)
    """

    keys_dir: Path | None

    def __new__(cls, value: bytes, keys_dir: Path | None = None) -> "Secret":
        made = super().__new__(cls, value)
        made.keys_dir = keys_dir
        return made

    def __repr__(self) -> str:
        return "Secret(…)"

    __str__ = __repr__


def keys_dir_of(secret: bytes) -> Path | None:
    """Return the folder of the certificate; None: tcp is not encrypted."""
    return secret.keys_dir if isinstance(secret, Secret) else None


def deadline_s() -> float:
    """Return the time by which a handshake that begins now must be done."""
    return time.monotonic() + HANDSHAKE_S


def as_server(stream: Stream, secret: bytes, until_s: float | None = None) -> tuple[Role, tuple[bytes, bytes]]:
    """Return the client's role and the (send, receive) keys, or raise AuthenticationError. Reads 75 bytes at most."""
    until_s = deadline_s() if until_s is None else until_s
    try:
        hello = _read(stream, len(MAGIC) + NONCE_BYTES, until_s)
        if not hello.startswith(MAGIC):
            raise AuthenticationError("a stranger on the port: it does not speak this protocol")
        theirs, ours = hello[len(MAGIC) :], os.urandom(NONCE_BYTES)
        stream.send([ours, _proof(secret, b"server", theirs, ours)])
        proof = _read(stream, PROOF_BYTES, until_s)
        proven = [role for role in Role if hmac.compare_digest(proof, _proof(secret, role.encode(), theirs, ours))]
        if not proven:
            raise AuthenticationError("a client with another secret")
        stream.send([ACCEPTED])
    except (WaitTimeout, ConnectionLost) as error:
        raise AuthenticationError(f"a client gave up before it was known: {error}") from error
    stream.set_timeout(0)
    return proven[0], (_key(secret, b"down", theirs, ours), _key(secret, b"up", theirs, ours))


def as_client(
    stream: Stream, secret: bytes, address: str, role: Role = Role.WORKER, until_s: float | None = None
) -> tuple[bytes, bytes]:
    """Return the (send, receive) keys, or raise an AuthenticationError that says what to do."""
    until_s = deadline_s() if until_s is None else until_s
    ours = os.urandom(NONCE_BYTES)
    try:
        stream.send([MAGIC, ours])
        theirs = _read(stream, NONCE_BYTES, until_s)
        if not hmac.compare_digest(_read(stream, PROOF_BYTES, until_s), _proof(secret, b"server", ours, theirs)):
            raise AuthenticationError(
                f"the task at {address} has another secret: copy one secret file to all hosts, or pass --secret-file"
            )
        stream.send([_proof(secret, role.encode(), ours, theirs)])
        _read(stream, len(ACCEPTED), until_s)
    except WaitTimeout as error:
        raise ConnectionLost(f"whoever listens at {address} is no paceline task, or is very busy") from error
    except ConnectionLost as error:
        raise ConnectionLost(
            f"the task at {address} ended the handshake: it is ending, too many knock at once, or only one side has "
            f"--tls ({error})"
        ) from error
    stream.set_timeout(POLL_S)
    return _key(secret, b"up", ours, theirs), _key(secret, b"down", ours, theirs)


def _read(stream: Stream, size_bytes: int, until_s: float) -> bytes:
    """Read so much before the deadline: a stranger that sends a byte now and then must not hold a place."""
    data, position = memoryview(bytearray(size_bytes)), 0
    while position < size_bytes:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise WaitTimeout("the rest did not come in time")
        stream.set_timeout(left_s)
        position += stream.recv_some(data[position:])
    return bytes(data)


def _proof(secret: bytes, label: bytes, client: bytes, server: bytes) -> bytes:
    return hmac.digest(secret, label + client + server, "sha256")


def _key(secret: bytes, direction: bytes, client: bytes, server: bytes) -> bytes:
    return blake2b(direction + client + server, key=secret, digest_size=32).digest()
