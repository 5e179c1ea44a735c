"""Keras workers as processes: what they import, how they end, and a cluster of torch and Keras together."""

import json
from pathlib import Path
from typing import Any

import pytest
from process_fixtures import PROGRAMS
from processes import Processes

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.usefixtures("tensorflow")]


def summary_of(run: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return told


def test_a_keras_worker_imports_no_torch(processes: Processes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    processes.paceline("run", "--workers", 1, "--run-dir", run, PROGRAMS / "keras_train.py").ends_with(0)
    log = (run / "logs" / "worker-0.log").read_text()
    assert "torch imported: False; global step 5" in log
    assert summary_of(run)["ok"] and summary_of(run)["global_step"] == 5


def test_what_is_raised_inside_a_graph_ends_the_run_as_itself(processes: Processes, tmp_path: Path) -> None:
    """Ten gradients in a row are not finite: the error is ours, and not TensorFlow's of a function that failed."""
    run = tmp_path / "run"
    words = ("run", "--workers", 1, "--max-restarts", 0, "--run-dir", run, PROGRAMS / "keras_train.py")
    processes.paceline(*words, "--nan", "--steps", 12).ends_with(1)
    log = (run / "logs" / "worker-0.log").read_text()
    assert "NonFiniteGradient: worker:0: 10 gradients in a row not finite, now in net/out/kernel" in log
    assert "UnknownError" not in log.splitlines()[-1]


def test_keras_on_torch_trains_too(processes: Processes, tmp_path: Path) -> None:
    """By fit and in a loop of its own, each as far as plain Keras on torch gets."""
    run = tmp_path / "run"
    processes.paceline("run", "--workers", 1, "--run-dir", run, PROGRAMS / "keras_on_torch.py").ends_with(0)
    told = summary_of(run)
    assert told["global_step"] == told["metrics"]["steps"] == 10
    assert told["metrics"]["by_fit"] < 5e-6 and told["metrics"]["by_loop"] < 1e-5
    assert told["metrics"]["moved"] > 1e-2


def test_torch_and_keras_train_one_model(processes: Processes, tmp_path: Path) -> None:
    """In sync both end with the same parameters, so with the same accuracy, each computed by its own framework."""
    run = tmp_path / "run"
    words = ("run", "--workers", 2, "--mode", "sync", "--run-dir", run, EXAMPLES / "mixed.py", "--steps", 150)
    processes.paceline(*words).ends_with(0)
    told = summary_of(run)
    reached = [worker["metrics"]["accuracy"] for worker in told["workers"]]
    assert told["global_step"] == 150
    assert reached[0] == pytest.approx(reached[1], abs=2e-4) and reached[0] > 0.6
    assert "Keras: accuracy" in (run / "logs" / "worker-1.log").read_text()


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_children_of_a_keras_script_have_a_copy_and_end_nothing(
    backend: str, processes: Processes, tmp_path: Path
) -> None:
    run, seen_at = tmp_path / "run", tmp_path / "seen.json"
    words = ("run", "--workers", 1, "--ledger", "--max-restarts", 0, "--run-dir", run)
    processes.paceline(*words, PROGRAMS / "keras_forks.py", backend, seen_at).ends_with(0)
    seen = json.loads(seen_at.read_text())
    assert seen["exit"] == ["", 3] and seen["write"] == ["[7.0, 7.0]", 0] and seen["is_same"]
    for name, call in {"pull": "ctx.pull()", "step": "optimizer.step()"}.items():
        assert seen[name][0].startswith(f"{call} (keras_forks.py, line ") and seen[name][1] == 0
    assert seen["global_step"] == 8 and summary_of(run)["ok"]
