"""WHICH framework does a script bring? Told by its imports: a script of TensorFlow or Keras is not forked from torch.

Asked by launchers/children before it starts a worker. The nursery has imported torch; a TensorFlow worker needs none,
and two frameworks in one process are two thread pools and twice the memory. So it is started by exec.
launchers/crew asks whether a script compiles: the nursery then imports torch's compiler once for all workers.
Reads what is written, never runs it: all `import` statements of the script, also in functions, and of modules that lie
beside it.
"""

import ast
import importlib.machinery
import os
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.launchers.entry import Program

TENSORFLOW = {"tensorflow", "keras", "tf_keras"}


def brings_tensorflow(program: Program) -> bool:
    """Whether this program imports TensorFlow or Keras."""
    script = _module_file(program.script) if program.is_module else Path(program.script)
    if script is None:
        return False
    return bool(TENSORFLOW & imported(_read(script), lambda name: _read(script.parent / f"{name}.py")))


def compiles(program: Program) -> bool:
    """Whether its own source calls something named compile, as `torch.compile(model)` and `model.compile()` do."""
    script = _module_file(program.script) if program.is_module else Path(program.script)
    return script is not None and calls_compile(_read(script))


def calls_compile(source: str) -> bool:
    """
    >>> calls_compile("model = torch.compile(model)"), calls_compile("re.compile('a')"), calls_compile("compiled = 1")
    (True, False, False)
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # the task itself will say so
        return False
    called = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "compile"]
    return any(not (isinstance(node.value, ast.Name) and node.value.id == "re") for node in called)


def imported(source: str, beside: Callable[[str], str] = lambda name: "") -> set[str]:
    """The top names of all that a source imports, with those of modules `beside` it, which come as source, too.

    >>> sorted(imported("import a.b", {"a": "def f():\\n    from keras import layers"}.get))
    ['a', 'keras']
    """
    found: set[str] = set()
    left = [source]
    while left:
        for name in _imports(left.pop()):
            if name not in found:
                found.add(name)
                left.append(beside(name) or "")
    return found


def _imports(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # the task itself will say so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _read(path: Path) -> str:
    try:
        with tokenize.open(path) as file:  # in the encoding that the source names, else UTF-8
            return file.read()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""


def _module_file(name: str) -> Path | None:
    """Where `python -m name` would find it, without importing any package on the way."""
    places: list[str] = [os.getcwd(), *sys.path]
    for part in name.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, places)
        if spec is None:
            return None
        if spec.submodule_search_locations is None:
            return Path(spec.origin) if spec.origin else None
        places = list(spec.submodule_search_locations)
    return Path(places[0]) / "__main__.py" if places else None
