"""Import torch's compiler when a script compiles, not when it makes its first optimizer: that takes 1.2 s.

postpone() is called in the nursery, for all tasks that it forks. Must never change what runs once the compiler is
there, nor rely on torch's private name: without it, everything is as torch does it.

torch wraps four methods of its optimizers so that the compiler passes by, and imports the compiler for it at their
first call. INVARIANT: they are called directly only while torch._dynamo was not imported, when nothing can be compiled.
1. The unwrapped methods are put where torch keeps its wrapped ones. 2. An import of torch._dynamo, by torch.compile for
example, first takes them away from there: torch wraps each at its next call.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

COMPILER = "torch._dynamo"
KEPT = "__dynamo_disable"  # where torch/_compile.py keeps what it has wrapped


class Watch:
    """Sees an import of the compiler, once; a finder that finds nothing. It stays in the list, which is in use."""

    def __init__(self, direct: list[Any]) -> None:
        self.is_over = False
        self._direct = direct  # what is called directly
        for function in direct:
            setattr(function, KEPT, function)  # 1

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == COMPILER and not self.is_over:
            self.is_over = True
            for function in self._direct:  # 2
                delattr(function, KEPT)
        return None


def postpone() -> bool:
    """Have no optimizer import the compiler from now on (1). Return False where this torch keeps nothing we know of."""
    if watch() is not None:
        return True
    found = list(methods())
    makes = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if COMPILER in sys.modules or makes not in found:
        return False
    sys.meta_path.insert(0, Watch(found))
    return True


def watch() -> Watch | None:
    """Return the watch while the compiler is postponed."""
    return next((each for each in sys.meta_path if isinstance(each, Watch) and not each.is_over), None)


def methods() -> Iterator[Any]:
    """Yield what torch has wrapped in its optimizers, without the wrapping."""
    for wrapping in vars(torch.optim.Optimizer).values():
        code = getattr(wrapping, "__code__", None)
        if code is not None and KEPT in code.co_consts and hasattr(wrapping, "__wrapped__"):
            yield wrapping.__wrapped__
