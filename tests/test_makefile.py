"""IS green what `make` and .ci/run call so? What is asked for is installed, and what must be there is missed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


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
    text = (ROOT / ".ci" / "run").read_text()
    assert "PACELINE_TEST_NEEDS=tensorflow,grpc,ray" in text and ",grpc,ray,tensorflow" in text


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


def test_a_nightly_run_must_have_the_libraries_of_the_seam() -> None:
    """Installed with their pins, and missed where they are not there."""
    environ = {**os.environ, "PACELINE_TEST_NEEDS": "ray"}
    command = ["make", "-n", "-B", "nightly"]
    told = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "PACELINE_TEST_NEEDS=ray,accelerate,transformers,lightning" in told
    assert ",seam]" in told and "-c constraints.txt" in told
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {"accelerate", "transformers", "lightning"} <= pinned
