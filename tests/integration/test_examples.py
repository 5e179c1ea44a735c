"""DOES every program under examples/ run? Quickly on threads at a tiny size; in make test-slow as its reader starts it.

The programs of documents 000 and 002 are started by hand in test_documents.py.
"""

import ast
import difflib
import io
import re
import runpy
import struct
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import BIN, Processes

import paceline
from paceline.datasets import mnist
from paceline.launchers.ports import Reserved

EXAMPLES = Path(__file__).parents[2] / "examples"
README = EXAMPLES / "README.md"
NO_PROGRAM = {"settings.py"}
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MNIST, a tenth of it, as a folder: what --data-dir takes."""
    folder = tmp_path_factory.mktemp("digits")
    whole = mnist.load()
    for name, images, labels in (("train", whole.train_x, whole.train_y), ("t10k", whole.test_x, whole.test_y)):
        count = len(labels) // 10
        pixels = (images[:count] * 255).round().reshape(count, 28, 28)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(idx(pixels))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(idx(labels[:count]))
    return folder


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


@pytest.fixture
def on_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs main() of an example as every worker of a cluster in this process; returns the summary."""

    def run(name: str, *args: object, of_main: tuple[str, ...] = (), **options: Any) -> dict[str, Any]:
        monkeypatch.syspath_prepend(EXAMPLES)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, args)])
        main = import_module(name).main
        return paceline.launch(lambda: main(*of_main), run_dir=str(tmp_path / name), save_every="none", **options)

    return run


# --- the list ---------------------------------------------------------------------------------------------------------


def programs() -> list[str]:
    return sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in NO_PROGRAM)


def rows() -> dict[str, list[str]]:
    """The cells of each program's row in the README's table."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in README.read_text().splitlines()]
    return {name: row for row in cells if len(row) == 4 for name in re.findall(r"\[`(\w+\.py)`\]", row[0])}


def test_the_readme_lists_every_program() -> None:
    assert sorted(rows()) == programs()
    for name, (_, document, start, look_at) in rows().items():
        assert re.search(r"00[0-4]|–", document), f"{name}: of which document?"
        assert "`" in start and len(look_at) > 20, name


def test_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", README.read_text()):
        assert "://" in target or (EXAMPLES / target).exists(), target


def test_the_documents_transformer_is_no_attention() -> None:
    assert re.search(r"spatial transformer.*not attention", README.read_text(), re.DOTALL | re.IGNORECASE)


@pytest.mark.parametrize("name", programs())
def test_every_program_says_what_it_is(name: str) -> None:
    text = ast.get_docstring(ast.parse((EXAMPLES / name).read_text()))
    assert text and re.search(r"\w+\.py", text), "its docstring has the line that starts it, or says where that is"
    assert len((EXAMPLES / name).read_text().splitlines()) < 130, "a short file that a reader learns from"


# --- each of them, tiny -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "updates"), [("async", 10), ("sync", 5)])
def test_tfdist_between(
    on_threads: Run, digits: Path, mode: str, updates: int, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--epochs=1", "--batches=5", f"--data_dir={digits}"
    told = on_threads("tfdist_between", *flags, of_main=(mode,), mode=mode)
    assert told["global_step"] == updates and 0 <= told["metrics"]["accuracy"] <= 1
    assert len(re.findall(r"^Test-Accuracy: 0\.\d\d$", capsys.readouterr().out, re.M)) == 2


def test_distributed_stops_at_its_budget(on_threads: Run, digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = on_threads("distributed", "--train_steps=40", "--hidden_units=20", f"--data_dir={digits}")
    assert told["global_step"] == 40
    made = re.findall(r"^Worker \d made (\d+) of 40 training step\(s\)$", capsys.readouterr().out, re.M)
    assert len(made) == 2 and sum(map(int, made)) == 40
    assert told["metrics"]["validation_cross_entropy"] > 0


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_workers_have_roles(on_threads: Run, digits: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--steps=60", "--every=0.01", f"--data-dir={digits}"
    told = on_threads("worker_roles", *flags, workers=3, mode=mode)
    assert told["global_step"] == 60
    steps = [worker["steps"] for worker in told["workers"]]
    assert steps[2] == 0 and min(steps[:2]) > 0, "the watcher makes no step"
    said = capsys.readouterr().out
    assert all(f"Worker {index}: {role}" in said for index, role in enumerate(("digits", "shifted digits", "watch")))
    assert "shifted_accuracy" in told["workers"][2]["metrics"]
    assert re.search(r"^Global step 60: accuracy 0\.\d+  shifted_accuracy 0\.\d+$", said, re.M)


@pytest.mark.timeout(60)
def test_who_watches_nobody_gives_up(
    on_threads: Run, digits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainers have died for good, say: here there never were any."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(import_module("worker_roles"), "ROLES", ("watch",))
    flags = "--steps=60", "--every=0.01", "--patience=0.2", f"--data-dir={digits}"
    told = on_threads("worker_roles", *flags, workers=1)
    assert told["global_step"] == 0 and "No step for 0.2 s: nobody trains any more." in capsys.readouterr().out


def test_the_autoencoder_draws(on_threads: Run, digits: Path, tmp_path: Path) -> None:
    flags = "--epochs=1", "--images=512", "--noise=0.1", "--hidden=30", f"--data-dir={digits}"
    told = on_threads("autoencoder", *flags)
    assert told["metrics"]["test_cost"] > 0 and told["global_step"] == 4
    shown = size_of(tmp_path / "autoencoder" / "reconstructions.png")
    assert shown == (3 * (2 + 12 * 30), 3 * (2 + 3 * 30)), "with noise there are three rows"


def test_the_spatial_transformer_transforms(on_threads: Run, digits: Path, tmp_path: Path) -> None:
    flags = "--epochs=1", "--images=300", "--batch-size=50", f"--data-dir={digits}"
    told = on_threads("spatial_transformer", *flags)
    assert 0 <= told["metrics"]["test_accuracy"] <= 1 and told["global_step"] == 6
    assert size_of(tmp_path / "spatial_transformer" / "transformed.png") == (3 * (2 + 12 * 42), 3 * (2 + 2 * 42))


def test_async_then_sync_switches(on_threads: Run, digits: Path) -> None:
    told = on_threads("async_then_sync", "--steps=60", f"--data-dir={digits}")
    assert told["global_step"] == 60 and [change["mode"] for change in told["modes"]] == ["sync"]


def test_placement_says_where_every_op_ran() -> None:
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(EXAMPLES / "placement.py"), run_name="__main__")
    said = out.getvalue()
    assert said.endswith("[[ 44.  56.]\n [ 98. 128.]]\n") and said.startswith("Device mapping:")
    for node, device in (("MatMul", r"\w+:\d"), ("MatMul_1", r"\w+:\d"), ("AddN", "CPU:0")):
        assert re.search(rf"^{node}: \(\w+\): /job:localhost/replica:0/task:0/device:{device}$", said, re.M), node


def size_of(path: Path) -> tuple[int, ...]:
    """Width and height of a PNG."""
    return struct.unpack(">II", path.read_bytes()[16:24])


# --- before and after -------------------------------------------------------------------------------------------------


def code_of(name: str) -> list[str]:
    """A program without its docstring."""
    text = (EXAMPLES / name).read_text()
    return text[text.index('"""', 3) + 3 :].splitlines()


