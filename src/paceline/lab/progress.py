"""WHAT does one see while the lab measures? One line that says what runs and how long it will still take.

Called by whoever measures, between segments only. Must never draw from a thread of its own: that would be measured too.
"""

import os
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from paceline.lab.tables import drawn, is_drawable, plain

PLAIN_EVERY_S = 5.0


class Progress:
    """A line that changes in a terminal; a line every few seconds elsewhere, and with CI set."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._live: Live | None = None
        if self._console.is_terminal and sys.stdout.isatty() and not os.environ.get("CI"):
            is_beside = sys.stderr.isatty()
            self._live = Live(
                Text(), console=self._console, auto_refresh=False, transient=True, redirect_stderr=is_beside
            )
            self._live.start()
        self._next_s = 0.0

    def update(self, text: str) -> None:
        """What is going on now."""
        if self._live is not None:
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + PLAIN_EVERY_S
            print(text, flush=True)

    def say(self, text: str) -> None:
        """Something that stays."""
        if self._live is not None:
            self._console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def table(self, title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
        """A result: drawn in a terminal that is wide enough, plain elsewhere."""
        if title:
            self.say(f"\n{title}")
        if self._live is not None and is_drawable(columns, lines, self._console.width):
            self._console.print(drawn(columns, lines))
            return
        self.say(plain(columns, lines))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def duration(seconds: float) -> str:
    """
    >>> duration(7.2), duration(95.0)
    ('7 s', '1 min 35 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
