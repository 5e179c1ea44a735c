"""HOW does what an op raised come back? As text, with its task and its traceback; our own errors as what they are.

Used by ingraph/calls and parts, where it was raised, by remote, where it is raised again, and by master for a reason.
Must never fail itself: an exception of a program may have any name, and a text that cannot be made or sent.
"""

import traceback
from pathlib import Path
from types import TracebackType

from paceline import errors
from paceline.errors import PacelineError, RemoteOpError
from paceline.wire.ops import Raised, sendable, shortened

_OURS = str(Path(__file__).parent)


def is_ours(error: BaseException) -> bool:
    """Whether paceline has this very class; a program's own may have the same name, or be made of one of ours."""
    return getattr(errors, type(error).__name__, None) is type(error)


def text_of(error: BaseException) -> str:
    """What an exception says, in characters that can be sent and printed.

    >>> text_of(ValueError("half a pair: \\ud800"))
    'half a pair: \\\\ud800'
    """
    try:
        return sendable(str(error))
    except BaseException:  # its __str__ is the program's
        return "<its text cannot be made>"


def told(what: str, task: str, error: BaseException) -> RemoteOpError:
    """An op's own exception as the error that its client sees, made on the task where it happened."""
    return _as_remote(what, task, type(error).__name__, text_of(error), _traceback_of(error))


def message_of(error: BaseException) -> Raised:
    """An exception as it is sent."""
    kind, text = sendable(type(error).__name__), shortened(text_of(error))
    if isinstance(error, RemoteOpError) and is_ours(error):
        return Raised(kind, text, shortened(error.remote_traceback), is_ours=True, task=error.task)
    if is_ours(error):
        return Raised(kind, text, is_ours=True)
    return Raised(kind, text, shortened(_traceback_of(error)))


def error_of(raised: Raised, task: str, op: str) -> PacelineError:
    """The same, as it is raised here. An error from a task further on keeps the name of that one."""
    kind = getattr(errors, raised.kind, None) if raised.is_ours else None
    if kind is RemoteOpError:
        return RemoteOpError(raised.message, raised.task or task, raised.text)
    if isinstance(kind, type) and issubclass(kind, PacelineError):
        return kind(raised.message)
    return _as_remote(op, task, raised.kind, raised.message, raised.text)


def _as_remote(what: str, task: str, kind: str, message: str, trace: str) -> RemoteOpError:
    sentence = f"{what} failed on {task}: {kind}: {message}"
    return RemoteOpError(f"{sentence}\n--- its traceback there ---\n{trace}".rstrip(), task, trace)


def _traceback_of(error: BaseException) -> str:
    try:
        return sendable("".join(traceback.format_exception(type(error), error, _of_the_op(error.__traceback__))))
    except BaseException:  # it asks the exception for its text, its notes and its cause
        return ""


def _of_the_op(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames that only called the op."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename.startswith(_OURS):
        inner = inner.tb_next
    return inner or trace
