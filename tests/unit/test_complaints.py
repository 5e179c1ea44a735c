"""Every verb tells its failure on stderr and nothing on stdout, which others read."""

import shutil
from pathlib import Path

import pytest
from small_checkpoint import write_step

from paceline.cli.main import main

# What is wrong is the last word, or that there is none.
WRONG = (
    """
nosuch|run|run none.py|run --nope t.py|run --workers x t.py|run --resume nowhere t.py|run --hosts !! t.py
run --cluster none t.py|run --hostfile none t.py|run --chaos zz t.py|serve|serve --job_name=ps|serve --join none
serve --workers 2 t.py|demo none|demo --mode none|emit|emit none|emit docker none.py|emit compose none.py
emit sbatch none.py|emit env none.py|emit jobset none.py|emit tfjob none.py|emit sbatch --cpus 0 t.py|env --nope|kv
kv ls|kv ls none|kv get none w|kv ls empty|keys|keys new full|ctl|ctl mode|ctl mode async none|ctl mode async empty
ctl show none|ctl show empty|ckpt|ckpt ls none|ckpt inspect none|ckpt inspect empty|ckpt verify none
ckpt verify empty|ckpt diff none none|ckpt export none out|verify none|verify empty|doctor --hostfile none
doctor --hosts !!|chaos|chaos zz|lab|lab none|lab run|lab run none|lab run none.toml|lab run overhead --reps 0
lab show none|lab compare a b|lab report none|plan|plan none.py|plan --calibration none|plan --step-ms 1
plan --workers x t.py|plan --seconds 0 t.py
""".replace("\n", "|")
    .strip("|")
    .split("|")
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "t.py").write_text("")
    for name in ("empty/checkpoints", "empty/ledger", "full"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("empty/cluster.json", "empty/config.json", "full/secret"):
        (tmp_path / name).write_text("{}")
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_what_is_wrong_is_told_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(WRONG) > 60
    for line in WRONG:
        with pytest.raises(SystemExit) as end:
            main(line.split())
        told = capsys.readouterr()
        assert end.value.code in (1, 2, 3), line
        assert told.err.strip() and "Traceback" not in told.err, line
        assert told.out == "", line


def test_what_a_check_finds_is_its_answer_and_that_it_failed_is_a_complaint(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_step(folder / "run" / "checkpoints", 1)
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    shutil.copytree(checkpoint, checkpoint.parent / "step-00000002")
    monkeypatch.setenv("TF_CONFIG", "{")
    for line, said, complaint in (
        ("ckpt verify run", "damaged: model.safetensors", "paceline: 2 of 2 checkpoints are damaged."),
        ("env", "Looked at, in this order:", "paceline: Refused: TF_CONFIG: TF_CONFIG is not JSON"),
        ("env --json", '"refused"', "paceline: Refused: TF_CONFIG: TF_CONFIG is not JSON"),
    ):
        with pytest.raises(SystemExit) as end:
            main(line.split())
        told = capsys.readouterr()
        assert end.value.code and said in told.out and told.err.startswith(complaint), (line, told)
