"""WHICH functions may run on another task? Those marked @paceline.op, found there by their name.

A call outside any scope is the plain function. In `with paceline.device(…)` it runs on that device: on another task it
goes through ingraph/neighbours. In a graph, or with a node as an argument, it becomes a node and runs later.
Must never look a name up by importing it: the serving side has imported what it serves.
"""

import difflib
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

MAX_SHOWN = 10  # ops in the sentence about one that is not there
_OURS = "paceline."  # modules whose ops nobody calls by name
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
    if known is not None and not _is_again(known.fn, made.fn):
        raise UsageError(
            f"Two functions would be the op {made.name!r}, and a call could mean either; give each a name of its own "
            "that is the same on every task: @paceline.op(name=…)."
        )
    _OPS[made.name] = made
    return made


def find(name: str) -> Op[..., Any]:
    """The op of that name, or a sentence that says why there is none on the task that was asked."""
    if name not in _OPS:
        from paceline.ingraph.neighbours import served

        task = served()
        place, who = (f"on {task.device}", "that task") if task is not None else ("here", "this process")
        module = name.partition(":")[0]
        if module == "__main__":
            raise UsageError(
                f"Op {name!r} is not registered {place}, where '__main__' may be another program, and no code travels; "
                "put it into a module that both sides import."
            )
        raise UsageError(
            f"Op {name!r} is not registered {place}: {who} must import {module!r} itself, because no code travels; "
            f"{_known(name)}."
        )
    return _OPS[name]


def is_internal(name: str) -> bool:
    """Whether what is called so is no op that a program has: one of ours, or a server's own verb."""
    return ":" not in name or name.startswith(_OURS)


def _known(name: str) -> str:
    """What is registered: the program's own ops, the nearest ones first if there are many."""
    own = [each for each in _OPS if not is_internal(each)]
    if not own:
        return "it has registered no op of its own"
    shown = sorted(own, key=lambda each: -difflib.SequenceMatcher(None, name, each).ratio())[:MAX_SHOWN]
    left = f", and {len(own) - len(shown)} more" if len(own) > len(shown) else ""
    return f"{hint(name, shown)}{left}"


def _function(fn: Any) -> Any:
    if not callable(fn) or not hasattr(fn, "__qualname__") or isinstance(fn, type):
        raise UsageError(f"@paceline.op is for functions, and {fn!r} is none.")
    return fn


def _is_again(known: Any, made: Any) -> bool:
    """Whether it is the same function once more. One that a module has under its name is; one that was made in another
    function, or a lambda, has no name of its own, and is only if it has the same code and works on the same things."""
    if "<" not in made.__qualname__ or known is made:
        return True
    if getattr(known, "__code__", None) != getattr(made, "__code__", made):
        return False
    pairs = zip(_works_on(known), _works_on(made), strict=False)
    return len(_works_on(known)) == len(_works_on(made)) and all(one is other for one, other in pairs)


def _works_on(fn: Any) -> list[Any]:
    """What a function found around it when it was made; a cell in which nothing is yet stands for itself."""
    found = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    for cell in fn.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(cell)
    return found


def _origin(made: Op[..., Any]) -> str:
    return f"{made.fn.__module__}:{made.fn.__qualname__}"
