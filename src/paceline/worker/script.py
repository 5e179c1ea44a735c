"""Find the line of the user's script that called us, for messages.

Used by everything in worker/ that refuses what a script has done. Looks at the stack only; imports nothing of ours.
"""

import os
import sys
import sysconfig
from types import FrameType

OURS = ("paceline", "torch", "keras", "tensorflow")
LAUNCHERS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "launchers", "")
PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def script_line() -> str:
    """Return where the script is now, as ` (train.py, line 31)`; empty if no frame is the script's. A library between
    the script and us (accelerate, say) is passed over, unless the whole program is installed."""
    frame: FrameType | None = sys._getframe(1)
    installed = ""
    while frame is not None:
        module, path = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        is_installed = any(part in path for part in INSTALLED)
        is_python = path.startswith("<frozen") or (path.startswith(PYTHON) and not is_installed)
        if module.partition(".")[0] not in OURS and not path.startswith(LAUNCHERS) and not is_python:
            line = f" ({os.path.basename(path)}, line {frame.f_lineno})"
            if not is_installed:
                return line
            installed = installed or line
        frame = frame.f_back
    return installed
