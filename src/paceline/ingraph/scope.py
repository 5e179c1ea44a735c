"""WHERE shall the ops of this block run, and into which graph do they go? What `with paceline.device(…)` says.

Asked by ingraph/op and graph for every op that is called. A thread has its own scopes. Must never reach another task.
"""

import threading
from types import TracebackType
from typing import Any

from paceline.cluster.devices import Device
from paceline.errors import UsageError
from paceline.exits import let_errors_set_the_exit_code


class _Here(threading.local):
    def __init__(self) -> None:
        self.scopes: list[device] = []
        self.graphs: list[Any] = []  # of ingraph.graph, which imports this module
        self.controls: list[list[Any]] = []


_here = _Here()


class device:  # TensorFlow’s name for it
    """Ops called in this block run on that device; an inner block refines an outer one, None forgets it.

    >>> with device("/job:worker/task:1"), device("/gpu:0"):
    ...     str(use())  # what an op asks
    '/job:worker/task:1/device:GPU:0'
    """

    def __init__(self, name: "str | Device | None", must_be_used: bool = True) -> None:
        let_errors_set_the_exit_code()
        self.name = name
        self._inner = name if isinstance(name, Device) else Device.parse(name) if name is not None else None
        self._must_be_used = must_be_used and name is not None
        self._is_used = False
        self.merged = Device()

    def __enter__(self) -> "device":
        outer = current()
        self.merged = Device() if self._inner is None else outer.merge(self._inner)
        self._is_used = False
        _here.scopes.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        assert _here.scopes[-1] is self, "device scopes are left in the order in which they were entered"
        _here.scopes.pop()
        if kind is None and self._must_be_used and not self._is_used:
            raise UsageError(
                f"Nothing in the block of device {str(self.name)!r} was an op, so nothing ran there; put @paceline.op "
                "on the functions that are to run on a device, and call them in the block."
            )

    def use(self) -> None:
        self._is_used = True


def current() -> Device:
    """What the scopes of this thread say together; nothing, outside of all."""
    return _here.scopes[-1].merged if _here.scopes else Device()


def use() -> Device:
    """As current(), for an op: the scopes around it are used."""
    for each in _here.scopes:
        each.use()
    return current()


class fresh:
    """No scope and no graph of the calling thread counts inside: the body of an op begins anew."""

    def __enter__(self) -> None:
        self._kept = _here.scopes, _here.graphs, _here.controls
        _here.scopes, _here.graphs, _here.controls = [], [], []

    def __exit__(self, *_: object) -> None:
        _here.scopes, _here.graphs, _here.controls = self._kept


def graphs() -> list[Any]:
    """The graphs that this thread builds, the innermost last."""
    return _here.graphs


def controls() -> list[list[Any]]:
    """Nodes that everything made now must come after."""
    return _here.controls
