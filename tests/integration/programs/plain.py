"""A program that knows nothing of paceline, as TensorFlow's are: a ps that serves for ever, workers that come to it.

It writes down what it was given as JSON, its first line. A worker comes to the ps first, whoever was started first.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time

WINDOW_S = 0.05  # of processor time
WINDOWS = 12


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job_name", required=True)
    parser.add_argument("--task_index", type=int, required=True)
    parser.add_argument("--ps_hosts", required=True)
    parser.add_argument("--worker_hosts", required=True)
    parser.add_argument("--fails", type=int, default=-1, help="the worker that raises")
    parser.add_argument("--code", type=int, help="what the failing one exits with, instead of raising")
    parser.add_argument("--deaf", action="store_true", help="to Ctrl+C, as a session that waits in C++ is")
    parser.add_argument("--child", action="store_true", help="start a process that never ends")
    parser.add_argument("--gate", default="", help="workers come to this socket, and wait there")
    parser.add_argument("--paces", action="store_true", help="listen, and tell how long processor time takes")
    args = parser.parse_args()
    given = {
        "argv": sys.argv[1:],
        "tf_config": json.loads(os.environ["TF_CONFIG"]),
        "modules": sorted(name for name in ("paceline", "torch") if name in sys.modules),
        "environ": {
            name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "PACELINE_TASK", "CUDA_VISIBLE_DEVICES")
        },
        "path": sys.path[0],
        "name": __name__,
    }
    print(json.dumps(given), flush=True)
    if args.deaf:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if args.child:
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    if args.job_name == "ps":
        serve(args.ps_hosts.split(",")[args.task_index])
    come_to(args.ps_hosts.split(",")[0])
    if args.paces:
        with listener(args.worker_hosts.split(",")[args.task_index]):
            print(json.dumps(paces()), flush=True)
    if args.gate:
        wait_at(args.gate, f"{args.job_name}:{args.task_index} pid {os.getpid()}\n")
    if args.fails == args.task_index:
        if args.code is not None:
            sys.exit(args.code)
        raise ValueError("as it was asked to")


def listener(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_server((host, int(port)))


def serve(address: str) -> None:
    """As server.join(): for ever."""
    with listener(address) as held:
        while True:
            held.accept()[0].close()


def come_to(address: str) -> None:
    host, _, port = address.rpartition(":")
    while True:
        try:
            socket.create_connection((host, int(port))).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.02)  # TensorFlow's workers look again and again, too


def wait_at(gate: str, text: str) -> None:
    with socket.socket(socket.AF_UNIX) as side:
        side.connect(os.path.relpath(gate))
        side.sendall(text.encode())
        side.recv(1)


def paces() -> list[float]:
    """How many seconds went by for one of processor time, in each window."""
    found = []
    for _ in range(WINDOWS):
        began_s, until_s = time.monotonic(), time.process_time() + WINDOW_S
        while time.process_time() < until_s:
            pass
        found.append((time.monotonic() - began_s) / WINDOW_S)
    return found


if __name__ == "__main__":
    main()
