"""DOES `paceline demo NAME` show what it promises? Each demo at a small size, its picture, and its last words."""

import json
import re
import sys
from pathlib import Path

import msgspec
import pytest
from processes import Processes

import paceline
from paceline.cli import main as cli
from paceline.cluster.settings import Settings
from paceline.datasets.picture import SIGNATURE
from paceline.launchers import local
from paceline.launchers.demos import DEMOS

SMALL = {
    "mnist": ["--epochs", "1"],
    "autoencoder": ["--epochs", "1", "--images", "1024"],
    "transformer": ["--epochs", "1", "--images", "400", "--larger"],
    "cifar10": ["--epochs", "1", "--images", "256", "--channels", "4"],
}
PICTURES = {"autoencoder": "reconstructions.png", "transformer": "transformed.png", "cifar10": "images.png"}
METRICS = {
    "mnist": {"test_accuracy"},
    "autoencoder": {"test_cost"},
    "transformer": {"test_accuracy"},
    "cifar10": {"accuracy", "averaged_accuracy"},
}


def requests_of(monkeypatch: pytest.MonkeyPatch, *argv: str) -> local.Request:
    made: list[local.Request] = []

    def run(request: local.Request) -> int:
        made.append(request)
        return 0

    monkeypatch.setattr(local, "run", run)
    with pytest.raises(SystemExit) as ended:
        cli.main(list(argv))
    assert ended.value.code == 0
    return made[0]


def test_every_demo_is_a_script_with_valid_flags() -> None:
    assert set(DEMOS) == set(SMALL) == set(METRICS)
    for name, demo in DEMOS.items():
        assert demo.script.is_file() and demo.look_at, name
        msgspec.structs.replace(Settings(run_id=""), **demo.flags)


def test_a_demos_own_flags_give_way_to_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requests_of(monkeypatch, "demo", "cifar10").settings.ema == 0.95
    assert requests_of(monkeypatch, "demo", "cifar10", "--ema", "0.5").settings.ema == 0.5
    assert requests_of(monkeypatch, "demo").settings == Settings(run_id="")


def test_a_demo_ends_with_what_to_look_at(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    requests_of(monkeypatch, "demo", "autoencoder", "--", "--noise", "0.5")
    assert capsys.readouterr().out == f"Look at {DEMOS['autoencoder'].advice(('--noise',))}\n"


def test_photographs_with_averages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The one demo that no example runs: on threads, tiny."""
    monkeypatch.syspath_prepend(str(DEMOS["cifar10"].script.parent))
    monkeypatch.setattr(sys, "argv", ["cifar10.py", *SMALL["cifar10"]])
    import cifar10

    told = paceline.launch(lambda: cifar10.main(), run_dir=str(tmp_path / "run"), save_every="none", ema=0.9)
    assert told["metrics"].keys() >= METRICS["cifar10"] and told["global_step"] == 4
    assert (tmp_path / "run" / "images.png").read_bytes().startswith(SIGNATURE)


NIGHTLY = pytest.mark.nightly("a demo that does not run as its reader starts it; on threads all run in make test")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[NIGHTLY] * (name != "mnist")) for name in DEMOS])
def test_the_demo_runs(processes: Processes, name: str) -> None:
    args = ["--epochs", "6"] if name == "cifar10" else SMALL[name]
    said = processes.paceline("demo", name, "--run-dir", "run", "--", *args).ends_with(0).lines
    summary = json.loads((processes.folder / "run" / "summary.json").read_text())
    assert summary["ok"] and summary["metrics"].keys() >= METRICS[name]
    assert said[-1] == f"Look at {DEMOS[name].advice(args)}"
    pictures = [line for line in said if line.startswith("Picture: ")]
    assert pictures == ([f"Picture: run/{PICTURES[name]}"] if name in PICTURES else [])
    if name in PICTURES:
        assert (processes.folder / "run" / PICTURES[name]).read_bytes().startswith(SIGNATURE)
    if name == "cifar10":
        log = (processes.folder / "run" / "logs" / "worker-0.log").read_text()
        accuracy = float(re.findall(r"^accuracy (\d\.\d+)", log, re.M)[0])
        assert accuracy > 0.3, "the made-up photographs can be learned: of ten classes chance is 0.1"
