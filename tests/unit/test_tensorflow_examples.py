"""DO the documents' code blocks stand in examples/tensorflow? Statement by statement; what differs is marked there.

The blocks lie verbatim in tests/documents. TensorFlow is not needed: nothing is run.
"""

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FOLDER = EXAMPLES / "tensorflow"
TWINS = (
    "settings.py", "tfsingle.py", "tfdist_between.py", "tfdist_between_sync.py", "distributed.py", "hello_local.py",
    "hello_first.py", "hello_second.py", "placement.py", "in_graph.py",
)  # fmt: skip
MARKS = ("TF2: ", "Here: ")
NEAR = 4  # a mark stands on the line that was changed, or at most so many above it

# Where each block stands. Of a document's statement that a program has in another form: the form.
BLOCKS: dict[tuple[str, str], tuple[str, dict[str, str]]] = {
    ("000", "memory growth"): ("tfdist_between.py", {}),
    ("000", "another card -"): ("tfdist_between.py", {}),
    ("000", "another card +"): ("tfdist_between_sync.py", {}),
    ("000", "sync -"): ("tfdist_between.py", {}),
    ("000", "sync +"): ("tfdist_between_sync.py", {}),
    ("003", "cluster"): (
        "tfdist_between.py",
        {
            "parameter_servers": "parameter_servers = ps_svrs = FLAGS.ps_hosts.split(',')",
            "workers": "workers = worker_svrs = FLAGS.worker_hosts.split(',')",
            "server": "server = tf.train.Server(cluster, job_name=FLAGS.job_name, task_index=FLAGS.task_index, "
            "config=config)",
        },
    ),
    ("003", "roles"): ("tfdist_between.py", {}),
    ("003", "supervisor"): (
        "tfdist_between.py",
        {
            "sv": "sv = tf.train.Supervisor(is_chief=FLAGS.task_index == 0, init_op=init_op, recovery_wait_secs=1)",
            "with sv": "with sv.prepare_or_wait_for_session(server.target, config=config) as sess:",
        },
    ),
    ("001", "cards by the script"): ("placement.py", {}),
    ("001", "placement"): (
        "placement.py",
        {"sess": "sess = tf.Session(config=tf.ConfigProto(log_device_placement=True, allow_soft_placement=True))"},
    ),
    ("004", "hello local"): ("hello_local.py", {"import": "import tensorflow.compat.v1 as tf"}),
    ("004", "hello first"): ("hello_first.py", {"import": "import tensorflow.compat.v1 as tf"}),
    ("004", "hello second"): ("hello_second.py", {"import": "import tensorflow.compat.v1 as tf"}),
    ("004", "hello pinned"): ("hello_first.py", {}),
}


def block(document: str, name: str) -> str:
    """A block; of a diff the side that the name ends with."""
    title = name.removesuffix(" +").removesuffix(" -")
    text = (ROOT / "tests" / "documents" / f"document_{document}.md").read_text()
    found = re.search(rf"^## {re.escape(title)}\n\n```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, f"document {document} has no block {title!r}"
    if title == name:
        return found.group(1)
    return "\n".join(line[1:] for line in found.group(1).splitlines() if line.startswith(name[-1]))


def parsed(text: str) -> ast.Module:
    """A block as Python: an open `with` gets a body, an argument alone a call around it."""
    lines = [line for line in text.expandtabs(4).splitlines() if line.strip() not in ("", ".....")]
    text = textwrap.dedent("\n".join(lines)).rstrip()
    if text.startswith("worker_device="):
        return ast.parse(f"f({text})")
    if text.lstrip().startswith("sync_op ="):  # pieces from different depths
        text = "\n".join("    " * line.lstrip().startswith("sv.") + line.strip() for line in lines)
    return ast.parse(f"{text} pass" if text.endswith(":") else text)


def statements(tree: ast.AST) -> list[str]:
    """Every statement, a compound one as its first line, written by the same hand."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not isinstance(node, ast.Pass):
            found.append(ast.unparse(node).partition("\n")[0].replace("elif ", "if "))
        if isinstance(node, ast.keyword) and node.arg == "worker_device":
            found.append(ast.unparse(node))
    return found


def is_marked(path: Path, statement: str) -> bool:
    """Whether the program says at this statement why it differs from the document's."""
    lines = path.read_text().splitlines()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.stmt) and ast.unparse(node).partition("\n")[0] == statement:
            comments = [line.partition("#")[2] for line in lines[max(0, node.lineno - 1 - NEAR) : node.lineno]]
            if any(mark in comment for comment in comments for mark in MARKS):
                return True
    return False


