"""WHAT are tf.app.flags? Flags that a script defines one by one and reads as attributes, as TensorFlow's programs do.

Used by ingraph/tf1. The command line is read when the first value is asked for; what nobody defined is left alone.
"""

import argparse
from typing import Any

from paceline.cluster.spelling import hint
from paceline.errors import UsageError

_TRUTH = {"true": True, "t": True, "1": True, "yes": True, "false": False, "f": False, "0": False, "no": False}


class Flags:
    """`FLAGS`: the values.

    >>> flags = Flags(); flags.define("task_index", 0, "which task", int)
    >>> flags._parse(["--task_index=3", "--something_else"]); flags.task_index
    3
    """

    def __init__(self) -> None:
        self._parser = argparse.ArgumentParser(allow_abbrev=False)
        self._values: dict[str, Any] | None = None
        self._names: list[str] = []

    def define(self, name: str, default: Any, text: str | None, kind: Any) -> None:
        """A flag from now on; once values were read, they are read again."""
        spellings = [f"--{name}", f"-{name}"]
        if kind is bool:
            self._parser.add_argument(*spellings, type=_truth, nargs="?", const=True, default=default, help=text)
            self._parser.add_argument(
                f"--no{name}", dest=name, action="store_false", default=default, help=argparse.SUPPRESS
            )
        else:
            self._parser.add_argument(*spellings, type=kind, default=default, help=text)
        self._names.append(name)
        self._values = None

    def _parse(self, argv: list[str] | None = None) -> None:
        self._values = dict(vars(self._parser.parse_known_args(argv)[0]))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._values is None:
            self._parse()
        assert self._values is not None
        if name not in self._values:
            raise UsageError(f"No flag {name!r} was defined; {hint(name, self._names)}.")
        return self._values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
            return
        getattr(self, name)
        assert self._values is not None
        self._values[name] = value


def _truth(text: str) -> bool:
    if text.lower() not in _TRUTH:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return _TRUTH[text.lower()]
