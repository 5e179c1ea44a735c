"""SHALL a task that has ended be started again, and when? From its ends so far; the supervisor does what is said here.

Pure. A restart must never hide a failure that would only repeat, and must never make a run wait for nothing: a task
that gave up after a deadline of its own (exit code 3) would only wait as long again.
"""

from collections.abc import Sequence
from signal import SIGINT, SIGKILL, SIGTERM

import msgspec

from paceline.errors import EXIT_CLUSTER, EXIT_INTERRUPTED, EXIT_NOT_SAVED, EXIT_OK, EXIT_USAGE
from paceline.telemetry.lines import FailedAt

FIRST_S = 0.1
LONGEST_S = 5.0
UNREADABLE = ("SyntaxError", "IndentationError", "TabError")
HEALTHY_S = 60.0  # who lived so long has a fresh start
RECOVERY_S = 5.0  # a ps that fails by itself so soon after it took over old memory has failed at that
LOST = -255  # no exit code: its host is gone, and nobody knows what became of it
FROM_OUTSIDE = (-SIGKILL, -SIGTERM, -SIGINT, LOST)  # says nothing about the task itself

GAVE_UP = "gave up after"  # how the message of one that has waited begins
FINAL = {
    EXIT_USAGE: "its own message says what to change",
    EXIT_CLUSTER: "it has waited as long as it may",
    EXIT_NOT_SAVED: "it has trained to the end",
    EXIT_INTERRUPTED: "it was interrupted",
}


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a task: how it ended, and what is known of its life."""

    code: int
    lived_s: float = 0.0
    gist: str = ""  # its error in a line, if it left one
    has_stepped: bool = False
    failed_at: FailedAt | None = None  # of a worker whose script failed
    had_memory: bool = False  # a ps that took over what an earlier one left


class Again(msgspec.Struct, frozen=True, kw_only=True):
    """Start it once more."""

    after_s: float
    is_empty: bool = False  # a ps: without the memory, at which it fails


class Over(msgspec.Struct, frozen=True):
    """It stays as it is; why, in a few words, where that is not plain."""

    why: str = ""


def decide(ends: Sequence[Ended], max_restarts: int) -> Again | Over:
    """What to do after the last of these ends, which are those of one task, oldest first.

    >>> decide([Ended(code=-9)], max_restarts=3)
    Again(after_s=0.1, is_empty=False)
    >>> decide([Ended(code=0)], max_restarts=3)
    Over(why='')
    """
    last, restarts = ends[-1], len(ends) - 1
    if last.code == EXIT_OK or max_restarts == 0:
        return Over()
    if last.code == EXIT_CLUSTER and last.gist and GAVE_UP not in last.gist:
        return Over("its own message says why")  # it lost somebody, say
    if last.code in FINAL:
        return Over(FINAL[last.code])
    if is_unreadable(last):
        return Over("Python cannot read it: its own message says what to change")
    if is_repeating(ends):
        between = "at the same step" if ends[-1].has_stepped else "without a step in between"
        return Over(f"it failed twice in the same way {between}")
    if restarts >= max_restarts:
        return Over(f"it was started again {restarts} times already (--max-restarts)")
    return Again(after_s=back_off_s(ends), is_empty=is_failing_at_recovery(last))


def is_repeating(ends: Sequence[Ended]) -> bool:
    """Tell whether the same error came twice, at the same step or with none in between; kills from outside are none."""
    if len(ends) < 2 or any(end.code in FROM_OUTSIDE for end in ends[-2:]):
        return False
    before, last = ends[-2:]
    if (last.code, last.gist) != (before.code, before.gist):
        return False
    if before.failed_at is not None and last.failed_at is not None and last.failed_at.is_same(before.failed_at):
        return True
    return last.gist != "" and not last.has_stepped


def is_unreadable(end: Ended) -> bool:
    """A script with a mistake in its spelling, or one that imports such a module. After a step it was other text."""
    return end.gist.startswith(UNREADABLE) and not end.has_stepped


def will_repeat(ends: Sequence[Ended]) -> bool:
    """Whether the same command would only end the same way."""
    return bool(ends) and (ends[-1].code == EXIT_USAGE or is_unreadable(ends[-1]) or is_repeating(ends))


def back_off_s(ends: Sequence[Ended]) -> float:
    """How long to wait: longer each time, unless it was well in between."""
    short = 0
    for end in reversed(ends):
        if end.lived_s >= HEALTHY_S:
            break
        short += 1
    return float(min(LONGEST_S, FIRST_S * 2 ** max(0, short - 1)))


def is_failing_at_recovery(end: Ended) -> bool:
    """A ps that took over memory and failed at once, by itself: that memory is no good."""
    return end.had_memory and end.lived_s < RECOVERY_S and end.code not in FROM_OUTSIDE
