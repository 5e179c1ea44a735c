"""HOW far is the download? A live bar in a terminal, a plain line every tenth in a pipe; both on stderr.

Called by datasets/download. Must never write to stdout, which belongs to the script.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]
PLAIN_STEP_BYTES = 10_000_000  # how often a plain line comes when the size is not known


@contextmanager
def shown(label: str, done_bytes: int, total_bytes: int | None) -> Iterator[Advance]:
    """Yields a function that is told how many bytes have just arrived."""
    with _live(label, done_bytes, total_bytes) if sys.stderr.isatty() else _plain(label, done_bytes, total_bytes) as it:
        yield it


@contextmanager
def _live(label: str, done_bytes: int, total_bytes: int | None) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=total_bytes, completed=done_bytes)
        yield lambda arrived: progress.advance(task, arrived)


@contextmanager
def _plain(label: str, done_bytes: int, total_bytes: int | None) -> Iterator[Advance]:
    step_bytes = max(total_bytes // 10, 1) if total_bytes else PLAIN_STEP_BYTES
    of_total = f" of {total_bytes / 1e6:.1f}" if total_bytes else ""
    done = done_bytes

    def line() -> None:
        print(f"{label}: {done / 1e6:.1f}{of_total} MB", file=sys.stderr, flush=True)

    def advance(arrived: int) -> None:
        nonlocal done
        before, done = done, done + arrived
        if done // step_bytes > before // step_bytes:
            line()

    line()
    yield advance
