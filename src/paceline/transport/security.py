"""WHO is on the other end? A mutual challenge before anything is allocated; session keys for every later frame.

Called by transport/channel on both sides. The secret is never sent, logged or put into a message.

1. client: magic and a fresh nonce
2. server: its nonce, and a proof over both nonces
3. client: checks it, and sends its own proof
4. server: checks it, and says so; both derive one key a direction
"""

import hmac
import os
import time
from hashlib import blake2b

from paceline.errors import AuthenticationError, ConnectionLost, WaitTimeout
from paceline.transport.base import Stream

MAGIC = b"paceline/1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
ACCEPTED = b"\x01"
HANDSHAKE_S = 5.0
POLL_S = 0.5  # how often a client that waits looks up: nothing may block for ever


def as_server(stream: Stream, secret: bytes) -> tuple[bytes, bytes]:
    """The (send, receive) keys, or AuthenticationError. Reads 75 bytes at most."""
    stream.set_timeout(HANDSHAKE_S)
    try:
        hello = _read(stream, len(MAGIC) + NONCE_BYTES)
        if not hello.startswith(MAGIC):
            raise AuthenticationError("a stranger on the port: it does not speak this protocol")
        theirs, ours = hello[len(MAGIC) :], os.urandom(NONCE_BYTES)
        stream.send([ours, _proof(secret, b"server", theirs, ours)])
        if not hmac.compare_digest(_read(stream, PROOF_BYTES), _proof(secret, b"client", theirs, ours)):
            raise AuthenticationError("a client with another secret")
        stream.send([ACCEPTED])
    except (WaitTimeout, ConnectionLost) as error:
        raise AuthenticationError(f"a client gave up before it was known: {error}") from error
    stream.set_timeout(0)
    return _key(secret, b"down", theirs, ours), _key(secret, b"up", theirs, ours)


def as_client(stream: Stream, secret: bytes, address: str) -> tuple[bytes, bytes]:
    """The (send, receive) keys, or AuthenticationError that says what to do."""
    stream.set_timeout(HANDSHAKE_S)
    ours = os.urandom(NONCE_BYTES)
    try:
        stream.send([MAGIC, ours])
        theirs = _read(stream, NONCE_BYTES)
        if not hmac.compare_digest(_read(stream, PROOF_BYTES), _proof(secret, b"server", ours, theirs)):
            raise AuthenticationError(
                f"the task at {address} has another secret: copy one secret file to all hosts, or pass --secret-file"
            )
        stream.send([_proof(secret, b"client", ours, theirs)])
        _read(stream, len(ACCEPTED))
    except WaitTimeout as error:
        raise ConnectionLost(f"whoever listens at {address} is no paceline task, or is very busy") from error
    stream.set_timeout(POLL_S)
    return _key(secret, b"up", ours, theirs), _key(secret, b"down", ours, theirs)


def _read(stream: Stream, size_bytes: int) -> bytes:
    """All of it before the deadline: a stranger that sends one byte and falls silent must not hold a place."""
    data, position = memoryview(bytearray(size_bytes)), 0
    deadline = time.monotonic() + HANDSHAKE_S
    while position < size_bytes:
        position += stream.recv_some(data[position:])
        if position < size_bytes and time.monotonic() >= deadline:
            raise WaitTimeout("the rest did not come in time")
    return bytes(data)


def _proof(secret: bytes, role: bytes, client: bytes, server: bytes) -> bytes:
    return hmac.digest(secret, role + client + server, "sha256")


def _key(secret: bytes, direction: bytes, client: bytes, server: bytes) -> bytes:
    return blake2b(direction + client + server, key=secret, digest_size=32).digest()
