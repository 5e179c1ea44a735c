"""I7: no byte received or loaded can execute code. Read off the syntax trees of everything that is ours.

Part of `make check`. A name is found however it is imported or renamed; comments and strings do not count. The other
half of I7 is an audit hook that runs inside the ps of every test on real processes (tests/integration/audit).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "examples", "tests", "bench", "docs")

# Modules that execute what they read.
MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "code",
    "codeop",
    "xmlrpc",
}
# Functions that do, by their full name. `compile` alone is the builtin: re.compile and torch.compile are others.
CALLS = {
    "eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "builtins.compile",
    "torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter",
    "yaml.load", "yaml.unsafe_load", "yaml.full_load", "pandas.read_pickle",
    "multiprocessing.connection.Client", "multiprocessing.connection.Listener",
    "os.system", "os.popen", "types.FunctionType", "types.CodeType",
}  # fmt: skip
METHODS = {"recv_pyobj", "send_pyobj", "load_module", "exec_module", "send_object_list", "broadcast_object_list"}

IMPORTING = ("importlib.import_module", "exec_module")  # of modules that are installed, never of what was received
# Where one of them is meant, and why. A row that nobody needs any more fails too.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("src/paceline/__init__.py", "importlib.import_module"): "a table of our own public names",
    ("src/paceline/launchers/forking.py", "importlib.import_module"): "a table of our own modules",
    ("src/paceline/worker/framework.py", "importlib.import_module"): "modules of our own, by a name in the source",
    ("src/paceline/launchers/seeding.py", "exec_module"): "waits for the end of an import that the script makes",
    ("tests/test_docs.py", "exec"): "runs the code blocks of our own documents",
    ("tests/numerics/test_state.py", "torch.save"): "a user may save a prepared model in torch's own way",
    ("tests/numerics/test_state.py", "torch.load"): "and reads it back",
}


def found_in(source: str) -> Iterator[tuple[int, str]]:
    """Every forbidden thing with its line; names are followed through `import … as …` and `from … import …`."""
    tree = ast.parse(source)
    known: dict[str, str] = {}  # a local name -> what it stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                if alias.name.partition(".")[0] in MODULES:
                    yield node.lineno, alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            if node.module.partition(".")[0] in MODULES:
                yield node.lineno, node.module.partition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = full_name(node, known)
            if name in CALLS:
                yield node.lineno, name
            elif isinstance(node, ast.Attribute) and node.attr in METHODS:
                yield node.lineno, node.attr
        if isinstance(node, ast.Call):
            yield from found_in_call(node, full_name(node.func, known))


def found_in_call(node: ast.Call, name: str) -> Iterator[tuple[int, str]]:
    for keyword in node.keywords:
        is_off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
        if keyword.arg in ("allow_pickle", "shell") and not is_off:
            yield node.lineno, f"{keyword.arg}=True"
    if name in ("importlib.import_module", "__import__") and not (node.args and isinstance(node.args[0], ast.Constant)):
        yield node.lineno, name


def full_name(node: ast.expr, known: dict[str, str]) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([known.get(node.id, node.id), *reversed(parts)])


def files() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def test_I7_nothing_that_is_ours_can_execute_data() -> None:
    bad = []
    for path in files():
        here = path.relative_to(ROOT).as_posix()
        found = [(line, name) for line, name in found_in(path.read_text()) if (here, name) not in EXCEPTIONS]
        is_shipped = here.startswith("src/")
        bad += [f"{here}:{line}: {name}" for line, name in found if is_shipped or name != "importlib.import_module"]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(("file", "name"), EXCEPTIONS, ids=str)
def test_every_exception_is_needed(file: str, name: str) -> None:
    assert name in {each for _, each in found_in((ROOT / file).read_text())}, f"{file} has no {name} any more"
    assert not file.startswith("src/") or name in IMPORTING, "what ships has no other exceptions"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import pickle", "pickle"),
        ("import pickle as harmless", "pickle"),
        ("from pickle import loads as parse", "pickle"),
        ("def f():\n    from dill.source import getsource", "dill"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("import torch as t\nt.load('x')", "torch.load"),
        ("from torch import load\nload('x')", "torch.load"),
        ("from torch import save as keep\nrun = keep", "torch.save"),
        ("eval('1')", "eval"),
        ("list(map(exec, ['1']))", "exec"),
        ("compile('1', 'f', 'exec')", "compile"),
        ("import builtins\nbuiltins.eval('1')", "builtins.eval"),
        ("import numpy as np\nnp.load('x', allow_pickle=True)", "allow_pickle=True"),
        ("import numpy as np\nnp.load('x', allow_pickle=wanted)", "allow_pickle=True"),
        ("import importlib\nimportlib.import_module(received)", "importlib.import_module"),
        ("__import__(received)", "__import__"),
        ("import yaml\nyaml.load(text)", "yaml.load"),
        ("import subprocess\nsubprocess.run(text, shell=True)", "shell=True"),
        ("socket.recv_pyobj()", "recv_pyobj"),
    ],
)
def test_the_gate_finds(source: str, name: str) -> None:
    assert name in {each for _, each in found_in(source)}


@pytest.mark.parametrize(
    "source",
    [
        "import re\nre.compile('x')",
        "import torch\ntorch.compile(model)",
        "model.eval()",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "# pickle.loads(x)\ntext = 'torch.load(x)'",
        "import ast\nast.literal_eval('1')",
        "import importlib\nimportlib.import_module('json')",
    ],
)
def test_the_gate_lets_through(source: str) -> None:
    assert not list(found_in(source))
