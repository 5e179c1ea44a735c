"""WHAT does a worker tell of itself after it was started again? Steps of all its lives, rates of this one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.worker.reporting import Reporter


class Stepping:
    """A worker that has done `steps`, most of them before it was killed."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.discarded = 0

    def newest_step(self) -> int:
        return self.steps


class Sink:
    """Keeps the last tick."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}

    def tick(self, **fields: Any) -> None:
        self.last = fields

    def event(self, kind: str, **fields: Any) -> None:
        pass


def test_the_last_step_has_its_line_once() -> None:
    said: list[str] = []
    reporter = Reporter(None, said.append, is_chief=False, worker=1)
    stepping = Stepping(0)
    reporter.stop()
    reporter.begin(stepping, waited_s=0.0)
    reporter.last_step()
    for _ in range(5):
        stepping.steps += 1
        reporter.clock.step(samples=10)  # only the first has a line: a few a second are enough
    reporter.last_step()
    reporter.end(stepping)
    steps = [line.partition(": ")[2] for line in said if "training step" in line]
    assert steps == [f"Worker 1: training step {n} done (global step: {n})" for n in (1, 5)]


def test_after_a_restart_rates_begin_with_this_life_and_steps_do_not() -> None:
    reporter = Reporter(None, lambda line: None, is_chief=False)
    reporter.sink = sink = Sink()  # type: ignore[assignment]
    stepping = Stepping(1_000_000)
    reporter.stop()  # no ticks of its own: the last one is looked at
    reporter.begin(stepping, waited_s=0.0)
    for _ in range(3):
        reporter.clock.step(samples=10)
        stepping.steps += 1
    report = reporter.end(stepping)
    assert report.steps == sink.last["step"] == 1_000_003, "the live line and the last block agree"
    took_s = sum(reporter.clock._took)
    assert sink.last["steps_per_s"] < 1000 / took_s, "three steps, not a million"


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_tensorboardx_comes_after_the_framework_and_sees_the_one_there_is(framework: str, tmp_path: Path) -> None:
    """init() before `import torch` must not hide it from anybody; a worker of TensorFlow does without."""
    (tmp_path / "torch.py").write_text("class Tensor: pass\n")
    (tmp_path / "tensorflow.py").write_text("")
    code = f"""
import sys
from paceline.cluster.discovery import Assignment
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.worker.reporting import Reporter
cluster = ClusterSpec({{"ps": ["a:1"], "worker": ["a:2"]}})
settings = Settings(run_id="r", run_dir={str(tmp_path)!r})
reporter = Reporter(Assignment(cluster, Task("worker", 0), 1, settings, b"s" * 32, "flags"), print, is_chief=True)
assert "tensorboardX" not in sys.modules, "init() comes before the framework"
import {framework}
reporter.stand_by()
import tensorboardX.writer
print(tensorboardX.writer.numpy_compatible.__module__, sorted({{"torch", "tensorflow"}} & set(sys.modules)))
reporter.close()
"""
    pytest.importorskip("tensorboardX")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == {"torch": "torch ['torch']", "tensorflow": "numpy ['tensorflow']"}[framework]
