"""WHAT can go wrong? One tree, mapped from lower-level errors at the boundary that saw them.

    PacelineError
    ├── UsageError              the caller's mistake, told before anything starts          exit 2
    ├── TrainingFailed          the script, or the numbers in it, failed                   exit 1
    │   ├── NonFiniteGradient   gradients were not finite too many times in a row
    │   └── RemoteOpError       an op on another task raised; carries that task's name and the traceback's text
    ├── CheckpointError         a checkpoint could not be written, or is not what was written   exit 1
    │   └── NotSaved            trained to the end, but the final model could not be saved  exit 4
    └── ClusterError            the cluster could not form, or lost too much               exit 3
        ├── WaitTimeout         a wait passed its deadline; says for whom
        ├── ConnectionLost      the other side went away in the middle
        │   └── HostNotFound    it could not be reached at all: its host name is not known here
        ├── AuthenticationError the secrets differ
        ├── ProtocolError       bytes that no paceline task would send
        ├── Refused             a ps said no: fenced, a different layout, not allowed
        └── StepAborted         a session's step was given up because something else failed

Called by everyone; imports nothing; must never format secrets into a message.
"""

EXIT_OK = 0
EXIT_TRAINING = 1
EXIT_USAGE = 2
EXIT_CLUSTER = 3
EXIT_NOT_SAVED = 4
EXIT_INTERRUPTED = 130


class PacelineError(Exception):
    """Base of every error that paceline raises on purpose."""

    exit_code = EXIT_TRAINING


class UsageError(PacelineError):
    """The caller's mistake; one sentence that says what would be right."""

    exit_code = EXIT_USAGE


class TrainingFailed(PacelineError):
    """The user's script raised, or its numbers went wrong."""

    exit_code = EXIT_TRAINING


class NonFiniteGradient(TrainingFailed):
    """Too many gradients in a row held a NaN or an infinity."""


class RemoteOpError(TrainingFailed):
    """An op raised on another task: its name, what it raised, and the traceback there as text."""

    def __init__(self, message: str, task: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.task = task
        self.remote_traceback = remote_traceback


class CheckpointError(PacelineError):
    """A checkpoint could not be written, or its files are not what was written; names the file and why."""


class NotSaved(CheckpointError):
    """Training is done, and its last checkpoint could not be written; to do it again would need the ps, which end."""

    exit_code = EXIT_NOT_SAVED


class ClusterError(PacelineError):
    """The cluster could not form, or lost too much to go on."""

    exit_code = EXIT_CLUSTER


class WaitTimeout(ClusterError):
    """A wait passed its deadline; the message names whom it waited for."""


class ConnectionLost(ClusterError):
    """The other side closed the connection or stopped answering."""


class HostNotFound(ConnectionLost):
    """The host name of an address does not exist, or cannot be looked up here."""


class AuthenticationError(ClusterError):
    """The two sides do not share a secret."""


class ProtocolError(ClusterError):
    """Bytes that no paceline task of this version would send."""


class Refused(ClusterError):
    """A ps said no, with its reason."""


class StepAborted(ClusterError):
    """A step of a session was given up because of something else that failed; the master knows what."""
