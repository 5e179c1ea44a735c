"""Strangers on the ps' port during a run: refused, unheard, and the weights are those of a run without them."""

import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psutil
import pytest
from processes import Gate, Process, Processes

from paceline.errors import AuthenticationError, ClusterError, ConnectionLost
from paceline.transport.base import split
from paceline.transport.channel import Channel, connect
from paceline.transport.security import MAGIC, Role
from paceline.wire.frames import FRAME_BYTES, Kind

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
from seeds import CORPUS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MIB = 1 << 20
FLAT_MIB = 24  # stacks of the threads that greet strangers; nothing that grows with what they send
STEADY = Path(__file__).parents[1] / "integration" / "programs" / "steady.py"
LAST = 60


def run(processes: Processes, name: str, *script: object, flags: tuple[str, ...] = ("--lane=tcp",)) -> Process:
    return processes.paceline("run", "--mode=sync", f"--run-dir={name}", *flags, STEADY, *script)


def weights(folder: Path) -> bytes:
    return (folder / "checkpoints" / f"step-{LAST:08d}" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of a run that nobody disturbs."""
    processes = Processes(tmp_path_factory.mktemp("clean"))
    run(processes, "made").ends_with(0)
    return weights(processes.folder / "made")


# --- what strangers do ------------------------------------------------------------------------------------------------


class Ps:
    """The one that is knocked at."""

    def __init__(self, folder: Path) -> None:
        self.address: str = json.loads((folder / "cluster.json").read_text())["ps"][0]
        self.secret = bytes.fromhex((folder / "secret").read_text())

    def open(self) -> socket.socket:
        return socket.create_connection(split(self.address), timeout=15)

    def is_refused(self, sent: bytes) -> bool:
        """Whether it ends a connection on which these bytes came, without a word that is not the handshake's."""
        with self.open() as raw, suppress(OSError):  # it may have ended the connection before we have said it all
            raw.sendall(sent)
            raw.shutdown(socket.SHUT_WR)
            heard = b""
            while data := raw.recv(4096):
                heard += data
            is_hello = sent.startswith(MAGIC) and len(sent) >= 43
            assert len(heard) in ((0, 64) if is_hello else (0,))  # 0: there was no room for it
        return True


def probes(ps: Ps) -> None:
    for name, sent in CORPUS.items():
        assert ps.is_refused(sent), name


def noise(ps: Ps, size_mib: int) -> None:
    rng = random.Random(7)
    block = rng.randbytes(MIB)
    for _ in range(size_mib):
        with suppress(OSError), ps.open() as raw:
            raw.sendall(block)
    with suppress(OSError), ps.open() as raw:  # and all of it on one connection that began well
        raw.sendall(MAGIC + bytes(32))
        for _ in range(size_mib):
            raw.sendall(block)


def idle(ps: Ps, count: int = 500) -> None:
    with ExitStack() as stack:
        raws = [stack.enter_context(ps.open()) for _ in range(count)]
        ended = 0
        for raw in raws:
            with suppress(ConnectionResetError):
                assert raw.recv(1) == b""
            ended += 1
        assert ended == count  # turned away at once, or after the handshake's time


def other_secret(ps: Ps) -> None:
    for role in Role:
        with pytest.raises(AuthenticationError):
            connected(ps, os.urandom(32), role)


def known(ps: Ps) -> Channel:
    """One that holds the secret."""
    return connected(ps, ps.secret, Role.WORKER)


def connected(ps: Ps, secret: bytes, role: Role) -> Channel:
    """Once there is room for it among all the others."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return connect(ps.address, "tcp", secret, timeout_s=15, role=role)
        except ConnectionLost:
            assert time.monotonic() < deadline


def is_dropped(channel: Channel) -> bool:
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        try:
            channel.recv()
        except ConnectionLost:
            return True
        except ClusterError:
            continue  # nothing yet
    return False


def replayed(ps: Ps) -> None:
    """A good frame twice; and everything that a task once said, on a new connection."""
    with closing(known(ps)) as channel:
        frame = bytes(channel._codec.pack(Kind.BEAT, 0, 0, 1, 0, b"", 0, 0, 0))
        channel.stream.send([frame + frame])
        assert is_dropped(channel)
    said: list[bytes] = []
    with closing(known(ps)) as channel:
        channel.stream.write, send = None, channel.stream.send  # every frame leaves by send
        channel.stream.send = lambda buffers, size=-1: (said.extend(map(bytes, buffers)), send(buffers, size))[1]  # type: ignore[method-assign,misc]
        channel.send(Kind.BEAT)
    assert said and ps.is_refused(b"".join(said))


def huge(ps: Ps) -> None:
    """Headers that claim 2^63 bytes and 4 GiB, from one that holds the secret: with a good MAC, and without."""
    for size, tail in ((1 << 63, 0), (0, (1 << 32) - 1)):
        with closing(known(ps)) as channel:
            frame = bytearray(channel._codec.pack(Kind.PUSH, 0, 0, 1, 0, b"", 1, 0, size))
            frame[12:16] = tail.to_bytes(4, "little")
            channel.stream.send([frame])
            assert is_dropped(channel)
    with closing(known(ps)) as channel:
        channel.stream.send([os.urandom(FRAME_BYTES)])
        assert is_dropped(channel)


STRANGERS: dict[str, Callable[[Ps], None]] = {
    "probes": probes,
    "noise": lambda ps: noise(ps, 64),
    "500 idle": idle,
    "another secret": other_secret,
    "replayed": replayed,
    "huge": huge,
}


def disturb(ps: Ps, strangers: dict[str, Callable[[Ps], None]]) -> dict[str, BaseException]:
    """All of them at once; what they did not find as it should be."""
    failed: dict[str, BaseException] = {}

    def one(name: str) -> None:
        try:
            strangers[name](ps)
        except BaseException as error:
            failed[name] = error

    threads = [threading.Thread(target=one, args=(name,)) for name in strangers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return failed


def disturbed(
    processes: Processes, gate: Gate, folder: Path, strangers: dict[str, Callable[[Ps], None]]
) -> tuple[dict[str, BaseException], float]:
    """A run with strangers between step 5 and the last: what went wrong for them, and by how much the ps grew."""
    gates = [f"--gate={worker}:{step}:{gate.path}" for worker in (0, 1) for step in (5, LAST - 1)]
    launcher = run(processes, "made", *gates)
    first = gate.arrivals(2)
    process, ps = processes.task("ps", 0), Ps(folder / "made")
    before = process.memory_info().rss
    knocking: dict[str, BaseException] = {}
    done = threading.Event()

    def knock() -> None:
        knocking.update(disturb(ps, strangers))
        done.set()

    threading.Thread(target=knock, daemon=True).start()
    for arrival in first.values():
        arrival.release()
    last = gate.arrivals(2)  # it trains while they knock
    assert done.wait(240)
    grown = (process.memory_info().rss - before) / MIB
    assert process.status() != psutil.STATUS_ZOMBIE
    for arrival in last.values():
        arrival.release()
    launcher.ends_with(0)
    return knocking, grown


def test_strangers_change_nothing(processes: Processes, gate: Gate, tmp_path: Path, clean: bytes) -> None:
    failed, grown_mib = disturbed(processes, gate, tmp_path, STRANGERS)
    assert not failed, failed
    assert grown_mib < FLAT_MIB
    assert weights(tmp_path / "made") == clean
    log = (tmp_path / "made" / "logs" / "ps-0.log").read_text()
    assert "Traceback" not in log and len(log) < 20_000


def test_a_gigabyte_of_noise_leaves_memory_flat(processes: Processes, gate: Gate, tmp_path: Path, clean: bytes) -> None:
    failed, grown_mib = disturbed(processes, gate, tmp_path, {"noise": lambda ps: noise(ps, 512)})
    assert not failed, failed
    assert grown_mib < FLAT_MIB
    assert weights(tmp_path / "made") == clean


# --- the secret -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [("--lane=tcp",), ("--lane=tcp", "--tls"), ("--lane=auto",)], ids=" ".join)
def test_the_secret_is_in_no_log_record_command_line_or_traceback(
    flags: tuple[str, ...], processes: Processes, gate: Gate, tmp_path: Path
) -> None:
    flags = (*flags, "--max-restarts=0", "--ledger")
    launcher = run(processes, "made", f"--gate=0:5:{gate.path}", "--raise-at=1:10", flags=flags)
    arrival = gate.arrival()
    secret = bytes.fromhex((tmp_path / "made" / "secret").read_text())
    forms = {secret, secret.hex().encode(), repr(bytes(secret)).encode()[2:-1], str(list(secret)).encode()}
    if "--tls" in flags:
        key = (tmp_path / "made" / "key.pem").read_text().splitlines()[1]
        forms.add(key.encode())
    for process in processes.alive():
        line = b"\0".join(word.encode() for word in process.cmdline())
        assert not [form for form in forms if form in line], process.cmdline()
        assert (os.stat(f"/proc/{process.pid}/environ").st_mode & 0o077) == 0  # where it is: for its owner
    arrival.release()
    launcher.end()
    assert "was told to fail" in launcher.text
    assert not [form for form in forms if form in launcher.text.encode()]
    own = {"secret", "key.pem", "certificate.pem"}
    for path in (tmp_path / "made").rglob("*"):
        if path.is_file() and path.name not in own:
            content = path.read_bytes()
            assert not [form for form in forms if form in content], path
    for name in own & {path.name for path in (tmp_path / "made").iterdir()}:
        assert ((tmp_path / "made" / name).stat().st_mode & 0o077) == 0
