"""launchers/frameworks: which framework a script brings, told by its imports alone."""

from pathlib import Path

import pytest

from paceline.launchers.entry import Program
from paceline.launchers.frameworks import brings_tensorflow, calls_compile, compiles, imported


@pytest.mark.parametrize(
    ("source", "brings"),
    [
        ("import tensorflow.compat.v1 as tf", True),
        ("def main():\n    from keras import layers", True),
        ("import torch", False),
        ("text = 'import tensorflow'", False),
        ("from . import keras", False),
        ("import keras_tuner", False),
        ("import torch, tensorflow", True),
        ("import tensorflow as (", False),
    ],
)
def test_what_a_script_brings(tmp_path: Path, source: str, brings: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    assert brings_tensorflow(Program(script=str(script))) is brings


def test_a_module_beside_the_script_counts(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import keras\nimport train\n")
    (tmp_path / "train.py").write_text("import net\n")
    assert brings_tensorflow(Program(script=str(tmp_path / "train.py")))


def test_a_module_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "__main__.py").write_text("import keras")
    (package / "train.py").write_text("import torch")
    monkeypatch.chdir(tmp_path)
    assert brings_tensorflow(Program(script="pack", is_module=True))
    assert not brings_tensorflow(Program(script="pack.train", is_module=True))
    assert not brings_tensorflow(Program(script="no.such", is_module=True))


def test_a_script_that_is_not_there_brings_nothing() -> None:
    assert not brings_tensorflow(Program(script="/nowhere/train.py"))
    assert imported("") == set()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("called = torch.compile(model, fullgraph=True)", True),
        ("model.compile()", True),
        ("step = partial(torch.compile, mode='default')", True),
        ("pattern = re.compile('compile')", False),
        ("# torch.compile(model)", False),
        ("def broken(:", False),
    ],
)
def test_a_script_that_compiles_is_told_by_its_calls(line: str, told: bool, tmp_path: Path) -> None:
    assert calls_compile(line) == told
    (tmp_path / "train.py").write_text(line)
    assert compiles(Program(script=str(tmp_path / "train.py"))) == told
    assert not compiles(Program(script=str(tmp_path / "nobody.py")))
