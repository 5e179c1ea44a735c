"""WHAT does it cost to carry bytes there and back? Through a real ps, through a raw socket, and by memcpy alone.

Run by lab/measuring/starting, one process each. Through the ps: a gradient is staged (no update follows), then the
parameters are pulled; the frames, MACs and checksums are those of training. Must never import torch, and times nothing
itself.
"""

import argparse
import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence

from paceline.errors import ProtocolError, WaitTimeout
from paceline.lab.scripts.orders import Orders
from paceline.launchers.task import start_session
from paceline.params.arena import Arena
from paceline.params.layout import Layout, TensorSpec
from paceline.params.placement import place
from paceline.wire.frames import Kind, Outcome
from paceline.wire.messages import Close, OptimizerSpec
from paceline.worker.requests.client import Client
from paceline.worker.requests.link import Answered, Link

Exchange = Callable[[], None]
HALF_PAGE_BYTES = 2048


def main(argv: Sequence[str] | None = None) -> None:
    """Set a carrier up, see that it carries, then obey."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["memcpy", "socket", "ps"])
    parser.add_argument("--bytes", type=int, required=True)
    args = parser.parse_args(argv)
    orders = Orders()
    if args.what == "ps":
        through_ps(orders, args.bytes)
    else:
        exchange = by_memcpy(args.bytes) if args.what == "memcpy" else by_socket(args.bytes)
        orders.obey(lambda count: repeat(exchange, count))


def repeat(exchange: Exchange, count: int) -> None:
    for _ in range(count):
        exchange()


def filled(size_bytes: int, offset_bytes: int = 0) -> memoryview:
    """Memory whose pages are all there and all differ: untouched ones would be copied from one page of zeros."""
    memory = Arena.private(offset_bytes + size_bytes).memory[offset_bytes:]
    memory[:] = os.urandom(size_bytes)
    return memory


def by_memcpy(size_bytes: int) -> Exchange:
    """The least that push and pull can cost on one host: one copy each.

    Half a page between source and destination: with both at the same place of their pages, loads are taken to depend
    on stores 4 kB away, and copying is a third slower. A floor must be measured at its best.
    """
    gradient, into = filled(size_bytes), filled(size_bytes)
    slot, parameters = filled(size_bytes, HALF_PAGE_BYTES), filled(size_bytes, HALF_PAGE_BYTES)

    def exchange() -> None:
        slot[:] = gradient
        into[:] = parameters

    return exchange


def by_socket(size_bytes: int) -> Exchange:
    """The least between two processes over TCP: all bytes there, then all bytes back, nothing checked."""
    listener = socket.create_server(("127.0.0.1", 0))
    multiprocessing.get_context("fork").Process(target=_echo, args=(listener, size_bytes), daemon=True).start()
    sock = socket.create_connection(listener.getsockname())
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.close()
    sent, received = filled(size_bytes), filled(size_bytes)

    def exchange() -> None:
        sock.sendall(sent)
        if not _fill(sock, received):
            raise ProtocolError("the echo ended early")

    exchange()
    if sent != received:
        raise ProtocolError("the echo gave other bytes back")
    return exchange


def _echo(listener: socket.socket, size_bytes: int) -> None:
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = filled(size_bytes)
    while _fill(sock, memory):
        sock.sendall(memory)


def _fill(sock: socket.socket, memory: memoryview) -> bool:
    position = 0
    while position < len(memory):
        count = sock.recv_into(memory[position:])
        if count == 0:
            return False
        position += count
    return True


def through_ps(orders: Orders, size_bytes: int) -> None:
    """As the one worker of a cluster in sync mode, over whichever lane it was given."""
    session = start_session()
    layout = Layout((TensorSpec("load", (size_bytes // 4,), (1,), "float32", 0),))
    plan = place(layout, 1, "bytes")
    parameters = filled(plan.total_bytes)
    first = bytes(parameters)
    client = Client(session.identity(), layout, plan, parameters, session.say)
    client.join(OptimizerSpec("SGD", [{"lr": 0.001}]), lambda: b"", lambda: None)
    link = client.links[0]
    exchange = staging(link, filled(plan.total_bytes))
    parameters[:] = bytes(plan.total_bytes)
    exchange()
    if parameters != first:
        raise ProtocolError("the ps gave other bytes back")
    orders.obey(lambda count: repeat(exchange, count))
    link.close_run(Close())
    client.close()


def staging(link: Link, gradient: memoryview) -> Exchange:
    """1. the gradient into the slot, by copy or by wire, and its ack; 2. the parameters into the arena."""
    number = 0

    def exchange() -> None:
        nonlocal number
        number += 1  # each request has its own: an answer to the one before may still be on its way
        if link.slot is not None:  # 1
            link.slot[:] = gradient
            link.send(Kind.STAGE, 0, number)
        else:
            link.send(Kind.STAGE, 0, number, bulk=(gradient,))
        _await(link.answer, number, Outcome.STAGED)
        number += 1
        link.send(Kind.PULL, 0, number)  # 2
        _await(link.frame, number, Outcome.APPLIED)
        link.read(number)

    return exchange


def _await(answer: Callable[[int], Answered], number: int, outcome: Outcome) -> None:
    while True:
        try:
            told = answer(number)[0]
            break
        except WaitTimeout:
            continue
    if told != outcome:
        raise ProtocolError(f"the ps answered {Outcome(told).name}, not {outcome.name}")


if __name__ == "__main__":
    main()
