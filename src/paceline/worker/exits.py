"""HOW does a script end that one of our errors stopped? A sentence where that says all, and the error's own exit code.

Called by paceline.init and paceline.Server in a script started directly; launchers/entry does it for its own tasks.
"""

import sys
from types import TracebackType

from paceline.errors import (
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


def let_errors_set_the_exit_code() -> None:
    """In a script started directly: a UsageError is one sentence, and our errors end it with their own exit codes."""
    if sys.excepthook is not sys.__excepthook__:
        return  # somebody else's, or ours

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, TOLD_BY_MESSAGE):
            print(lines.error_line(error), file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, trace)
        if isinstance(error, PacelineError):
            raise SystemExit(error.exit_code)

    sys.excepthook = hook
