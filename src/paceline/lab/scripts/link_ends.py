"""WHO is at the two ends of a link? A raw socket, Gloo, or a worker of a ps, each with the same bytes there and back.

Started by lab/scripts/links_script in a host of its own: `serve raw|gloo` on one host, for all connections, and on the
other one process a connection, `raw`, `gloo` or `ps`, which obeys lab/scripts/orders. Must never give one system
memory, a thread or an option of the socket that makes it more than what its users have.

The raw socket is the best that a simple program does: blocking, TCP_NODELAY, `sendall` of everything, `recv_into` its
place; a thread a connection, as a ps has. `ps` repeats a push that the ps has dealt with: it is received into the slot,
checked and answered with the parameters as every push, and no optimizer runs.
"""

import argparse
import os
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from paceline.errors import ProtocolError, WaitTimeout
from paceline.lab.measuring.hosts import OUTER
from paceline.lab.scripts.carriers import Exchange, filled, repeat
from paceline.lab.scripts.orders import Orders
from paceline.launchers.task import start_session
from paceline.params.layout import Layout, TensorSpec
from paceline.params.placement import place
from paceline.transport import tls
from paceline.wire.frames import Kind, Outcome
from paceline.wire.messages import Close, OptimizerSpec
from paceline.worker.requests.client import Client
from paceline.worker.requests.link import Link

CONNECT_S, PAUSE_S = 20.0, 0.02
ACK = b"\x01"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["serve-raw", "serve-gloo", "raw", "gloo", "ps"])
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--number", type=int, default=0, help="of this connection")
    parser.add_argument("--address", default="", help="where the other end listens")
    parser.add_argument("--keys", type=Path, help="encrypt, with the certificate that lies there")
    parser.add_argument("--push-only", action="store_true", help="nothing comes back but that it has come")
    args = parser.parse_args(argv)
    if args.what.startswith("serve-"):
        serve_raw(args) if args.what == "serve-raw" else serve_gloo(args)
        return
    orders = Orders()
    if args.what == "ps":
        through_ps(orders, args)
        return
    exchange = by_raw(args) if args.what == "raw" else by_gloo(args)
    exchange()
    orders.obey(lambda count: repeat(exchange, count))


# --- a raw socket -------------------------------------------------------------------------------------------------


def serve_raw(args: argparse.Namespace) -> None:
    """The end that a ps is at."""
    host, port = args.address.split(":")
    parameters = memoryview(ACK) if args.push_only else filled(args.bytes)
    context = None
    if args.keys:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(args.keys / tls.CERTIFICATE, args.keys / tls.PRIVATE_KEY)
    with socket.create_server((host, int(port))) as listener:
        for _ in range(args.connections):
            sock = listener.accept()[0]
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is not None:
                sock = context.wrap_socket(sock, server_side=True)
            threading.Thread(target=answer_raw, args=(sock, filled(args.bytes), parameters)).start()


def answer_raw(sock: socket.socket, slot: memoryview, parameters: memoryview) -> None:
    with suppress(OSError):
        while fill(sock, slot):
            sock.sendall(parameters)


def by_raw(args: argparse.Namespace) -> Exchange:
    """The worker's end."""
    host, port = args.address.split(":")
    sock = connected((host, int(port)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if args.keys:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        sock = context.wrap_socket(sock)
    gradient, parameters = filled(args.bytes), filled(len(ACK) if args.push_only else args.bytes)

    def exchange() -> None:
        sock.sendall(gradient)
        if not fill(sock, parameters):
            raise ProtocolError("the other end closed early")

    return exchange


def connected(address: tuple[str, int]) -> socket.socket:
    """The other end may be a moment later."""
    deadline_s = time.monotonic() + CONNECT_S
    while True:
        try:
            return socket.create_connection(address)
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(PAUSE_S)


def fill(sock: socket.socket, memory: memoryview) -> bool:
    position = 0
    while position < len(memory):
        count = sock.recv_into(memory[position:])
        if count == 0:
            return False
        position += count
    return True


# --- Gloo ---------------------------------------------------------------------------------------------------------


def serve_gloo(args: argparse.Namespace) -> None:
    """Rank 0, with a thread for every other one."""
    torch, dist = joined_gloo(args, 0)
    parameters = torch.rand(args.bytes // 4)

    def answer(rank: int) -> None:
        slot = torch.rand(args.bytes // 4)
        with suppress(RuntimeError):  # the other end is gone
            while True:
                dist.recv(slot, rank)
                dist.send(parameters, rank)

    for rank in range(1, args.connections + 1):
        threading.Thread(target=answer, args=(rank,)).start()


def by_gloo(args: argparse.Namespace) -> Exchange:
    torch, dist = joined_gloo(args, 1 + args.number)
    gradient, parameters = torch.rand(args.bytes // 4), torch.rand(args.bytes // 4)

    def exchange() -> None:
        dist.send(gradient, 0)
        dist.recv(parameters, 0)

    return exchange


def joined_gloo(args: argparse.Namespace, rank: int) -> tuple[ModuleType, ModuleType]:
    """torch, and torch.distributed with its group made; only this end imports them."""
    os.environ["GLOO_SOCKET_IFNAME"] = OUTER
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{args.address}", rank=rank, world_size=args.connections + 1)
    return torch, dist


# --- ours ---------------------------------------------------------------------------------------------------------


def through_ps(orders: Orders, args: argparse.Namespace) -> None:
    """As a worker of a sync cluster, whose lane must be tcp: elsewhere nothing would cross the link."""
    session = start_session()
    layout = Layout((TensorSpec("load", (args.bytes // 4,), (1,), "float32", 0),))
    plan = place(layout, 1, "bytes")
    parameters = filled(plan.total_bytes)
    client = Client(session.identity(), layout, plan, parameters, session.say)
    client.join(OptimizerSpec("SGD", [{"lr": 0.001}]), lambda: b"", lambda: None)
    link = client.links[0]
    if link.channel.lane != "tcp":
        raise ProtocolError(f"the lane is {link.channel.lane}: these two are on one host")
    gradient = memoryview(bytearray(plan.total_bytes))  # zeros change nothing
    client.push([(gradient,)])
    client.take()
    gradient[:] = filled(plan.total_bytes)
    exchange = staged(link, gradient) if args.push_only else pushed_again(link, client.push_id, gradient)
    exchange()
    orders.obey(lambda count: repeat(exchange, count))
    link.close_run(Close())
    client.close()


def pushed_again(link: Link, push_id: int, gradient: memoryview) -> Exchange:
    def exchange() -> None:
        link.send(Kind.PUSH, 0, push_id, bulk=(gradient,))
        check(awaited(link, push_id), Outcome.DUPLICATE)

    return exchange


def staged(link: Link, gradient: memoryview) -> Exchange:
    """A push that is only acknowledged."""
    number = 1

    def exchange() -> None:
        nonlocal number
        number += 1
        link.send(Kind.STAGE, 0, number, bulk=(gradient,))
        check(awaited(link, number), Outcome.STAGED)

    return exchange


def awaited(link: Link, push_id: int) -> int:
    while True:
        try:
            return link.frame(push_id)[0]
        except WaitTimeout:
            continue


def check(told: int, outcome: Outcome) -> None:
    if told != outcome:
        raise ProtocolError(f"the ps answered {Outcome(told).name}, not {outcome.name}")


if __name__ == "__main__":
    main()
