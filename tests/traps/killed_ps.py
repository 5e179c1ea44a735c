"""A ps that is killed again and again, for test_trap_12: `python killed_ps.py OPTIMIZER MODE PUSHES SEED NUMBERS`.

This process holds the memory (a real Keeper), forks the ps (real Core and memory) and tells it which push comes next;
it runs nothing of torch itself. The same pushes without a kill make the reference. Prints JSON.
"""

import hashlib
import json
import os
import random
import signal
import socket
import struct
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

import torch
import torch._dynamo  # a first optimizer would import it: once here, not in every ps
from lives import Life, spec_by_name

from paceline.launchers.keeper import Keeper
from paceline.modes.spec import ModeSpec
from paceline.params.layout import Layout, TensorSpec
from paceline.server.memory import KeptMemory

MODES = {
    "async": ModeSpec(),
    "sync": ModeSpec(name="sync"),
    "1 of 2": ModeSpec(name="sync", replicas_to_aggregate=1),
    "4 of 2": ModeSpec(name="sync", replicas_to_aggregate=4),
    "bounded": ModeSpec(name="bounded", staleness=1),
}
NUMBER = struct.Struct("<q")
DIGEST = -1


def main() -> None:
    optimizer, mode, pushes, seed, numbers = sys.argv[1], MODES[sys.argv[2]], *map(int, sys.argv[3:6])
    torch.set_num_threads(1)
    layout = Layout((TensorSpec("w", (numbers,), (1,), "float32", 0), TensorSpec("b", (64,), (1,), "float32", 0)))
    calm, _, _, push_s = run(layout, optimizer, mode, pushes, None, 0.0)
    rough, kills, inside, _ = run(layout, optimizer, mode, pushes, random.Random(seed), push_s)
    print(json.dumps({"same": calm == rough, "kills": kills, "inside": inside, "push_ms": 1e3 * push_s}))


def run(
    layout: Layout, optimizer: str, mode: ModeSpec, pushes: int, kill: random.Random | None, push_s: float
) -> tuple[str, int, int, float]:
    """The digest of everything after so many pushes, how often the ps was killed, how often of that in the middle of
    an update, and how long a push took."""
    keeper = Keeper("ps:0")
    pid, line = start(keeper, layout, optimizer, mode)
    kills = inside = 0
    took_s = 0.0
    for number in range(pushes):
        while True:
            try:
                line.sendall(NUMBER.pack(number))
                assert line.recv(1)  # the gradient lies in its slot
                began = time.perf_counter()
                if kill is not None and kill.random() < 0.5:
                    time.sleep(kill.random() * 1.5 * push_s)
                    os.kill(pid, signal.SIGKILL)
                    kills += 1
                if len(line.recv(NUMBER.size)) == NUMBER.size:
                    took_s += time.perf_counter() - began
                    break
            except OSError:
                pass
            os.waitpid(pid, 0)
            inside += is_pending(keeper)
            pid, line = start(keeper, layout, optimizer, mode)
    digest = ""
    while not digest:
        try:
            line.sendall(NUMBER.pack(DIGEST))
            digest = line.recv(64).decode()
        except OSError:
            pass  # the last kill came after the last answer
        os.waitpid(pid, 0)
        if not digest:
            pid, line = start(keeper, layout, optimizer, mode)
    keeper.forget()
    return digest, kills, inside, took_s / pushes


def is_pending(keeper: Keeper) -> bool:
    """Whether the ps has left an update half done."""
    holds, announced = struct.unpack("<QQ", os.pread(keeper._pieces["journal"][0], 16, 0))
    return bool(announced > holds)


def start(keeper: Keeper, layout: Layout, optimizer: str, mode: ModeSpec) -> tuple[int, socket.socket]:
    theirs = keeper.connect()
    mine, line = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        line.close()
        return pid, mine
    mine.close()
    be(Life(spec_by_name(optimizer), mode, layout, memory=lambda: KeptMemory(theirs)), line)
    os._exit(0)


def be(life: Life, line: socket.socket) -> None:
    while True:
        (number,) = NUMBER.unpack(line.recv(NUMBER.size, socket.MSG_WAITALL))
        if number == DIGEST:
            bits = life.bits()
            line.sendall(hashlib.sha256(repr(sorted(bits.items())).encode()).hexdigest().encode())
            return
        life.lay(number)
        line.sendall(b"!")
        life.again(number)
        line.sendall(NUMBER.pack(number))


if __name__ == "__main__":
    main()
