"""HOW does one stop the lab? Signals become KeyboardInterrupt, and cleaning up is not interrupted twice.

Called by lab/run, lab/measuring/repetitions and lab/measuring/whole_runs, in the main thread only.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from paceline import hangup

ONCE = (signal.SIGTERM, signal.SIGHUP)  # who sent one of these will not send it again


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and a closed terminal end the run as Ctrl+C does."""

    def interrupt(number: int = 0, frame: FrameType | None = None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with hangup.handled(interrupt):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def undisturbed() -> Iterator[None]:
    """A second Ctrl+C while everything is being ended does not leave half of it running. SIGTERM and SIGHUP count
    afterwards."""
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in ONCE if signal.getsignal(number) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, lambda got, frame: came.append(got))
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupt)
        for number, handler in before.items():
            signal.signal(number, handler)
        for got in came[:1]:
            signal.raise_signal(got)
