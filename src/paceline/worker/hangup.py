"""WHAT does a closed terminal mean? SIGHUP is what one Ctrl+C is; under nohup it is nothing, and nothing to a task.

Called by cli/main, launchers, ingraph/server and the lab. The system tells a closed terminal to its foreground process
group, and a shell tells it to its jobs: it may come twice. The tasks of a launcher ignore it: the launcher ends them
when it has had them save.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def ignore() -> None:
    """From now on a closed terminal is nothing to this process, nor to what it executes."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def as_interrupt() -> None:
    """Let it raise KeyboardInterrupt, once; where it is ignored (nohup) it stays so."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        ignore()
        raise KeyboardInterrupt

    signal.signal(signal.SIGHUP, interrupt)


@contextmanager
def handled(handle: Callable[[], None]) -> Iterator[None]:
    """Let it do this, the first time, and nothing later; where it is ignored, and outside the main thread, nothing."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGHUP)
    if not is_main or before is signal.SIG_IGN:
        yield
        return

    def once(number: int, frame: FrameType | None) -> None:
        ignore()
        handle()

    signal.signal(signal.SIGHUP, once)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGHUP) is once:  # who was told once has heard it, until this process ends
            signal.signal(signal.SIGHUP, before)
