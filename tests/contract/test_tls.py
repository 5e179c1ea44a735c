"""WHAT does --tls add? Nobody on the way can read, change or stand in; everything else is as without it."""

import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from lane_pairs import Running, listening
from wire_tap import Change, Tap, tapped

from paceline.cluster.certificate import make_certificate
from paceline.cluster.secret import new_keys, secret_by_hand
from paceline.errors import AuthenticationError, ClusterError, ConnectionLost, UsageError
from paceline.transport import security, tls
from paceline.transport.base import split
from paceline.transport.channel import Channel, accept, connect
from paceline.transport.security import Secret
from paceline.transport.tls import TlsStream
from paceline.wire.frames import Kind

SECRET = b"s" * 32
MARK = b"words that a stranger must not read; " * 20


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_certificate(folder)
    return folder


@pytest.fixture(scope="module")
def other_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    make_certificate(folder)
    return folder


@contextmanager
def channels(theirs: bytes, ours: bytes, change: Change | None = None) -> Iterator[tuple[Channel, Channel, Tap]]:
    """The client's channel, the server's, and who reads along."""
    with listening("tcp") as (address, listener), tapped(address, change) as tap:
        serving = Running(lambda: accept(listener.accept(), theirs))
        client = connect(tap.address, "tcp", ours)
        server = serving.result()
        try:
            yield client, server, tap
        finally:
            client.close()
            server.close()


def refused(theirs: bytes, ours: bytes) -> tuple[ClusterError, ClusterError]:
    """What the client is told, and the server."""
    with listening("tcp") as (address, listener):

        def serve() -> Channel:
            stream = listener.accept()
            try:
                return accept(stream, theirs)
            finally:
                stream.close()

        serving = Running(serve)
        with pytest.raises(ClusterError) as client:
            connect(address, "tcp", ours)
        with pytest.raises(ClusterError) as server:
            serving.result()
    return client.value, server.value


def bulk_of(channel: Channel) -> bytes:
    frame = channel.recv()
    into = bytearray(frame.bulk_bytes)
    channel.recv_bulk(frame, memoryview(into))
    return bytes(into)


@pytest.mark.parametrize("is_tls", [True, False])
def test_a_stranger_on_the_way_reads_nothing(keys: Path, is_tls: bool) -> None:
    secret = Secret(SECRET, keys if is_tls else None)
    with channels(secret, secret) as (client, server, tap):
        client.send(Kind.PUSH, tail=MARK, bulk=[MARK])
        assert bulk_of(server) == MARK
        server.send(Kind.ANSWER, bulk=[MARK])
        assert bulk_of(client) == MARK
        assert (MARK[:20] in tap.seen) is not is_tls  # without --tls everything but the secret can be read
        assert SECRET not in tap.seen


def test_much_goes_both_ways_at_once(keys: Path) -> None:
    secret = Secret(SECRET, keys)
    up, down = os.urandom(5_000_000), os.urandom(3_000_001)
    with channels(secret, secret) as (client, server, _):
        sending = [
            Running(lambda: client.send(Kind.PUSH, bulk=[up[:7], up[7:]])),
            Running(lambda: server.send(Kind.ANSWER, bulk=[down])),
        ]
        reading = [Running(lambda: bulk_of(server)), Running(lambda: bulk_of(client))]
        assert [each.result() for each in reading] == [up, down]
        for each in sending:
            each.result()


def test_a_byte_changed_on_the_way_ends_the_connection(keys: Path) -> None:
    def change(data: bytes, position: int) -> bytes:
        at = 20_000 - position  # long after the handshake
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if 0 <= at < len(data) else data

    secret = Secret(SECRET, keys)
    with channels(secret, secret, change) as (client, server, _):
        client.send(Kind.PUSH, bulk=[bytes(100_000)])
        with pytest.raises(ConnectionLost, match="changed on its way"):
            bulk_of(server)


def test_another_certificate_is_refused_and_the_sentence_says_what_to_do(keys: Path, other_keys: Path) -> None:
    told, _ = refused(Secret(SECRET, other_keys), Secret(SECRET, keys))
    assert isinstance(told, AuthenticationError)
    assert "another certificate" in str(told) and "paceline keys new" in str(told) and str(keys) in str(told)


def test_whoever_has_the_certificate_but_another_secret_is_refused(keys: Path) -> None:
    told, seen = refused(Secret(SECRET, keys), Secret(b"t" * 32, keys))
    assert isinstance(told, AuthenticationError) and "another secret" in str(told)
    assert isinstance(seen, AuthenticationError)


