"""WHAT does a host say about itself? `python -m paceline.launchers.hosts.probe`: questions on stdin, answers on stdout.

Started by hosts/preflight through ssh, on every host at once. A question and an answer are a line of JSON each; an
answer begins with MARK, because a login shell may print, too. It holds the ports that it found until stdin ends, and
ends with it. Must never import torch, listen longer than it is asked, nor change anything on the host.
"""

import os
import socket
import sys
import threading
import time

import msgspec

from paceline.cluster.listening import by_whom
from paceline.launchers.hosts.links import Link, Sink, bound, measure, own_address, resolved
from paceline.launchers.hosts.machine import Machine, look

MARK = b"paceline-probe "
NAMED = 10  # ports, of a range that is full
LONGEST_S = 60.0


class AskLook(msgspec.Struct, frozen=True, kw_only=True, tag="look"):
    """Who are you, and where could tasks listen?"""

    token: bytes  # of those who may measure the way to this host
    address: str = ""  # where others reach this host
    num_ports: int = 0
    between: tuple[int, int] | None = None  # where ports may lie


class AskClock(msgspec.Struct, frozen=True, tag="clock"):
    """What time is it?"""


class AskAddress(msgspec.Struct, frozen=True, tag="address"):
    """Which of your addresses does this host see?"""

    host: str


class AskLink(msgspec.Struct, frozen=True, kw_only=True, tag="link"):
    """How fast is the way from you to this sink?"""

    host: str
    port: int
    token: bytes
    seconds: float


Ask = AskLook | AskClock | AskAddress | AskLink


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """To any of them; `error` says why there is no other."""

    at_s: float
    error: str = ""
    machine: Machine | None = None
    ports: tuple[int, ...] = ()
    taken: dict[int, str] = {}  # where too few are free: a port -> by whom it is in use, as far as that is seen
    sink_port: int = 0
    address: str = ""  # to AskLook: what this host itself takes its address for; to AskAddress: what that host sees
    link: Link | None = None


class Probe:
    """One host, as it answers; holds its sink and its ports."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []
        self._sink: Sink | None = None

    def answer(self, ask: Ask) -> Answer:
        """An error of the network is an answer, too."""
        try:
            if isinstance(ask, AskLook):
                return self._look(ask)
            if isinstance(ask, AskAddress):
                return Answer(at_s=time.time(), address=own_address(ask.host))
            if isinstance(ask, AskLink):
                return Answer(at_s=time.time(), link=measure(ask.host, ask.port, ask.token, ask.seconds))
            return Answer(at_s=time.time())
        except OSError as error:
            return Answer(at_s=time.time(), error=reason(error))

    def close(self) -> None:
        """Let go of the ports."""
        if self._sink is not None:
            self._sink.close()
        while self._held:
            self._held.pop().close()

    def _look(self, ask: AskLook) -> Answer:
        taken: dict[int, str] = {}
        try:
            free = [self._hold(ask.between) for _ in range(ask.num_ports)]
            self._sink = Sink(ask.token, self._left(ask.between))
        except OSError:
            free, taken = [], self._taken(ask.between)
        return Answer(
            at_s=time.time(),
            machine=look(),
            ports=tuple(free),
            taken=taken,
            sink_port=self._sink.port if self._sink else 0,
            address=resolved(ask.address) if ask.address else "",
        )

    def _hold(self, between: tuple[int, int] | None) -> int:
        self._held.append(bound(self._left(between)))
        return int(self._held[-1].getsockname()[1])

    def _left(self, between: tuple[int, int] | None) -> list[int] | None:
        """The ports that we do not hold: a second socket of ours would be let in."""
        if between is None:
            return None
        held = {each.getsockname()[1] for each in self._held}
        return [port for port in range(between[0], between[1] + 1) if port not in held]

    def _taken(self, between: tuple[int, int] | None) -> dict[int, str]:
        """Who has the ports that we were to take, the first of them."""
        taken = {}
        for port in (self._left(between) or [])[:NAMED]:
            try:
                bound([port]).close()
            except OSError:
                taken[port] = by_whom(port)
        return taken


def reason(error: OSError) -> str:
    """Why a connection failed, in the fewest words."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, ConnectionAbortedError):
        return "another machine answers there"
    return (error.strerror or str(error)).lower()


def main() -> None:
    """Answers until stdin ends."""
    probe = Probe()
    guard = threading.Timer(LONGEST_S, os._exit, (1,))
    guard.daemon = True
    guard.start()
    try:
        for line in sys.stdin.buffer:
            answer = probe.answer(msgspec.json.decode(line, type=Ask))
            sys.stdout.buffer.write(MARK + msgspec.json.encode(answer) + b"\n")
            sys.stdout.buffer.flush()
    finally:
        probe.close()


if __name__ == "__main__":
    main()
