"""Treat a closed terminal (SIGHUP) as one Ctrl+C; ignore it under nohup, and in the tasks of a launcher.

Called by cli/main, launchers, ingraph/server and the lab. The signal may come twice: the system sends it to the
foreground process group, a shell to its jobs. A launcher ends its tasks itself, once they have saved.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def ignore() -> None:
    """Ignore closed terminals from now on, in this process and in those that it starts."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def as_interrupt() -> None:
    """Raise KeyboardInterrupt when the terminal closes, once; do nothing if SIGHUP is ignored (nohup) or handled."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
        return
    signal.signal(signal.SIGHUP, _once(_interrupt))


@contextmanager
def handled(handle: Callable[[], None]) -> Iterator[None]:
    """Call `handle` when the terminal closes inside, once; not where SIGHUP is ignored, nor outside the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGHUP)
    if not is_main or before is signal.SIG_IGN:
        yield
        return

    once = _once(handle)
    signal.signal(signal.SIGHUP, once)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGHUP) is once:  # else it came, and stays ignored
            signal.signal(signal.SIGHUP, before)


def _once(handle: Callable[[], None]) -> Callable[[int, FrameType | None], None]:
    def on_hangup(number: int, frame: FrameType | None) -> None:
        ignore()
        handle()

    return on_hangup


def _interrupt() -> None:
    raise KeyboardInterrupt
