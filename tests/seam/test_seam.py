"""Hold every row of the table (table.py) to its verdict: equal bits, refused, or a difference that is documented."""

import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import children
import data
import gradients
import libraries
import loops
import models
import optimizers
import parameters
import pytest
import torch
import writes
from alike import assert_same, check, run_cluster, run_plain
from page import PAGE, page
from safetensors.torch import load_file
from table import CASES, Case, Different, Equal, NotCompared, Refused, Script, Verdict

from paceline.errors import PacelineError

TOPICS = (
    optimizers,
    parameters,
    writes,
    gradients,
    models,
    loops,
    data,
    children,
    libraries,
)  # importing them fills the table

pytestmark = pytest.mark.filterwarnings("error")

NIGHTLY = pytest.mark.nightly("a program whose bits depend on a lane and a placement that its row had not in CI")
MIN_CASES, MIN_EQUAL, MAX_DIFFERENT = 80, 60, 8


def judge(each: Case, verdict: Verdict, run_dir: Path, workers: int, **options: Any) -> None:
    """Fail unless this is the verdict."""
    options = {**options, **each.options}
    if isinstance(verdict, NotCompared):
        pytest.skip(each.note)
    elif isinstance(verdict, Equal):
        check(each.recipe, run_dir, workers, **options)
    elif isinstance(verdict, Refused):
        run_plain(each.recipe, workers)  # it is a program that works
        with pytest.raises(PacelineError, match=verdict.words):
            run_cluster(each.recipe, workers, **options)
    elif verdict.everywhere:
        with pytest.raises(AssertionError, match="not the same bits"):
            check(each.recipe, run_dir, workers, **options)
    else:
        assert run_cluster(each.recipe, workers, **options)[1]["ok"]


IN_THREADS = [name for name, each in CASES.items() if not isinstance(each.recipe, Script)]
IN_PROCESSES = {n: each.recipe.name for n, each in CASES.items() if getattr(each.recipe, "file", "") == children.FILE}


@pytest.mark.parametrize("name", IN_THREADS)
def test_one_worker(name: str, tmp_path: Path) -> None:
    judge(CASES[name], CASES[name].one, tmp_path, 1, mode="async", **{"ps": 1, "lane": "inproc", **CASES[name].options})


@pytest.mark.parametrize("name", [n for n in IN_THREADS if not isinstance(CASES[n].two, NotCompared)])
def test_two_workers_in_sync(name: str, tmp_path: Path) -> None:
    lane = "tcp" if sorted(CASES).index(name) % 2 else "shm"
    judge(CASES[name], CASES[name].two, tmp_path, 2, mode="sync", ps=2, lane=lane)


@pytest.fixture(scope="session")
def by_script(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """What processes_script.py saw as a plain script, and on 1 ps + 1 worker."""
    folder = tmp_path_factory.mktemp("processes")
    script = str(Path(__file__).with_name(children.FILE))
    started = {
        "plain": [sys.executable, script],
        "cluster": [
            sys.executable,
            "-m",
            "paceline",
            "run",
            "--workers",
            "1",
            "--run-dir",
            str(folder / "run"),
            script,
        ],
    }
    for name, command in started.items():
        subprocess.run([*command, str(folder / name)], check=True, timeout=120)
    return [load_file(folder / name) for name in started]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_in_processes(name: str, by_script: list[dict[str, torch.Tensor]]) -> None:
    plain, ours = ({k: v for k, v in seen.items() if k.startswith(IN_PROCESSES[name])} for seen in by_script)
    assert plain
    assert_same(plain, ours, name)


def ways() -> Iterator[Any]:
    """Yield every equal case on every lane in every placement; in CI one of these nine ways, the next one for each."""
    equal = [name for name in IN_THREADS if isinstance(CASES[name].two, Equal)]
    both = list(product(["inproc", "shm", "tcp"], ["bytes", "round_robin", "greedy"]))
    for at, name in enumerate(equal):
        for number, (lane, placement) in enumerate(both):
            yield pytest.param(name, lane, placement, marks=pytest.mark.slow if at % 9 == number else NIGHTLY)


@pytest.mark.parametrize(("name", "lane", "placement"), list(ways()))
def test_equal_on_every_lane_and_placement(name: str, lane: str, placement: str, tmp_path: Path) -> None:
    judge(CASES[name], Equal(), tmp_path, 3, mode="sync", ps=3, lane=lane, placement=placement)


def test_the_table_is_large_and_has_few_differences() -> None:
    assert len(CASES) >= MIN_CASES
    assert sum(each.is_equal for each in CASES.values()) >= MIN_EQUAL
    different = [each for each in CASES.values() if Different in {type(each.one), type(each.two)}]
    assert len(different) <= MAX_DIFFERENT
    for each in CASES.values():
        assert each.note or (isinstance(each.one, Equal) and isinstance(each.two, Equal)), f"{each.name}: say why"


def test_the_page_is_what_the_table_says() -> None:
    assert PAGE.read_text() == page(), f"run `python {Path(__file__).with_name('page.py').name}` in tests/seam"