def test_every_python_block_is_looked_for() -> None:
    for path in sorted((ROOT / "tests" / "documents").glob("*.md")):
        number = path.stem.removeprefix("document_")
        for name in re.findall(r"^## (.+)$", path.read_text(), re.MULTILINE):
            looked_for = {each.removesuffix(" +").removesuffix(" -") for doc, each in BLOCKS if doc == number}
            is_text = name.startswith(("what ", "settings ", "the options ", "cards by the environment"))
            assert is_text or name in looked_for, f"document {number}: {name}"


@pytest.mark.parametrize(("document", "name"), BLOCKS, ids=lambda each: each.replace(" ", "-"))
def test_the_block_stands_there(document: str, name: str) -> None:
    file, forms = BLOCKS[document, name]
    there = statements(ast.parse((FOLDER / file).read_text()))
    for statement in statements(parsed(block(document, name))):
        if statement.startswith("f("):
            continue
        form = next((form for begin, form in forms.items() if re.match(rf"{begin}\b", statement)), statement)
        assert form in there, f"{file} lacks {form}, of document {document}: {statement}"
        assert form == statement or is_marked(FOLDER / file, form), f"{file}: {form} is not marked"


@pytest.mark.parametrize("number", ["1", "2", "5", "7", "8"])
def test_every_settings_py_of_document_000_is_shown(number: str) -> None:
    text = (FOLDER / "settings.py").read_text()
    lines = [line for line in block("000", f"settings {number}").splitlines() if "svrs" in line]
    assert len(lines) == 2
    assert any(all(line in row for line in lines) for row in text.splitlines())


def test_the_options_and_cards_of_document_001_are_used() -> None:
    text = (FOLDER / "tfdist_between.py").read_text()
    for option in re.findall(r"^(\w+)=True", block("001", "the options of a config"), re.MULTILINE):
        assert re.search(rf"\b{option} ?= ?True", text), option
    for line in block("001", "cards by the environment").splitlines():
        assert f"{line} python placement.py" in (FOLDER / "placement.py").read_text()


@pytest.mark.parametrize("name", TWINS)
def test_every_program_has_its_twin(name: str) -> None:
    assert (FOLDER / name).is_file() and (EXAMPLES / name).is_file()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_a_tensorflow_program_takes_no_torch(path: Path) -> None:
    names = [
        name
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        )
    ]  # fmt: skip
    assert not [name for name in names if name.partition(".")[0] == "torch"]
    assert {name for name in names if name.startswith("paceline")} <= {"paceline.datasets"}
    if "tensorflow.compat.v1" in names:
        assert all(mark in path.read_text() for mark in MARKS[:1])


def test_the_data_come_without_torch_and_tensorflow() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import input_data\n"
        "sets = input_data.read_data_sets(one_hot=True); sets.train.seed(1)\n"
        "images, labels = sets.train.next_batch(100)\n"
        "assert images.shape == (100, 784) and labels.shape == (100, 10) and labels.sum() == 100\n"
        "parts = (sets.train, sets.validation, sets.test)\n"
        "assert [part.num_examples for part in parts] == [55000, 5000, 10000]\n"
        "seen = [sets.train.next_batch(100)[1].argmax(1) for _ in range(549)]\n"
        "import numpy as np\n"
        "every = np.bincount(np.concatenate([labels.argmax(1), *seen]), minlength=10)\n"
        "assert (every == sets.train.labels.sum(0)).all(), 'a pass is over every image once'\n"
        "print('torch' in sys.modules, 'tensorflow' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(FOLDER)], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "False"], done.stderr
