"""Hold the Makefile and .ci/run to what they promise: what is asked for is installed, and every test is in one tier."""

import os
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

ROOT = Path(__file__).parent.parent
CI = (ROOT / ".ci" / "run").read_text()


def test_other_extras_are_installed_though_some_are(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "paceline"):
        (programs / name).symlink_to("/bin/true")

    def made(extras: str, *words: str) -> str:
        command = ["make", *words, "demo", f"EXTRAS={extras}"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60).stdout

    assert "pip install" in made("dev,tb")
    assert "pip install" not in made("dev,tb", "-n"), "they are there now"
    assert "tb,tensorflow" in made("dev,tb,tensorflow", "-n")


@pytest.mark.parametrize(("needed", "code"), [("no_such_package", 4), ("pytest,json", 0)])
def test_a_package_that_must_be_there_is_no_reason_to_skip(needed: str, code: int) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", __file__]
    environ = {**os.environ, "PACELINE_TEST_NEEDS": needed}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("no_such_package is not installed, and must be" in done.stderr) == (code != 0)


def test_continuous_integration_must_have_tensorflow_grpc_and_ray() -> None:
    assert "PACELINE_TEST_NEEDS=tensorflow,grpc,ray" in CI and ",grpc,ray,tensorflow" in CI


def test_peers_get_an_environment_of_their_own() -> None:
    said = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "make peers " in said and "paceline lab run peers" in said
    command = ["make", "-n", "-B", "peers"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert ".venv-peers/bin/python -m pip install" in told and "-c bench/peers/requirements.txt" in told
    assert ".venv-peers/" in (ROOT / ".gitignore").read_text().split()


@pytest.mark.parametrize("broken", ["", "ray", "numpy"])
def test_a_peer_that_does_not_install_takes_none_of_the_others_with_it(broken: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    requirements = tmp_path / "bench" / "peers" / "requirements.txt"
    requirements.parent.mkdir(parents=True)
    shutil.copy(ROOT / "bench" / "peers" / "requirements.txt", requirements)
    python = tmp_path / ".venv-peers" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        '#!/bin/sh\nfor last; do :; done\necho $last >> asked\ncase $last in "$BROKEN"==*) exit 1;; esac\n'
    )
    python.chmod(0o755)

    def made() -> tuple[int, str, list[str]]:
        (tmp_path / "asked").write_text("")
        environ = {**os.environ, "BROKEN": broken}
        done = subprocess.run(["make", "peers"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, [line.partition("=")[0] for line in (tmp_path / "asked").open()]

    every = ["numpy", "ray", "tensorflow-cpu", "torch"]
    code, said, asked = made()
    assert (code == 0, asked) == (broken != "numpy", ["numpy"] if broken == "numpy" else every)
    assert ("Not installed: ray==" in said) is (broken == "ray")
    is_taken = (tmp_path / ".venv-peers" / ".installed").exists()
    assert is_taken is (broken != "numpy"), "the lab takes what is there"
    assert made()[2] == ([] if not broken else asked), "what is missing is tried again"


def test_a_nightly_run_must_have_the_libraries_that_its_tests_need() -> None:
    """Installed with their pins, and missed where they are not there; also by its older name."""
    for name in ("nightly", "test-full"):
        told = made_by(name)
        assert "PACELINE_TEST_NEEDS=tensorflow,grpc,ray,accelerate,transformers,lightning" in told
        assert ",grpc,ray,tensorflow,seam]" in told and "-c constraints.txt" in told
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {"accelerate", "transformers", "lightning"} <= pinned


def made_by(*targets: str) -> str:
    """What make would run."""
    return subprocess.run(
        ["make", "-n", "-B", *targets], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_every_test_is_in_one_tier() -> None:
    """What continuous integration runs and what make nightly runs are all tests, each once, whatever their markers."""
    continuous = [
        line.partition(" make ")[2].split()[0] for line in CI.splitlines() if re.match(r"part \S+ make ", line)
    ]
    assert continuous == ["lint", "test", "test-slow"]
    asked = re.findall(r"pytest -q -m '([^']+)'", made_by("test", "test-slow", "nightly"))
    assert len(asked) == 5
    for markers in product((False, True), repeat=3):
        given = dict(zip(("slow", "nightly", "alone"), markers, strict=True))
        chosen = [
            each for each in asked if Expression.compile(each).evaluate(lambda name, given=given, **_: given[name])
        ]
        assert len(chosen) == 1, (given, chosen)


def test_a_nightly_test_must_say_what_it_would_catch(tmp_path: Path) -> None:
    (tmp_path / "test_silent.py").write_text("import pytest\n@pytest.mark.nightly\ndef test_it(): pass\n")
    for name in ("conftest.py", "watchdog.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_silent.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 4 and "must say what it would catch" in done.stderr, done.stdout + done.stderr
