"""A host that gives too little: descriptors, address space, a clock that jumps. The run goes on, or says why not."""

from pathlib import Path

import pytest
from processes import BIN, Processes

from paceline.cluster.cores import usable_cores
from paceline.launchers.descriptors import BASE, EACH_WORKER
from paceline.launchers.nursery import BIRTH_S

COUNT = Path(__file__).parents[1] / "integration" / "programs" / "count.py"
RUN = f"{BIN}/paceline run --workers 2 --run-dir made"
JUMPING = """
import itertools, time
real, calls = time.time, itertools.count()
time.time = lambda: real() + (86400.0 if next(calls) // 7 % 2 else -86400.0)
"""


def test_too_few_descriptors_are_refused_with_the_number_that_would_do(processes: Processes) -> None:
    said = processes.bash(f"ulimit -n 24 && {RUN} {COUNT} --total 20").ends_with(2)
    need = BASE + usable_cores() + 2 * EACH_WORKER
    assert f"needs about {need} descriptors, and this system allows 24; raise it (ulimit -n {need})" in said.text


@pytest.mark.slow
def test_a_soft_limit_is_raised(processes: Processes) -> None:
    said = processes.bash(f"ulimit -Sn 24 && {RUN} {COUNT} --total 200").ends_with(0)
    assert "Training done; global step 200" in said.text


@pytest.mark.slow
def test_a_clock_that_jumps_a_day_to_and_fro_changes_nothing(processes: Processes, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(JUMPING)
    said = processes.bash(f"{RUN} --lease-s 1 --mode sync {COUNT} --steps 300", PYTHONPATH=str(folder)).ends_with(0)
    assert "Training done; global step 300" in said.text and "Started again" not in said.text
    assert "gone" not in (tmp_path / "made" / "logs" / "ps-0.log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_too_little_memory_ends_with_the_reason(processes: Processes, tmp_path: Path) -> None:
    """So little that torch cannot even be loaded: no hang, and the log is named. An import that the lack of memory
    leaves hanging in a library is given up after BIRTH_S; then tasks are started one by one."""
    command = f"ulimit -v 600000 && {RUN} --max-restarts 1 {COUNT} --total 20"
    said = processes.start("bash", "-c", command, name="bash", within_s=BIRTH_S + 60).end()
    assert said in (1, 3)
    text = "\n".join(processes._started[-1].lines)
    assert "Training failed" in text and "log: made/logs/" in text
    assert (tmp_path / "made" / "summary.json").exists()
