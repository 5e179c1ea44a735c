"""Find the line of the user's script that called us, for messages, and tell its frames from those of libraries.

Used by everything in worker/ that refuses what a script has done, and by worker/positions/loops. Looks at the stack
only.
"""

import os
import sys
import sysconfig
from collections.abc import Collection
from types import FrameType

from paceline import forks

OURS = ("paceline", "torch", "keras", "tensorflow")
LAUNCHERS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "launchers", "")
PYTHON = ("<frozen", *(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")))
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def script_line() -> str:
    """Return where the script is now, as ` (train.py, line 31)`; empty if no frame is the script's. Pass over a library
    between the script and us (accelerate, say), unless the whole program is installed."""
    frame: FrameType | None = sys._getframe(1)
    installed = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if not is_of(OURS, frame) and not path.startswith(LAUNCHERS):
            line = f" ({os.path.basename(path)}, line {frame.f_lineno})"
            if not is_library(frame):
                return line
            if _is_installed(path):
                installed = installed or line
        frame = frame.f_back
    return installed


def script_depth() -> int:
    """Return how many frames the caller is below the script, as warnings.warn counts them."""
    frame: FrameType | None = sys._getframe(1)
    depth = 1
    while frame is not None and (is_of(OURS, frame) or frame.f_code.co_filename.startswith(LAUNCHERS)):
        frame, depth = frame.f_back, depth + 1
    return depth


def check_owner(owner: forks.Owner, what: str) -> None:
    """Refuse what a forked child asks of the cluster: only the process that owns a task can do it."""
    if not owner.is_here:
        raise owner.refusal(f"{what}{script_line()}")


def is_of(packages: Collection[str], frame: FrameType) -> bool:
    """Tell whether a frame's module belongs to one of these packages."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in packages


def is_library(frame: FrameType) -> bool:
    """Tell whether a frame's file is Python's own, or was installed."""
    path = frame.f_code.co_filename
    return path.startswith(PYTHON) or _is_installed(path)


def _is_installed(path: str) -> bool:
    return any(part in path for part in INSTALLED)
