"""WHAT runs before a plain program, in its process? `python -m paceline.launchers.plain_task PARENT PROGRAM …`.

Started by launchers/children. It sees to it that the process ends with its launcher, and becomes the program: nothing
of paceline is left in it. Must never import more than that takes.
"""

import os
import signal
import sys
from collections.abc import Sequence

from paceline import hangup
from paceline.launchers.kernel import die_with


def main(argv: Sequence[str]) -> None:
    """Become `python PROGRAM …`; does not return."""
    die_with(int(argv[0]))
    hangup.ignore()  # the launcher's affair
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's `&` has it ignored, and that is inherited
    os.execv(sys.executable, [sys.executable, *argv[1:]])


if __name__ == "__main__":
    main(sys.argv[1:])
