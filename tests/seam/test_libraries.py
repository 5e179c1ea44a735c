"""Hold the rows of libraries.py to their verdicts: each program as plain Python and by `paceline run`, in processes.

They need `pip install 'paceline[seam]'` and run in `make nightly`, which installs it; elsewhere they say that they were
skipped. Two plain processes average their gradients before each step, as two workers in sync do.
"""

import os
import re
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import libraries
import pytest
import torch
from alike import assert_same
from safetensors.torch import load_file
from table import CASES, Equal, Refused

pytestmark = [
    pytest.mark.nightly("a training loop of accelerate, transformers or lightning that trains otherwise on a cluster"),
    pytest.mark.timeout(400),
]

HERE = Path(__file__).resolve().parent
WAIT_S = 180
NEEDED = ("accelerate", "transformers", "lightning")
ROWS = [name for name, each in CASES.items() if getattr(each.recipe, "file", "") == libraries.FILE]


def environ() -> dict[str, str]:
    path = [str(HERE), str(HERE.parent / "numerics"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def run_plain(key: str, folder: Path, workers: int) -> None:
    """One process, or two that average their gradients over a pair of sockets."""
    command = [sys.executable, str(HERE / libraries.FILE), key, str(folder)]
    if workers == 1:
        subprocess.run(command, check=True, env=environ(), timeout=WAIT_S)
        return
    pair = socket.socketpair()
    started = [
        subprocess.Popen([*command, str(index), str(end.fileno())], env=environ(), pass_fds=[end.fileno()])
        for index, end in enumerate(pair)
    ]
    for end in pair:
        end.close()
    try:
        assert [each.wait(WAIT_S) for each in started] == [0, 0]
    finally:
        for each in started:
            each.kill()
            each.wait(WAIT_S)


def run_cluster(key: str, folder: Path, workers: int) -> subprocess.CompletedProcess[str]:
    options = ["--mode", "sync", "--ps", "2"] if workers > 1 else []
    run_dir = str(folder / "run")
    command = [sys.executable, "-m", "paceline", "run", "--workers", str(workers), *options, "--run-dir", run_dir]
    command += ["--data", "full", str(HERE / libraries.FILE), key, str(folder)]
    return subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=WAIT_S)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ROWS)
def test_library(name: str, workers: int, tmp_path: Path) -> None:
    missing = [each for each in NEEDED if find_spec(each) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install 'paceline[seam]'")
    each = CASES[name]
    verdict, key = (each.one if workers == 1 else each.two), each.recipe.name
    folders = [tmp_path / "plain", tmp_path / "cluster"]
    for folder in folders:
        folder.mkdir()
    done = run_cluster(key, folders[1], workers)
    said = done.stdout + done.stderr
    if isinstance(verdict, Refused):
        assert done.returncode != 0 and re.search(verdict.words, said), said
        return
    assert isinstance(verdict, Equal) and done.returncode == 0, said
    run_plain(key, folders[0], workers)
    for index in range(workers):
        plain, ours = (load_file(folder / f"{key}-{index}.safetensors") for folder in folders)
        assert_same(plain, ours, f"worker {index}")
        assert not torch.equal(plain["losses"][0], plain["losses"][-1]), "it does not train"
