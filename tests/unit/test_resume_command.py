"""The command that goes on with a run says what the one that started it said."""

import shlex

import pytest

from paceline.cli import options
from paceline.cluster.settings import Settings
from paceline.launchers.entry import Program
from paceline.launchers.resume_command import OWN, command

PROGRAM = Program(script="train.py", args=("--name", "a b"))


def words(settings: Settings, **given: object) -> list[str]:
    asked = {"program": PROGRAM, "ps": 1, "workers": 2, "folder": "runs/r", **given}
    return shlex.split(command(settings=settings, **asked))  # type: ignore[arg-type]


def test_what_was_not_said_is_not_said_again() -> None:
    said = words(Settings(run_id="r"))
    assert said[:6] == ["paceline", "run", "--run-dir", "runs/r", "--resume", "auto"]
    assert said[6:] == ["--ps", "1", "--workers", "2", "train.py", "--name", "a b"]


def test_flags_that_differ_are() -> None:
    settings = Settings(run_id="r", mode="bounded", staleness=5, overlap=True, lease_s=0.5, resume="/some/where")
    said = words(settings)
    assert said[10:-3] == ["--mode", "bounded", "--staleness", "5", "--overlap", "--lease-s", "0.5"]
    assert "/some/where" not in said


def test_faults_are_not_injected_again() -> None:
    assert words(Settings(run_id="r", chaos="kill=ps:0@5", chaos_seed=3)) == words(Settings(run_id="r"))


@pytest.mark.parametrize(
    ("workers", "started", "fewest", "flags"),
    [
        (2, None, 1, ["--workers", "2"]),
        (6, 2, 2, ["--workers", "2:6"]),
        (6, 2, 1, ["--workers", "2:6", "--min-workers", "1"]),
        (("a:1", "b:2"), None, 1, ["--worker-hosts", "a:1,b:2"]),
    ],
)
def test_how_many_workers(workers: object, started: int | None, fewest: int, flags: list[str]) -> None:
    said = words(Settings(run_id="r", started_workers=started, min_workers=fewest), workers=workers)
    assert said[8:-3] == flags


def test_a_module_stays_one() -> None:
    assert words(Settings(run_id="r"), program=Program(script="pkg.train", is_module=True))[-2:] == ["-m", "pkg.train"]


def test_every_setting_has_a_flag_or_is_told_otherwise() -> None:
    assert set(Settings.__struct_fields__) == set(options.SHARED) | {"run_id", "run_dir", "started_workers", "plain"}
    assert set(OWN) <= set(Settings.__struct_fields__)
