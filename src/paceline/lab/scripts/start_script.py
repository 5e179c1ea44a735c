"""HOW long until the first step? A process that starts clusters, or imports torch as often, when the lab says so.

Run by lab/measuring/starting: `run` and `imports` obey the lab; `worker` is what `run` trains. Must never leave a
process behind: all it starts is in its own process group, which the lab ends, and a launcher's tasks end with their
launcher.

A step of `run`: 1. start `paceline run` (1 ps + 2 workers), 2. wait until the last worker has said that its first step
is done; here the time ends; 3. wait until the launcher has ended. Of `imports`: as many `python -c "import torch"` as
there are tasks, at once, until the last has ended.
"""

import argparse
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import ClusterError
from paceline.lab.scripts.orders import Orders

RUN, IMPORTS, WORKER = "run", "imports", "worker"
LIMIT_S = 60.0
PYTHON = (sys.executable, "-P")


class Starts:
    """Clusters, one after the other, each in a folder of its own."""

    def __init__(self, num_ps: int, num_workers: int) -> None:
        self._counts = ("--ps", str(num_ps), "--workers", str(num_workers))
        self._num_workers = num_workers
        self._running: list[tuple[subprocess.Popen[bytes], Path]] = []

    def steps(self, count: int) -> None:
        """1 and 2, so often."""
        for _ in range(count):
            self._start()

    def _start(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="paceline-start-"))
        told = folder / "told"
        os.mkfifo(told)
        descriptor = os.open(told, os.O_RDWR)  # for writing too: it never ends while workers come and go
        try:
            script = ("-m", "paceline.lab.scripts.start_script", WORKER, "--told", str(told))
            command = [*PYTHON, "-m", "paceline", "run", *self._counts, "--run-dir", str(folder / "run"), *script]
            self._running.append((quiet(command), folder))
            self._await(descriptor)
        finally:
            os.close(descriptor)

    def _await(self, descriptor: int) -> None:
        deadline_s, heard = time.monotonic() + LIMIT_S, b""
        while heard.count(b"\n") < self._num_workers:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
                raise ClusterError(f"{self._num_workers} workers did not do their first step within {LIMIT_S:g} s.")
            heard += os.read(descriptor, 4096)

    @contextmanager
    def ended(self) -> Iterator[None]:
        """3, before the lab hears the time."""
        for process, folder in self._running:
            if process.wait(LIMIT_S):
                raise ClusterError(f"paceline run ended with exit code {process.returncode}; its folder: {folder}")
            shutil.rmtree(folder)
        self._running.clear()
        yield


def imports(tasks: int) -> None:
    """As many processes that only import torch."""
    for process in [quiet([*PYTHON, "-c", "import torch"]) for _ in range(tasks)]:
        if process.wait(LIMIT_S):
            raise ClusterError(f'python -c "import torch" ended with exit code {process.returncode}.')


def quiet(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def first_step(told: Path) -> None:
    """What a worker does: document 000's recipe, one step, on images that cost nothing to load."""
    import torch
    from torch.nn import functional

    import paceline
    from paceline.lab.scripts.worker_script import BATCH, LEARNING_RATE
    from paceline.models.mlp import document_000

    ctx = paceline.init()
    model = document_000(seed=1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    functional.cross_entropy(model(torch.rand(BATCH, 784)), torch.randint(0, 10, (BATCH,))).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    _ = ctx.global_step  # takes the answer: the step is done
    with told.open("wb", buffering=0) as pipe:
        pipe.write(f"{ctx.worker_index}\n".encode())


def main(argv: Sequence[str] | None = None) -> None:
    """Obey, or be a worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=[RUN, IMPORTS, WORKER])
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--told", type=Path)
    args = parser.parse_args(argv)
    if args.what == WORKER:
        first_step(args.told)
        return
    orders = Orders()
    if args.what == IMPORTS:
        orders.obey(lambda count: imports(count * (args.ps + args.workers)))
        return
    starts = Starts(args.ps, args.workers)
    orders.obey(starts.steps, starts.ended)


if __name__ == "__main__":
    main()
