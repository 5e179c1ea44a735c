"""WHEN is torch's compiler imported? When somebody compiles, not when the first optimizer is made: that takes 1.2 s.

postpone() is called in the nursery, for all that it forks; disabled() by frameworks/torch/training_step. Must never
change what runs once the compiler is there, nor rely on torch's private name: without it, everything is as torch does
it.

torch wraps four methods of its optimizers so that the compiler passes by, and imports the compiler for it at their
first call. INVARIANT: they are called directly only while torch._dynamo was not imported, when nobody can compile.
1. The unwrapped methods, and our own hooks, are put where torch keeps its wrapped ones. 2. Whoever imports
torch._dynamo, for example torch.compile, first takes them away from there: torch wraps each at its next call.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

COMPILER = "torch._dynamo"
KEPT = "__dynamo_disable"  # where torch/_compile.py keeps what it has wrapped
Hook = Callable[..., Any]


class Watch:
    """Sees an import of the compiler, once; a finder that finds nothing. It stays where it is: the list is in use."""

    def __init__(self, direct: list[Any]) -> None:
        self.is_over = False
        self.direct = direct  # what is called directly
        for function in direct:
            setattr(function, KEPT, function)  # 1

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == COMPILER and not self.is_over:
            self.is_over = True
            for function in self.direct:  # 2
                delattr(function, KEPT)
        return None


def postpone() -> bool:
    """1. From now on no optimizer imports the compiler; False where this torch keeps nothing that we know of."""
    if watch() is not None:
        return True
    found = list(methods())
    makes = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if COMPILER in sys.modules or makes not in found:
        return False
    sys.meta_path.insert(0, Watch(found))
    return True


def disabled(hook: Hook) -> Hook:
    """`torch._dynamo.disable(hook)`, which torch does at the hook's first call once the compiler was imported."""
    postponed = watch()
    if postponed is None:
        made: Hook = torch._dynamo.disable(hook)  # type: ignore[no-untyped-call]
        return made

    def function(*args: Any) -> Any:  # a method has no attributes of its own
        return hook(*args)

    setattr(function, KEPT, function)
    postponed.direct.append(function)
    return torch._disable_dynamo(function)  # type: ignore[attr-defined]


def watch() -> Watch | None:
    """There while the compiler is postponed."""
    return next((each for each in sys.meta_path if isinstance(each, Watch) and not each.is_over), None)


def methods() -> Iterator[Any]:
    """What torch has wrapped in its optimizers, without the wrapping."""
    for wrapping in vars(torch.optim.Optimizer).values():
        code = getattr(wrapping, "__code__", None)
        if code is not None and KEPT in code.co_consts and hasattr(wrapping, "__wrapped__"):
            yield wrapping.__wrapped__