def test_only_one_side_with_tls_is_refused_and_both_sentences_say_so(keys: Path) -> None:
    for theirs, ours in (
        (Secret(SECRET, keys), Secret(SECRET)),
        (Secret(SECRET), Secret(SECRET, keys)),
    ):
        told, seen = refused(theirs, ours)
        assert "--tls" in str(told)
        assert isinstance(seen, AuthenticationError)


@pytest.mark.parametrize(
    "sent", [b"", b"\x16\x03\x01\x40\x00", b"\x16\x03\x01\x40\x00\x01\x00\xff\xff" + bytes(16_000)]
)
def test_one_that_does_not_end_its_tls_hello_is_given_up(
    keys: Path, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "HANDSHAKE_S", 0.1)
    with listening("tcp") as (address, listener), socket.create_connection(split(address)) as raw:
        raw.sendall(sent)
        with pytest.raises(AuthenticationError):
            Running(lambda: accept(listener.accept(), Secret(SECRET, keys))).result()


def test_I8_of_an_endless_tls_hello_64_KiB_are_read(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take_in = TlsStream._take_in
    monkeypatch.setattr(TlsStream, "_take_in", lambda *args: taken.append(take_in(*args)) or taken[-1])
    with listening("tcp") as (address, listener), socket.create_connection(split(address)) as raw:
        server = listener.accept()
        serving = Running(lambda: accept(server, Secret(SECRET, keys)))
        record = b"\x16\x03\x01\x3f\xff" + b"\x01\xff\xff\xff" + bytes(0x3FFF - 4)  # a hello that claims 16 MiB
        with suppress(OSError):
            for _ in range(20):
                raw.sendall(record)
        with pytest.raises(AuthenticationError):
            serving.result()
        server.close()
    assert 0 < sum(taken) <= 1 << 16
    monkeypatch.setattr(tls, "MAX_HANDSHAKE_BYTES", 100)  # it is we who stop reading: this hello is a good one
    refused(Secret(SECRET, keys), Secret(SECRET, keys))


def test_old_versions_of_tls_are_refused(keys: Path) -> None:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with listening("tcp") as (address, listener), socket.create_connection(split(address)) as raw:
        serving = Running(lambda: accept(listener.accept(), Secret(SECRET, keys)))
        with pytest.raises(ssl.SSLError):
            context.wrap_socket(raw)
        with pytest.raises(AuthenticationError):
            serving.result()


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
def test_on_one_host_memory_is_shared_as_without_tls(keys: Path) -> None:
    secret = Secret(SECRET, keys)
    with listening("shm") as (address, listener):
        serving = Running(lambda: accept(listener.accept(), secret))
        client = connect(address, "auto", secret)
        assert client.lane == "shm" and not isinstance(client.stream, tls.TlsStream)
        serving.result().close()
        client.close()


# --- the keys ---------------------------------------------------------------------------------------------------------


def test_keys_new_makes_what_serve_takes_for_its_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    fingerprint = new_keys(folder)
    assert {p.name: stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == dict.fromkeys(
        ("secret", "certificate.pem", "key.pem"), 0o600
    )
    secret = secret_by_hand(str(folder / "secret"), {}, is_tls=True)
    assert secret.keys_dir == folder and tls.fingerprint(tls.read_certificate(folder)) == fingerprint
    before = (folder / "secret").read_bytes()
    with pytest.raises(UsageError, match="is there already"):
        new_keys(folder)
    assert (folder / "secret").read_bytes() == before


def test_by_hand_tls_needs_a_certificate_beside_the_secret(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    with pytest.raises(UsageError, match="paceline keys new"):
        secret_by_hand(None, environ, is_tls=True)
    folder = tmp_path / "keys"
    new_keys(folder)
    make_certificate(tmp_path)
    (folder / "key.pem").write_bytes((tmp_path / "key.pem").read_bytes())  # of another certificate
    with pytest.raises(UsageError, match=r"certificate\.pem and key\.pem"):
        secret_by_hand(str(folder / "secret"), environ, is_tls=True)


def test_without_the_package_that_makes_certificates_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.cluster.certificate.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"paceline\[tls\]"):
        new_keys(tmp_path / "keys")
    assert not (tmp_path / "keys").exists()


def test_a_secret_does_not_print_itself(keys: Path) -> None:
    secret = Secret(SECRET, keys)
    for shown in (repr(secret), str(secret), f"{secret}", f"{secret!r}", repr([secret]), f"{(secret,)}"):
        assert "ssss" not in shown and SECRET.hex() not in shown
    assert bytes(secret) == SECRET and secret.hex() == SECRET.hex()
