"""DO the programs of documents 001 and 004 run as printed there? Only the import and the ports are others.

The blocks lie verbatim in tests/documents. What a program prints is compared with what the document says it prints,
after masking what cannot be the same: ports, session ids, times, names of GPUs, and the few words that are ours.
"""

import re
import signal
from pathlib import Path

import pytest
from processes import Process, Processes

from paceline.launchers.ports import Reserved

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
DOCUMENTS = ROOT / "tests" / "documents"
EXAMPLES = ROOT / "examples"
WORDS = {  # the document's : ours
    "import tensorflow as tf": "import paceline.tf1 as tf",
    "Initialize GrpcChannelCache for": "Cluster:",
    "grpc://": "paceline://",
    "CreateSession still waiting": "Still waiting",
}
MASKS = [
    (r"localhost:\d+", "localhost:PORT"),
    (r"session [0-9a-f]{16} with config:.*", "session ID with config:"),
    (r" \(\d+ s\)$", ""),
    (r"/(device:[CG]PU:\d+|[cg]pu:\d+)", "/DEVICE"),
    (r"^(\w+): \(\w+\): /job", r"\1: /job"),
    (r"\[\s+", "["),
    (r"\s+", " "),
    (r"(\d)\.(?!\d)", r"\1"),
]


def block(document: str, name: str) -> str:
    text = (DOCUMENTS / f"document_{document}.md").read_text()
    found = re.search(rf"^## {re.escape(name)}\n\n```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, f"document {document} has no block {name!r}"
    return found.group(1)


def masked(line: str) -> str:
    for theirs, ours in WORDS.items():
        line = line.replace(theirs, ours)
    for pattern, instead in MASKS:
        line = re.sub(pattern, instead, line)
    return line.strip()


def lines_of(document: str, name: str) -> list[str]:
    """What the document says is printed, without the cards of that machine and what it leaves out."""
    text = re.sub(r"^Device mapping:\n(/job:\S+ -> [^\n]*\n(id: \S+\n)?)+", "", block(document, name), flags=re.M)
    return [masked(line) for line in text.splitlines() if line.strip() not in ("", "...")]


def program(document: str, name: str, folder: Path, *addresses: str) -> Path:
    """The block as a file, with our import and free ports."""
    text = block(document, name)
    path = folder / f"{name.replace(' ', '_')}.py"
    path.write_text(changed(text, *addresses))
    return path


def changed(text: str, *addresses: str) -> str:
    for theirs, ours in zip(("localhost:20000", "localhost:20001"), addresses, strict=False):
        text = text.replace(theirs, ours)
    text = text.replace("import tensorflow as tf", WORDS["import tensorflow as tf"])
    return text if "import paceline" in text else f"{WORDS['import tensorflow as tf']}\n{text}"


def said(process: Process) -> list[str]:
    return [masked(line) for line in process.lines]


def stop(*tasks: Process) -> None:
    """They serve for ever; one that had not come to join() yet dies of the signal."""
    for task in tasks:
        assert task.popen.poll() is None, f"{task.name} has ended by itself"
        task.signal(signal.SIGTERM)
    for task in tasks:
        assert task.end() in (0, -signal.SIGTERM)


def test_placement_of_document_001(processes: Processes, tmp_path: Path) -> None:
    process = processes.start("python", program("001", "placement", tmp_path)).ends_with(0)
    expected = lines_of("001", "what placement prints")
    assert expected[-2:] == ["[[44 56]", "[98 128]]"] and len(expected) == 9
    ours = [line for line in said(process) if not line.startswith(("Device mapping", "There is no", "/job:"))]
    assert sorted(ours) == sorted(expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hello local", "hello_local.py"])
def test_hello_local_of_document_004(name: str, processes: Processes, tmp_path: Path) -> None:
    path = EXAMPLES / name if name.endswith(".py") else program("004", name, tmp_path)
    process = processes.start("python", path).ends_with(0)
    assert said(process)[:3] == lines_of("004", "what hello local prints")
    assert said(process)[3:] == ["b'Hello, distributed tensorflow.'"]


@pytest.mark.parametrize("kind", ["block", pytest.param("example", marks=pytest.mark.slow)])
def test_hello_first_and_second_of_document_004(
    kind: str, processes: Processes, ports: Reserved, tmp_path: Path
) -> None:
    addresses = [address.replace("127.0.0.1", "localhost") for address in ports.addresses(2)]
    if kind == "block":
        scripts = [program("004", f"hello {which}", tmp_path, *addresses) for which in ("first", "second")]
    else:
        scripts = [tmp_path / f"hello_{which}.py" for which in ("first", "second")]
        for script in scripts:
            script.write_text(changed((EXAMPLES / script.name).read_text(), *addresses))
    first = processes.start("python", scripts[0], name="first")
    first.wait_for("Still waiting for response from worker: /job:local/replica:0/task:1")
    waiting = lines_of("004", "what hello first prints while it waits")
    assert said(first)[: len(waiting) - 1] == waiting[:-1]
    second = processes.start("python", scripts[1], name="second")
    second.wait_for("b'Hello, distributed tensorflow 2.'")
    first.wait_for("b'Hello, distributed tensorflow.'")
    for process, name in ((first, "what hello first prints"), (second, "what hello second prints")):
        expected, printed = lines_of("004", name), said(process)
        assert [line for line in printed if line in expected] == expected, f"{printed}, not {expected}"
    stop(first, second)


@pytest.mark.slow
def test_hello_pinned_to_the_other_task_of_document_004(processes: Processes, ports: Reserved, tmp_path: Path) -> None:
    addresses = [address.replace("127.0.0.1", "localhost") for address in ports.addresses(2)]
    pinned = block("004", "hello first").replace(
        'hello = tf.constant("Hello, distributed tensorflow.")\n', block("004", "hello pinned")
    )
    (tmp_path / "pinned.py").write_text(changed(pinned, *addresses))
    first = processes.start("python", tmp_path / "pinned.py", name="first")
    second = processes.start("python", program("004", "hello second", tmp_path, *addresses), name="second")
    second.wait_for("b'Hello, distributed tensorflow 2.'")
    first.wait_for("b'Hello, distributed tensorflow.'")
    expected = lines_of("004", "what hello pinned prints")
    assert [line for line in said(first) if line in expected] == expected
    stop(first, second)


def test_the_config_of_document_001() -> None:
    import paceline.tf1 as tf

    names = re.findall(r"^(\w+)=True", block("001", "the options of a config"), re.MULTILINE)
    assert names == ["log_device_placement", "allow_soft_placement", "allow_growth"]
    config = tf.ConfigProto(log_device_placement=True, allow_soft_placement=True)
    config.gpu_options.allow_growth = True
    assert config.gpu_use().is_soft
