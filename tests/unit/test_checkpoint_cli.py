"""DOES `paceline ckpt` say what is in a checkpoint, and end with the right code?"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_checkpoint import STATE, filled, write_step

from paceline.checkpoint.store import write
from paceline.checkpoint.tensors import Entry, values
from paceline.cli import main as cli

CHANGED = np.array([1.0, -2.0, 4.0], dtype=np.float32)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/r1 with checkpoints of steps 1 and 2, seen from the folder above runs/."""
    monkeypatch.chdir(tmp_path)
    for step in (1, 2):
        write_step(tmp_path / "runs" / "r1" / "checkpoints", step, seed=7)
    return tmp_path / "runs" / "r1"


def ckpt(*argv: str) -> int:
    """The exit code of one call."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["ckpt", *argv])
    return int(ended.value.code or 0)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("where", ["r1", "runs/r1", "runs/r1/checkpoints"])
def test_ls_lists_the_newest_first(where: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "checkpoints" / "step-00000003").mkdir()
    assert ckpt("ls", where) == 0
    header, *rows = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert header == ["step", "lineage", "written", "size", "state", "path"]
    assert [(row[0], row[4]) for row in rows] == [
        ("3", "damaged: MANIFEST.json: it is missing."),
        ("2", "whole by size"),
        ("1", "whole by size"),
    ]


def test_ls_takes_no_hash_for_right_and_has_damaged_ones_in_their_place(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flipped bit is for `ckpt verify`; a file that is cut shows by its size, and keeps its place."""
    folder = run_dir / "checkpoints"
    write_step(folder, 3, seed=7)
    flip(folder / "step-00000003" / "model.safetensors")
    model = folder / "step-00000002" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    assert ckpt("ls", "r1") == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["3", "2", "1"]
    assert [row[4].split(":")[0] for row in rows] == ["whole by size", "damaged", "whole by size"]
    assert all(row[1] == "0" and row[2] for row in rows), "lineage and time are told of a damaged one too"
    assert ckpt("verify", "r1") == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1] for line in said] == ["damaged", "damaged", "whole"]