def test_three_lines_more() -> None:
    changes = list(difflib.ndiff(code_of("convert_me.py"), code_of("convert_me_after.py")))
    assert [line for line in changes if line.startswith("- ")] == ["- for epoch in range(args.epochs):"]
    added = [line[2:] for line in changes if line.startswith("+ ") and line[2:]]
    assert [line.split("  # ")[-1] for line in added] == ["1", "2", "3", "4, to go on after a stop"], added


def test_alone_the_converted_program_gives_the_same_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["convert_me.py", "--epochs=2", "--points=512"])
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)  # paceline.init leaves somebody else's alone
    said = []
    for name in ("convert_me.py", "convert_me_after.py"):
        with redirect_stdout(io.StringIO()) as out:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        said.append(out.getvalue())
    assert said[0] == said[1] and re.search(r"^epoch 2: loss \d\.\d{6}\naccuracy 0\.\d{4}$", said[0], re.M)


# --- as their readers start them --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tfsingle_learns_what_one_worker_learns(processes: Processes, digits: Path) -> None:
    flags = "--epochs=3", "--batches=10", "--lr=0.1", f"--data_dir={digits}"
    single = processes.start(BIN / "python", EXAMPLES / "tfsingle.py", *flags).ends_with(0)
    run = processes.paceline("run", "--workers", 1, "--run-dir", "one", EXAMPLES / "tfdist_between.py", *flags)
    run.ends_with(0)
    log = (processes.folder / "one" / "logs" / "worker-0.log").read_text()
    costs = re.compile(r"^(Epoch \d+: cost \d+\.\d+|Test-Accuracy: .*)", re.M)
    assert len(costs.findall(single.text)) == 4 and costs.findall(single.text) == costs.findall(log), "C1 of 000"


@pytest.mark.slow
def test_the_converted_program_trains_on_a_cluster(processes: Processes) -> None:
    run = processes.paceline(
        "run", "--mode", "sync", "--run-dir", "run", EXAMPLES / "convert_me_after.py", "--epochs=8"
    )
    run.ends_with(0)
    log = (processes.folder / "run" / "logs" / "worker-0.log").read_text()
    assert float(re.findall(r"^accuracy (0\.\d{4}|1\.0+)$", log, re.M)[0]) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["autoencoder", "spatial_transformer"])
def test_the_programs_of_document_003_by_hand(
    processes: Processes, ports: Reserved, digits: Path, tmp_path: Path, name: str
) -> None:
    """As its two shell scripts start them: the cluster beside the program, the task in two flags."""
    (tmp_path / f"{name}.py").write_text((EXAMPLES / f"{name}.py").read_text())
    ps, *workers = ports.addresses(3)
    (tmp_path / "settings.py").write_text(f"ps_svrs = {[ps]!r}\nworker_svrs = {workers!r}\n")
    flags = "--epochs=1", "--images=512", f"--data-dir={digits}"
    tasks = [("ps", 0), ("worker", 0), ("worker", 1)]
    started = [
        processes.start(BIN / "python", f"{name}.py", f"--job_name={job}", f"--task_index={index}", *flags)
        for job, index in tasks
    ]
    for process in started:
        process.ends_with(0)
    assert re.search(r"^Picture: .*\.png$", started[1].text, re.M) and "Picture" not in started[2].text
    assert len(list(tmp_path.glob("*.png"))) == 1, "without a run folder: here"


@pytest.mark.slow
def test_worker_roles_on_a_cluster(processes: Processes, digits: Path) -> None:
    flags = "--steps=300", f"--data-dir={digits}"
    run = processes.paceline("run", "--workers", 3, "--run-dir", "run", EXAMPLES / "worker_roles.py", *flags)
    assert re.search(r"worker:2 .*shifted_accuracy 0\.\d+", run.ends_with(0).text)
