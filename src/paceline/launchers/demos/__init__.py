"""WHICH scripts does `paceline demo` start? Plain training scripts, each readable by itself.

Called by the command line, which starts them as it does a user's script. Must never import them.
"""

from pathlib import Path

DEMOS: dict[str, Path] = {"mnist": Path(__file__).with_name("mnist.py")}
