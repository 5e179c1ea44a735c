"""DO the programs of documents 001 and 004 run as printed there? Only the import and the ports are others.

The blocks lie verbatim in tests/documents, with the checksums of the documents' own. Every line that a program prints
with --log-style tf is compared with what the document says it prints. Masked is what cannot be the same: ports, session
ids and the names of cards. A device is compared in its canonical form, a matrix as such.
"""

import hashlib
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import Process, Processes

from paceline.cluster.devices import Device
from paceline.cluster.pinning import GpuUse
from paceline.launchers.ports import Reserved

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
DOCUMENTS = ROOT / "tests" / "documents"
EXAMPLES = ROOT / "examples"
THEIRS, OURS = "import tensorflow as tf", "import paceline.tf1 as tf"
STYLE = "--log-style=tf"
MASKS = [
    (r"localhost:\d+", "localhost:PORT"),
    (r"^Start master session [0-9a-f]{16} ", "Start master session ID "),
]
BLOCK = re.compile(r"^## ([^\n]*)\n\n```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACED = re.compile(r"^(\w+): (?:\((\w+)\): )?(/job:\S+)$")  # document 001 leaves the kind out, 004 does not
WAITING = "CreateSession still waiting for response from worker: /job:local/replica:0/task:1"
STARTED = ["Start master session ID with config:", "log_device_placement: true"]  # that is `...` in document 004


def blocks(document: str) -> dict[str, str]:
    return dict(BLOCK.findall((DOCUMENTS / f"document_{document}.md").read_text()))


def block(document: str, name: str) -> str:
    return blocks(document)[name]


def masked(line: str) -> str:
    for pattern, instead in MASKS:
        line = re.sub(pattern, instead, line)
    return PLACED.sub(lambda found: f"{found[1]}: ({found[2] or '?'}): {Device.parse(found[3])}", line.rstrip())


def without_cards(text: str) -> str:
    """Without the list of this machine's cards, or that machine's."""
    return re.sub(r"^Device mapping:[^\n]*\n(/job:\S+ -> [^\n]*\n(id: \S+\n)?)*", "", text, flags=re.MULTILINE)


def lines_of(document: str, name: str) -> list[str]:
    """What the document says is printed, without the cards of that machine and what it leaves out."""
    text = without_cards(block(document, name))
    return [masked(line) for line in text.splitlines() if line.strip() not in ("", "...")]


def said(process: Process) -> list[str]:
    return [masked(line) for line in without_cards("\n".join([*process.lines, ""])).splitlines()]


def places(lines: list[str]) -> dict[str, str]:
    """Which node runs where, as the lines say."""
    found = [line.split(": ") for line in lines if re.match(r"\w+: \([\w?]+\): /job", line)]
    assert len({name for name, _, _ in found}) == len(found), "each is placed once"
    return {name: device for name, _, device in found}


def matrix(lines: list[str]) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    return np.array([[float(number) for number in re.findall(r"[\d.]+", line)] for line in lines], np.float32)


def program(document: str, name: str, folder: Path, *addresses: str) -> Path:
    """The block as a file, with our import and free ports."""
    text = block(document, name)
    path = folder / f"{name.replace(' ', '_')}.py"
    path.write_text(changed(text, *addresses))
    return path


def changed(text: str, *addresses: str) -> str:
    for theirs, ours in zip(("localhost:20000", "localhost:20001"), addresses, strict=False):
        text = text.replace(theirs, ours)
    text = text.replace(THEIRS, OURS)
    return text if "import paceline" in text else f"{OURS}\n{text}"


def stop(*tasks: Process) -> None:
    """They serve for ever; one that had not come to join() yet dies of the signal."""
    for task in tasks:
        assert task.popen.poll() is None, f"{task.name} has ended by itself"
        task.signal(signal.SIGTERM)
    for task in tasks:
        assert task.end() in (0, -signal.SIGTERM)


def test_the_blocks_are_the_documents_own() -> None:
    own = dict(reversed(line.split("  ", 1)) for line in (DOCUMENTS / "blocks.sha256").read_text().splitlines())
    ours = {
        f"{document} {name}": hashlib.sha256(text.encode()).hexdigest()
        for document in ("000", "001", "003", "004")
        for name, text in blocks(document).items()
    }
    assert ours == own


def test_placement_of_document_001(processes: Processes, tmp_path: Path) -> None:
    process = processes.start("python", program("001", "placement", tmp_path), STYLE).ends_with(0)
    expected, printed = lines_of("001", "what placement prints"), said(process)
    assert matrix(expected[-2:]).tolist() == [[44, 56], [98, 128]]
    assert printed[-2:] == str(matrix(expected[-2:])).splitlines()
    theirs = places(expected)
    assert len(theirs) == 7 and set(theirs.values()) == {on(device) for device in ("GPU:2", "GPU:3", "CPU:0")}
    missing = [on(f"GPU:{index}") for index in (2, 3) if index >= torch.cuda.device_count()]
    replaced = [f"There is no {device}: the CPU of that task is used instead" for device in missing]
    assert places(printed) == {name: on("CPU:0") if device in missing else device for name, device in theirs.items()}
    assert len(printed) == len(replaced) + len(theirs) + 2 and printed[: len(replaced)] == replaced


def on(hardware: str) -> str:
    return f"/job:localhost/replica:0/task:0/device:{hardware}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hello local", "hello_local.py"])
