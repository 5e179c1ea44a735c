"""Find the line of the user's script that called us, for messages.

Used by everything in worker/ that refuses what a script has done. Looks at the stack only; imports nothing of ours.
"""

import os
import sys
from types import FrameType

OURS = {"paceline", "torch", "keras", "tensorflow", *sys.stdlib_module_names}


def script_line() -> str:
    """Return where the script is now, as ` (train.py, line 31)`; empty if no frame is the script's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in OURS:
            return f" ({os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno})"
        frame = frame.f_back
    return ""
