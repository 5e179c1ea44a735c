"""HOW does a script end that one of our errors stopped? A sentence where that says all, and the error's own exit code.

Called by paceline.init and paceline.Server in a script started directly; launchers/entry does it for its own tasks.
"""

import sys
import traceback
from collections import deque
from collections.abc import Callable
from types import TracebackType

from paceline.errors import (
    EXIT_INTERRUPTED,
    AuthenticationError,
    ConnectionLost,
    NotSaved,
    PacelineError,
    Refused,
    UsageError,
    WaitTimeout,
)
from paceline.telemetry import lines

# Where these were raised adds nothing.
TOLD_BY_MESSAGE = (UsageError, AuthenticationError, ConnectionLost, Refused, WaitTimeout, NotSaved)

# Raised where a graph of TensorFlow had called out; it makes errors of its own of them, and quotes them.
inside: deque[BaseException] = deque(maxlen=8)

ends_waits: set[Callable[[], None]] = set()  # of other threads, for which Python would wait at the end


def true_error(error: BaseException) -> BaseException:
    """What was raised inside a graph, if that is what ended it."""
    if type(error).__module__.partition(".")[0] != "tensorflow":
        return error
    said = str(error)
    for each in reversed(inside):
        if type(each).__name__ in said and str(each) in said:
            inside.remove(each)
            return each
    return error


def is_of_our_wait(error: BaseException) -> bool:
    """Whether it is a Ctrl+C that came while paceline waited or talked, and not into the script's own code. What the
    standard library does is done for whoever called it."""
    if not isinstance(error, KeyboardInterrupt):
        return False
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    tops = [str(module).partition(".")[0] for module in modules]
    return next((top for top in reversed(tops) if top not in sys.stdlib_module_names), "") == "paceline"


def let_errors_set_the_exit_code() -> None:
    """In a script started directly: a UsageError is one sentence, and our errors end it with their own exit codes; so
    does Ctrl+C while the script waits for us."""
    if sys.excepthook is not sys.__excepthook__:
        return  # somebody else's, or ours

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        true = true_error(error)
        if true is not error:
            kind, error, trace = type(true), true, true.__traceback__
        if isinstance(error, KeyboardInterrupt):
            for end in ends_waits:
                end()
        if is_of_our_wait(error):
            print("Interrupted.", file=sys.stderr)
            raise SystemExit(EXIT_INTERRUPTED)
        if isinstance(error, TOLD_BY_MESSAGE):
            print(lines.error_line(error), file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, trace)
        if isinstance(error, PacelineError):
            raise SystemExit(error.exit_code)

    sys.excepthook = hook