def test_hello_local_of_document_004(name: str, processes: Processes, tmp_path: Path) -> None:
    path = EXAMPLES / name if name.endswith(".py") else program("004", name, tmp_path)
    process = processes.start("python", path, STYLE).ends_with(0)
    assert said(process) == [*lines_of("004", "what hello local prints"), "b'Hello, distributed tensorflow.'"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["block", "example"])
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
    first = processes.start("python", scripts[0], STYLE, name="first")
    first.wait_for(WAITING)
    second = processes.start("python", scripts[1], STYLE, name="second")
    second.wait_for("b'Hello, distributed tensorflow 2.'")
    first.wait_for("b'Hello, distributed tensorflow.'")
    waits = lines_of("004", "what hello first prints while it waits")
    assert waits[2:] == [WAITING, WAITING] and waits[:2] == said(first)[:2]
    printed = [line for line in said(first) if line != WAITING]
    assert printed == [*waits[:2], *STARTED, *lines_of("004", "what hello first prints")]
    expected = lines_of("004", "what hello second prints")
    assert expected.pop(2) == STARTED[0]
    assert said(second) == [*expected[:2], *STARTED, *expected[2:]]
    stop(first, second)


@pytest.mark.slow
def test_hello_pinned_to_the_other_task_of_document_004(processes: Processes, ports: Reserved, tmp_path: Path) -> None:
    addresses = [address.replace("127.0.0.1", "localhost") for address in ports.addresses(2)]
    pinned = block("004", "hello first").replace(
        'hello = tf.constant("Hello, distributed tensorflow.")\n', block("004", "hello pinned")
    )
    (tmp_path / "pinned.py").write_text(changed(pinned, *addresses))
    first = processes.start("python", tmp_path / "pinned.py", STYLE, name="first")
    second = processes.start("python", program("004", "hello second", tmp_path, *addresses), STYLE, name="second")
    second.wait_for("b'Hello, distributed tensorflow 2.'")
    first.wait_for("b'Hello, distributed tensorflow.'")
    expected = lines_of("004", "what hello pinned prints")
    assert places(expected) == {"Const": "/job:local/replica:0/task:1/device:CPU:0"}
    assert said(first)[-2:] == expected
    stop(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["blocks", "example"])
def test_the_blocks_of_document_003(kind: str, processes: Processes, ports: Reserved, tmp_path: Path) -> None:
    ps, worker, other = [address.replace("127.0.0.1", "localhost") for address in ports.addresses(3)]
    if kind == "blocks":
        text = "\n".join(block("003", name) for name in ("cluster", "roles", "supervisor"))
        graph = "        hello = tf.constant('Hello')\n        init_op = tf.initialize_all_variables()\n"
        text = text.replace("            cluster=cluster)):\n", f"            cluster=cluster)):\n{graph}")
        text = text.replace("\t\t.....", "        print(sess.run(hello))\n    server.join()").replace(
            "192.168.122.101:2222", other
        )
        text = text.replace("192.168.122.100:2223", ps).replace("192.168.122.100:2222", worker)
        text, last = changed(text), "b'Hello'"
    else:
        (tmp_path / "settings.py").write_text(f"ps_svrs = {[ps]!r}\nworker_svrs = {[worker, other]!r}\n")
        text, last = (EXAMPLES / "supervisor.py").read_text(), r"\[49\. 64\.\]\]"
    script = tmp_path / "model.py"
    script.write_text(text)
    tasks = [("ps", 0), ("worker", 0), ("worker", 1)]
    started = [
        processes.start("python", script, f"--job_name={job}", f"--task_index={index}", name=f"{job}:{index}")
        for job, index in tasks
    ]
    for process in started[1:]:
        process.wait_for(last)
    stop(*started)


def test_the_config_of_document_001() -> None:
    import paceline.tf1 as tf

    names = re.findall(r"^(\w+)=True", block("001", "the options of a config"), re.MULTILINE)
    assert names == ["log_device_placement", "allow_soft_placement", "allow_growth"]
    config = tf.ConfigProto(log_device_placement=True, allow_soft_placement=True)
    config.gpu_options.allow_growth = True
    use = config.gpu_use(GpuUse(is_soft=False, allow_growth=False))
    assert use.is_soft and use.allow_growth and use.is_logged
