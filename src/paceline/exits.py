"""End a script that one of our errors has stopped: with a sentence where that says all, and the error's exit code.

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

# Their messages say all: a traceback would add nothing.
TOLD_BY_MESSAGE = (UsageError, AuthenticationError, ConnectionLost, Refused, WaitTimeout, NotSaved)

# Errors of Python code that a graph of TensorFlow called: it raises one of its own instead, which quotes them.
inside: deque[BaseException] = deque(maxlen=8)

ends_waits: set[Callable[[], None]] = set()  # of other threads, for which Python would wait at the end


def true_error(error: BaseException) -> BaseException:
    """Return the error that was raised inside a graph, if that is what ended the graph; else the error itself."""
    if type(error).__module__.partition(".")[0] != "tensorflow":
        return error
    said = str(error)
    for each in reversed(inside):
        if type(each).__name__ in said and str(each) in said:
            inside.remove(each)
            return each
    return error


def is_of_our_wait(error: BaseException) -> bool:
    """Tell whether this is a Ctrl+C that came while paceline's code ran, and not the script's own. A frame of the
    standard library counts as its caller's."""
    if not isinstance(error, KeyboardInterrupt):
        return False
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    tops = [str(module).partition(".")[0] for module in modules]
    return next((top for top in reversed(tops) if top not in sys.stdlib_module_names), "") == "paceline"


def let_errors_set_the_exit_code() -> None:
    """Have our errors end a script that was started directly with their own exit codes, some of them with one sentence
    instead of a traceback; also a Ctrl+C that comes while the script waits for us."""
    if sys.excepthook is not sys.__excepthook__:
        return  # the hook of another library, or this one already

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
