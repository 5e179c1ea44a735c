"""Give a worker random numbers of its own: fresh ones, or with `--seed S` numbers that S and the task decide.

Called by launchers/forking and launchers/entry before the user's script runs. Must never import a framework: what the
script imports later is seeded right after its import, before the script can seed it itself.
"""

import random
import sys
from collections.abc import Callable, Sequence
from hashlib import blake2b
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from paceline.cluster.discovery import Assignment
from paceline.cluster.spec import Task

Seed = Callable[[ModuleType], object]


def derived(seed: int, task: Task, chief: Task) -> int:
    """Return a task's own seed: the chief's is S itself, as one process would be seeded with it; a restart changes
    nothing.

    >>> chief = Task("worker", 0)
    >>> [derived(7, task, chief) for task in (chief, Task("worker", 1), Task("worker", 2))]
    [7, 4103346442, 3608971286]
    """
    if task == chief:
        return seed
    return int.from_bytes(blake2b(f"{seed} {task}".encode(), digest_size=4).digest(), "little")


def seed_task(assignment: Assignment) -> None:
    """Seed what the task's script draws from; without --seed nothing is done.

    TensorFlow's own seed is S for all: tf.data mixes it into shuffle(n, seed=…), whose order all workers must share.
    """
    seed = assignment.settings.seed
    if seed is None:
        return
    own = derived(seed, assignment.task, assignment.cluster.chief)
    random.seed(own)
    seed_each(
        {
            "numpy": lambda numpy: numpy.random.seed(own),
            "torch": lambda torch: torch.manual_seed(own),
            "tensorflow": lambda tensorflow: tensorflow.random.set_seed(seed),
        }
    )


def seed_each(seeds: dict[str, Seed]) -> None:
    """Seed each module now if it is imported, else right after its import."""
    later = {}
    for name, seed in seeds.items():
        if name in sys.modules:
            seed(sys.modules[name])
        else:
            later[name] = seed
    if later:
        sys.meta_path.insert(0, _AfterImport(later))


def unlike_parent() -> None:
    """Seed a forked process as a new one would be; Python's own `random` does that by itself."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()  # a card's generators are made in the process that uses them


class _AfterImport:
    """A finder that lets the usual one find a module, and has it seeded once it has run."""

    def __init__(self, seeds: dict[str, Seed]) -> None:
        self._seeds = seeds

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        seed = self._seeds.pop(name, None)
        spec = PathFinder.find_spec(name, path, target) if seed is not None else None
        if seed is not None and spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def run_and_seed(module: ModuleType) -> None:
                run(module)
                seed(module)

            loader.exec_module = run_and_seed
        return spec
