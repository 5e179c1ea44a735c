"""TLS 1.3 around a tcp stream, with a certificate that both sides know; with --tls only.

Called by transport/channel before the handshake of transport/security, which proves inside it that both hold the
secret: the certificate excludes a man in the middle. A certificate is compared as a whole, never trusted for its names
or dates, so a wrong clock does not end a run.
"""

import hashlib
import hmac
import ssl
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from paceline.errors import AuthenticationError, ConnectionLost, UsageError, WaitTimeout
from paceline.transport.base import Buffer, Stream
from paceline.transport.tcp import info_bytes

CERTIFICATE = "certificate.pem"
PRIVATE_KEY = "key.pem"
READ_BYTES = 1 << 17
WRITE_BYTES = 1 << 18  # encrypted and sent at a time
RECORD_BYTES = 1 << 14  # of TLS; smaller buffers are joined in one record
MAX_HANDSHAKE_BYTES = 1 << 16  # from a client that is not authenticated yet


class TlsStream(Stream):
    """Encrypt what the inner stream's socket carries. Sending and receiving may happen at once, as on every stream:
    OpenSSL's state has a lock, which is never held while waiting for the network."""

    lane: ClassVar[str] = "tcp"

    def __init__(self, inner: Stream, context: ssl.SSLContext, is_server: bool) -> None:
        super().__init__(inner._sock)
        self.name = inner.name
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._state = threading.Lock()
        self._writing = threading.Lock()  # records leave in the order in which they were made
        self._chunk = memoryview(bytearray(READ_BYTES))

    def shake_hands(self, until_s: float) -> bytes:
        """Exchange keys; return the other side's certificate (empty: it has none)."""
        left_bytes = MAX_HANDSHAKE_BYTES
        while True:
            try:
                with self._state:
                    self._tls.do_handshake()
                self._flush()
                return self._tls.getpeercert(binary_form=True) or b""
            except ssl.SSLWantReadError:
                self._flush()
            except ssl.SSLError as error:
                self._flush()  # the alert that says why
                raise AuthenticationError(f"the other side does not speak TLS as we do: {error.reason}") from error
            left_s = until_s - time.monotonic()
            if left_s <= 0 or left_bytes <= 0:
                raise WaitTimeout("no TLS handshake came to its end in time")
            self.set_timeout(left_s)
            left_bytes -= self._take_in(left_bytes)

    def kernel_bytes(self) -> tuple[int, int] | None:
        return info_bytes(self._sock)

    def send(self, buffers: Sequence[Buffer], size_bytes: int = -1) -> None:
        """Send everything in `buffers`: copy small ones together, encrypt large ones from where they lie."""
        with self._writing:
            ready = bytearray()
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                for start in range(0, view.nbytes, WRITE_BYTES):
                    piece = view[start : start + WRITE_BYTES]
                    if piece.nbytes < RECORD_BYTES:
                        ready += piece
                    if piece.nbytes >= RECORD_BYTES or len(ready) >= WRITE_BYTES:
                        self._encrypt(ready, piece if piece.nbytes >= RECORD_BYTES else b"")
                        ready.clear()
            if ready:
                self._encrypt(ready)

    def _encrypt(self, *parts: Buffer) -> None:
        """Encrypt the parts one after the other, and send them together."""
        try:
            with self._state:
                for part in parts:
                    if len(part):
                        self._tls.write(part)
                sealed = self._outgoing.read()
        except ssl.SSLError as error:
            raise ConnectionLost(f"the connection to {self.name} ended while sending: {error.reason}") from error
        super().send((sealed,), len(sealed))

    def recv_some(self, view: memoryview) -> int:
        while True:
            position = 0
            try:
                with self._state:
                    while position < len(view):
                        count = self._tls.read(len(view) - position, view[position:])
                        if not count:
                            raise ConnectionLost(f"{self.name} closed the connection")
                        position += int(count)
                return position
            except ssl.SSLWantReadError:
                if position:
                    return position
            except ssl.SSLError as error:
                raise ConnectionLost(f"the connection to {self.name} was changed on its way: {error.reason}") from error
            if self._outgoing.pending:
                self._flush()  # a new key was asked for
            self._take_in(READ_BYTES)

    def _take_in(self, most_bytes: int) -> int:
        try:
            count = self._sock.recv_into(self._chunk[:most_bytes])
        except BlockingIOError as error:
            raise WaitTimeout("nothing came in time") from error
        except OSError as error:
            raise ConnectionLost(f"the connection to {self.name} ended while receiving: {error}") from error
        if count == 0:
            raise ConnectionLost(f"{self.name} closed the connection")
        with self._state:
            self._incoming.write(self._chunk[:count])
        return count

    def _flush(self) -> None:
        with self._writing:
            with self._state:
                sealed = self._outgoing.read()
            if sealed:
                super().send((sealed,), len(sealed))


def as_server(stream: Stream, keys_dir: Path, until_s: float) -> Stream:
    """Return the encrypted stream, or raise AuthenticationError. The client is not authenticated by it."""
    made = TlsStream(stream, _server_context(str(keys_dir)), is_server=True)
    try:
        made.shake_hands(until_s)
    except (WaitTimeout, ConnectionLost) as error:
        raise AuthenticationError(f"a client gave up before it was known: {error}") from error
    return made


def as_client(stream: Stream, keys_dir: Path, address: str, until_s: float) -> Stream:
    """Return the encrypted stream to a task with the key of our certificate, or raise AuthenticationError."""
    expected = read_certificate(keys_dir)
    made = TlsStream(stream, _client_context(), is_server=False)
    try:
        shown = made.shake_hands(until_s)
    except AuthenticationError as error:
        raise AuthenticationError(
            f"the task at {address} was started without --tls, this one with it: {error}"
        ) from error
    except WaitTimeout as error:
        raise ConnectionLost(f"whoever listens at {address} does not speak TLS, or is very busy") from error
    except ConnectionLost as error:
        raise ConnectionLost(
            f"the task at {address} ended the TLS handshake: it is ending, or was started without --tls ({error})"
        ) from error
    if not hmac.compare_digest(fingerprint(shown), fingerprint(expected)):
        raise AuthenticationError(
            f"the task at {address} shows another certificate than {keys_dir / CERTIFICATE}: "
            "copy one folder of `paceline keys new` to all hosts"
        )
    return made


def read_certificate(keys_dir: Path) -> bytes:
    """Return our certificate in binary form."""
    try:
        return ssl.PEM_cert_to_DER_cert((keys_dir / CERTIFICATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--tls needs {keys_dir / CERTIFICATE} beside the secret ({error}); `paceline keys new` makes both."
        ) from None


def fingerprint(certificate: bytes) -> str:
    """Return the hash by which certificates are compared."""
    return hashlib.sha256(certificate).hexdigest()


@lru_cache(maxsize=8)
def _server_context(keys_dir: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # connections are few and long
    folder = Path(keys_dir)
    try:
        context.load_cert_chain(folder / CERTIFICATE, folder / PRIVATE_KEY)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"--tls needs {CERTIFICATE} and {PRIVATE_KEY} in {folder} ({error}); `paceline keys new` makes both."
        ) from None
    return context


@lru_cache(maxsize=8)
def _client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # as_client compares the whole certificate
    return context


def check_keys(keys_dir: Path) -> None:
    """Refuse a folder that TLS cannot use, before anything starts."""
    read_certificate(keys_dir)
    _server_context(str(keys_dir))
