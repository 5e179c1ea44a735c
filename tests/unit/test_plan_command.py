"""IS `paceline plan` told well? Mistakes before anything runs, failures of a script, tables, files."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

from paceline.cli import plan as command
from paceline.cli.main import main
from paceline.errors import TrainingFailed, UsageError
from paceline.launchers.entry import Program
from paceline.launchers.supervisor import NOTHING_TRAINED
from paceline.plan import timed_script, told
from paceline.plan.calibrate import failure
from paceline.plan.costs import given
from paceline.plan.topology import parse_price, parse_size
from paceline.telemetry.paths import RunPaths
from paceline.worker.step.training_step import TrainingStep

GIVEN = ["plan", "--step-ms", "20", "--bytes", "4MB", "--apply-ms", "1"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["plan"], "Give a script"),
        (["plan", "no_such_script.py"], "There is no script"),
        ([*GIVEN, "--workers", "0"], "at least 1"),
        ([*GIVEN, "--workers", "x"], "a range (1:8)"),
        ([*GIVEN, "--mode", "asink"], "did you mean 'async'?"),
        ([*GIVEN, "--mode", "sync:x"], "K gradients a round"),
        ([*GIVEN, "--link", "fast"], "1Gbit/s,0.2ms"),
        ([*GIVEN, "--lane", "pigeon"], "shm or tcp"),
        ([*GIVEN, "--price", "cheap"], "worker=3,ps=0.5"),
        ([*GIVEN, "--cores-per-host", "0"], "at least 1"),
        ([*GIVEN, "--calibration", "x.json"], "one of them, not several"),
        ([*GIVEN, "--mode", "sync:9", "--workers", "2"], "--mode sync:9 needs at least 9 workers"),
        ([*GIVEN, "--slow", "worker:9=4x"], "theirs are worker:0 to worker:3."),
        ([*GIVEN, "--slow", "ps:0=4x"], "--slow names ps:0, which is no worker"),
        ([*GIVEN, "--out", "/proc/x"], "give a folder that you may write to"),
        (["plan", "--step-ms", "20"], "--step-ms needs --bytes"),
        (["plan", "--calibration", "no.json"], "calibration.json of an earlier plan"),
    ],
)
def test_mistakes_are_told_in_a_sentence(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and says in error and len(error.strip().splitlines()) == 1


def test_a_plan_is_told_drawn_and_its_calibration_used_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    few = ["--workers", "1:3", "--ps", "1", "--mode", "async", "--cores-per-host", "2", "--price", "0.5"]
    with pytest.raises(SystemExit) as exit_:
        main([*GIVEN, *few, "--out", str(tmp_path)])
    first = capsys.readouterr().out
    assert not exit_.value.code and "Recommended: 1 ps + 2 workers" in first
    assert (tmp_path / "plan.svg").read_text().startswith("<?xml") and (tmp_path / "plan.png").stat().st_size > 10_000
    kept = str(tmp_path / "calibration.json")
    for file in (kept, str(tmp_path / "plan.json")):
        with pytest.raises(SystemExit):
            main(["plan", "--calibration", file, *few])
        assert capsys.readouterr().out == first[: first.index("Written: ")]


def test_what_is_not_a_calibration_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"compute_ms": "fast"}')
    with pytest.raises(UsageError, match="is no calibration"):
        told.read_costs(wrong)
    wrong.write_bytes(msgspec.json.encode(msgspec.structs.replace(given(20, 0, 3), format=99)))
    with pytest.raises(UsageError, match="another version"):
        told.read_costs(wrong)


def test_sizes_and_prices() -> None:
    assert parse_size("1kB") == 1000 and parse_size("2MiB") == 2 * 2**20 and parse_size("512") == 512
    for text in ("worker=1", "worker=1,ps=2,chief=3", "-1", "nan"):
        with pytest.raises(UsageError):
            parse_price(text)
    assert given(20, 0, 3).apply_share_ms(1, 1) == 3.0


def out_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        main([*argv, "--workers", "1:2", "--ps", "1", "--mode", "async", "--cores-per-host", "2"])
    assert not exit_.value.code
    return capsys.readouterr().out


def test_a_folder_is_tried_before_the_script_is_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit) as exit_:
        main(["plan", "--out", str(file / "x"), "no_such_script.py"])
    assert exit_.value.code == 2 and f"--out {file / 'x'}: Not a directory" in capsys.readouterr().err


def test_a_wrong_flag_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main([*GIVEN, "--out", str(tmp_path / "x"), "--mode", "asink"])
    assert not (tmp_path / "x").exists()


def test_what_a_sample_is_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert "1 sample a step, so samples/s are steps/s;" in out_of(GIVEN, capsys)
    assert "; 4 MB of parameters, 32 samples a step; 1 thread" in out_of([*GIVEN, "--batch", "32"], capsys)


def test_only_the_lane_that_is_used_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    here, apart = out_of(GIVEN, capsys), out_of([*GIVEN, "--link", "1Gbit/s"], capsys)
    assert "over shm" in here and "over tcp" not in here
    assert "over tcp" in apart and "over shm" not in apart


def test_slow_rates_have_digits(capsys: pytest.CaptureFixture[str]) -> None:
    said = out_of([*GIVEN, "--link", "1Mbit/s"], capsys)
    assert "worker, async: 0.0156 samples/s" in said and "  0.0156  " in said


def test_columns_are_side_by_side_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    lines = out_of(GIVEN, capsys).splitlines()
    head = next(line for line in lines if line.startswith("workers"))
    rows = [line for line in lines if line.startswith(("1 ", "2 "))][:2]
    assert "\t" not in head and {line.index("async") for line in rows} == {head.index("mode")}


def test_a_narrow_terminal_gets_the_plain_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    table = [["1", "worker compute"]]
    for columns, is_framed in (("80", True), ("20", False)):
        monkeypatch.setenv("COLUMNS", columns)
        command._print_table(["workers", "limited by"], table)
        assert ("│" in capsys.readouterr().out) is is_framed


def test_the_line_of_the_progress_is_cleared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with pytest.raises(SystemExit):
        main([*GIVEN, "--workers", "1", "--ps", "1", "--mode", "async"])
    assert capsys.readouterr().err == f"\rsimulating curve 1 of 1{command.CLEAR_LINE}"


# --- a script that fails ------------------------------------------------------------------------------------------


@pytest.fixture
def run_folder(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    (paths.root / "logs").mkdir(parents=True)
    (paths.root / "logs" / "worker-0.log").write_text("hello\n")
    return paths


def test_a_script_without_paceline_is_told_so(run_folder: RunPaths) -> None:
    program, log = Program(script="hello.py"), run_folder.root / "launcher.log"
    assert isinstance(failure(program, run_folder, log, is_gone=True), TrainingFailed), "no summary: its last lines"
    run_folder.summary.write_text(json.dumps({"error": NOTHING_TRAINED}))
    found = failure(program, run_folder, log, is_gone=True)
    assert isinstance(found, UsageError)
    assert str(found).startswith("hello.py: no worker called ctx.prepare") and "hello\n" not in str(found)


def test_an_error_is_told_without_the_frames_that_started_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise ValueError('no more data')\n")
    for name in ("_push", "settle"):
        monkeypatch.setattr(TrainingStep, name, getattr(TrainingStep, name))
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as exit_:
        timed_script.main(["--run-dir", str(tmp_path), "--seconds", "1", str(script)])
    error = capsys.readouterr().err
    assert exit_.value.code == 1 and "ValueError: no more data" in error and error.count('  File "') == 1
    assert list(tmp_path.glob("timings-*.json")), "what was measured is left all the same"
