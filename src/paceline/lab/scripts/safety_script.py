"""HOW long does each part of safety take, alone? The very functions of a step, in a loop, at 318 kB; told in lab.json.

Started by lab/measuring/whole_runs through `paceline run`, as its one worker; it also trains a few steps, so that the
run is one. Must never measure anything that a step does not call, nor leave out a call: Parts.of says how often each
comes.
"""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import xxhash

import paceline
from paceline.lab.matrices.safety import Parts
from paceline.lab.scripts.bare import BareCodec
from paceline.lab.scripts.curves import TOLD
from paceline.lab.scripts.mnist_script import folder_of
from paceline.models.mlp import document_000
from paceline.telemetry.ledger import Kind as Line
from paceline.telemetry.ledger import Ledger
from paceline.transport.channel import Codec
from paceline.wire.frames import Kind

ROUNDS, CALLS = 15, 400
STEPS = 20


def main() -> None:
    """Train a little, then measure."""
    torch.set_num_threads(1)
    ctx = paceline.init()
    model = document_000(seed=1)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    model, optimizer = ctx.prepare(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(STEPS):
        optimizer.step()
    folder = folder_of(ctx)
    told = measured(sum(p.numel() for p in model.parameters()), folder / "parts.bin")
    (folder / TOLD).write_bytes(msgspec.json.encode(told))


def measured(count: int, ledger: Path) -> Parts:
    """Microseconds of one call of each."""
    gradient = torch.ones(count)
    payload = gradient.numpy().data.cast("B")
    book = Ledger(ledger)

    def record() -> None:
        book.write(Line.PUSH, 0, 0, 1, 1, 1)

    told = Parts(
        payload_bytes=payload.nbytes,
        frame_us=us_of(framing(Codec)) - us_of(framing(BareCodec)),
        finite_us=us_of(lambda: gradient.sum().item()),
        hash_us=us_of(lambda: xxhash.xxh3_64_intdigest(payload)),
        record_us=us_of(record),
    )
    book.close()
    ledger.unlink()
    return told


def framing(codec: type[Codec]) -> Callable[[], object]:
    """A frame packed by one side and unpacked by the other."""
    keys = b"1" * 32, b"2" * 32
    ours, theirs = codec(*keys), codec(keys[1], keys[0])
    return lambda: theirs.unpack(bytearray(ours.pack(Kind.PUSH, 0, 1, 1, 0, b"", 1, 1, 0)))


def us_of(call: Callable[[], object]) -> float:
    """Lower quartile over rounds, of which each makes many calls."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append(1e6 * (time.perf_counter() - began) / CALLS)
    return sorted(times)[ROUNDS // 4]


if __name__ == "__main__":
    main()
