"""WHICH functions may run on another task? Those marked @paceline.op, found there by their name.

A call outside any scope is the plain function. In `with paceline.device(…)` it runs on that device: on another task it
goes through ingraph/neighbours. In a graph, or with a node as an argument, it becomes a node and runs later.
Must never look a name up by importing it: the serving side has imported what it serves.
"""

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

from paceline.cluster.devices import Device
from paceline.cluster.spelling import hint
from paceline.errors import UsageError
from paceline.ingraph import scope
from paceline.ingraph.graph import graph_for

P = ParamSpec("P")
R = TypeVar("R")

_OPS: "dict[str, Op[..., Any]]" = {}


class Op(Generic[P, R]):
    """A function with a name under which other tasks can call it. `fn` is the function itself."""

    def __init__(self, fn: Callable[P, R], name: str | None = None, kind: str | None = None) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.name = name or f"{fn.__module__}:{fn.__qualname__}"
        self.kind = kind or fn.__name__  # what its nodes are called in a graph

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        graph = graph_for(args, kwargs)
        if graph is not None:
            return graph.add(self.kind, self.name, args, kwargs)  # type: ignore[return-value]
        device = scope.use()
        if device == Device():
            return self.fn(*args, **kwargs)
        from paceline.ingraph.neighbours import run_at

        return run_at(device, self, args, kwargs)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<op {self.name}>"


@overload
def op(fn: Callable[P, R], /) -> Op[P, R]: ...


@overload
def op(*, name: str) -> Callable[[Callable[P, R]], Op[P, R]]: ...


def op(fn: Callable[P, R] | None = None, /, *, name: str | None = None) -> Any:
    """Mark a function as one that may run on another task. Both sides must import the module that defines it.

    >>> @op
    ... def double(x):
    ...     return 2 * x
    >>> double(21)
    42
    """
    if fn is None:
        return lambda given: register(Op(_function(given), name))
    return register(Op(_function(fn)))


def register(made: Op[P, R]) -> Op[P, R]:
    """Let others find it; a module that is imported again replaces its own ops."""
    known = _OPS.get(made.name)
    if known is not None and _origin(known) != _origin(made):
        raise UsageError(f"Two ops have the name {made.name!r}: {_origin(known)} and {_origin(made)}; rename one.")
    _OPS[made.name] = made
    return made


def find(name: str, where: str = "here") -> Op[..., Any]:
    """The op of that name, or a sentence that says why there is none."""
    if name not in _OPS:
        module = name.partition(":")[0]
        raise UsageError(
            f"Op {name!r} is not registered {where}: that task must import {module!r} itself, because no code travels; "
            f"{hint(name, _OPS)}."
        )
    return _OPS[name]


def _function(fn: Any) -> Any:
    if not callable(fn) or not hasattr(fn, "__qualname__") or isinstance(fn, type):
        raise UsageError(f"@paceline.op is for functions, and {fn!r} is none.")
    return fn


def _origin(made: Op[..., Any]) -> str:
    return f"{made.fn.__module__}:{made.fn.__qualname__}"