def test_inspect_shows_state_and_tensors(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("inspect", str(run_dir)) == 0
    said = capsys.readouterr().out.splitlines()
    for line in (
        "global step: 2 (lineage 0)",
        "mode: sync, 2 to aggregate, grace 5 ms",
        "optimizer: Adam, 1 parameter group",
        "ps: 2: ps:0 at version 1200, ps:1 at version 1200",
        "worker:0: epoch 3, 17 batches taken, 600 steps in all",
        "model.safetensors\tfloat32\t3x5\tfloat32\t60",
        "workers.safetensors\tscalar\tscalar\tfloat64\t8",
    ):
        assert line in said


def test_inspect_as_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_dir / "checkpoints" / "step-00000001"
    assert ckpt("inspect", str(path), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["path"] == str(path)
    assert said["state"]["global_step"] == 1
    assert said["manifest"]["format"] == 1
    wanted = {"file": "ema.safetensors", "name": "empty", "dtype": "float32", "shape": [0, 3], "size_bytes": 0}
    assert wanted in said["tensors"]
    assert len(said["tensors"]) == 4 * len(filled(0))


def test_verify_names_file_and_reason(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("verify", "r1") == 0
    folder = run_dir / "checkpoints" / "step-00000001"
    flip(folder / "optimizer.safetensors")
    capsys.readouterr()
    assert ckpt("verify", "r1") == 1
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "runs/r1/checkpoints/step-00000002: whole",
        "runs/r1/checkpoints/step-00000001: damaged: optimizer.safetensors: its bytes are not what was written: "
        "the hash differs.",
    ]
    assert ckpt("verify", str(run_dir / "checkpoints" / "step-00000002")) == 0


def test_a_damaged_newest_is_said_and_the_one_before_taken(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run_dir / "checkpoints" / "step-00000002" / "model.safetensors")
    assert ckpt("inspect", "r1") == 0
    said = capsys.readouterr()
    assert "global step: 1" in said.out
    assert "step-00000002 is damaged and left out: model.safetensors" in said.err
    assert ckpt("inspect", str(run_dir / "checkpoints" / "step-00000002")) == 2
    assert "cannot be used: model.safetensors: its bytes are not" in capsys.readouterr().err


def changed(base: dict[str, Entry], **new: Entry | None) -> dict[str, Entry]:
    return {name: entry for name, entry in {**base, **new}.items() if entry is not None}


def test_diff_of_the_same_and_of_others(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = str(run_dir / "checkpoints" / "step-00000001")
    assert ckpt("diff", one, "r1") == 0
    assert f"The same: {4 * len(filled(0))} tensors, bit for bit." in capsys.readouterr().out

    before = CHANGED.copy()
    before[1:] += [0.5, -0.25]
    base = changed(filled(7), values=Entry("float32", (3,), before.tobytes()), zero=Entry("float32", (), bytes(4)))
    other = changed(
        base,
        values=Entry("float32", (3,), CHANGED.tobytes()),
        zero=Entry("float32", (), np.float32(-0.0).tobytes()),
        scalar=Entry("float32", (), bytes(4)),
        bool=None,
        extra=Entry("bool", (), b"\1"),
    )
    a = write(run_dir / "a", base, {}, STATE)
    b = write(run_dir / "b", other, {}, STATE)
    assert ckpt("diff", str(a), str(b)) == 1
    rows = [line.split("\t")[1:] for line in capsys.readouterr().out.splitlines()[3:]]
    assert sorted(rows) == [
        ["bool", "only in the first", "", ""],
        ["extra", "only in the second", "", ""],
        ["scalar", "float64 scalar and float32 scalar", "", ""],
        ["values", "2 of 3 elements", "0.5", "[1]"],
        ["zero", "1 of 1 elements", "0", "[]"],
    ]


def test_diff_of_the_model_alone(run_dir: Path) -> None:
    a = write(run_dir / "a", filled(1), filled(2), STATE)
    b = write(run_dir / "b", filled(1), filled(3), STATE)
    assert ckpt("diff", str(a), str(b)) == 1
    assert ckpt("diff", str(a), str(b), "--model") == 0


def test_export_as_safetensors(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("export", "r1", "model.st") == 0
    assert f"model.st: {len(filled(0))} tensors of step 2" in capsys.readouterr().out
    without = run_dir / "plain"
    folder = write(run_dir / "some", changed(filled(1), bfloat16=None), {}, STATE)
    without.mkdir()
    assert ckpt("export", str(folder), str(without)) == 0
    read = load_file(without / "model.safetensors")
    for name, entry in changed(filled(1), bfloat16=None).items():
        assert read[name].tobytes() == entry.data, name
    assert ckpt("export", str(folder), str(without)) == 2
    assert "is there already" in capsys.readouterr().err


def test_export_as_numpy_and_of_the_averages(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("export", "r1", "model.npz", "--format", "numpy", "--ema") == 0
    assert "numpy has no bfloat16" in capsys.readouterr().err
    with np.load("model.npz", allow_pickle=False) as read:
        for name, entry in filled(9).items():  # write_step's averages have the seed 7 + 2
            assert np.array_equal(read[name], values(entry), equal_nan=read[name].dtype.kind == "f"), name
            assert read[name].shape == entry.shape
    folder = write(run_dir / "some", {"file": filled(1)["int8"]}, {}, STATE)
    assert ckpt("export", str(folder), "other.npz", "--format", "numpy", "--ema") == 2
    assert "holds no averages" in capsys.readouterr().err
    assert ckpt("export", str(folder), "other.npz", "--format", "numpy") == 0
    with np.load("other.npz", allow_pickle=False) as read:
        assert read["file"].tobytes() == filled(1)["int8"].data


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["ls", "nowhere"], "No checkpoint at 'nowhere': give a run folder"),
        (["inspect", "runs/empty"], "No whole checkpoint in runs/empty/checkpoints."),
        (["verify", "runs/empty"], "There is no checkpoint in runs/empty."),
        (["export", "r1", "out", "--format", "pickle"], "--format is 'pickle'; use one of safetensors, numpy."),
        (["export", "r1", "no/such/folder/out"], "could not be written: No such file or directory."),
    ],
)
def test_refusals(argv: list[str], sentence: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir.parent / "empty" / "checkpoints").mkdir(parents=True)
    assert ckpt(*argv) == 2
    assert sentence in capsys.readouterr().err
    assert not list(Path().glob("*out*"))


def test_no_torch_is_needed(run_dir: Path) -> None:
    script = (
        "import sys; from paceline.cli.main import main\n"
        "try:\n    main(['ckpt', 'inspect', 'r1'])\n"
        "finally:\n    assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
