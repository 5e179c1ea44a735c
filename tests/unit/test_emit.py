"""WHICH commands start this cluster in containers? What is emitted is parsed, as a shell and Compose would."""

import json
import re
import shlex
import shutil
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from small_checkpoint import write_step

from paceline.cli.main import main
from paceline.cluster.discovery import discover

ROOT = Path(__file__).parents[2]
HOSTS = ["--ps-hosts", "192.168.1.173:2222", "--worker-hosts", "192.168.1.171:2222,192.168.1.172:2222"]
HOST_FLAGS = ["--ps_hosts=192.168.1.173:2222", "--worker_hosts=192.168.1.171:2222,192.168.1.172:2222"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A code folder with an awkward name, and a secret of the test's own."""
    code = tmp_path / "my code"
    code.mkdir()
    (code / "train.py").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(code)
    return code


def emitted(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["emit", *words])
    told = capsys.readouterr()
    assert ended.value.code == code, told.err
    return told.out if code == 0 else told.err


def docker(capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    lines = emitted(capsys, "docker", *words).splitlines()
    return [shlex.split(line) for line in lines if line and not line.startswith("#")]


def compose(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, object]]:
    parsed = yaml.safe_load(emitted(capsys, "compose", *words))
    assert list(parsed) == ["services"]
    return parsed["services"]


def inside(line: list[str], image: str = "paceline:latest") -> list[str]:
    return line[line.index(image) + 1 :]


def after(line: list[str], flag: str) -> list[str]:
    return [value for word, value in pairwise(line) if word == flag]


def test_a_line_a_task_in_the_shape_of_the_document(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    lines = docker(capsys, *HOSTS, "train.py", "--lr", "0.1")
    assert len(lines) == 3
    for line in lines:
        assert line[:3] == ["docker", "run", "-itd"] and after(line, "-p") == ["2222:2222"]
        secret = folder.parent / "config" / "paceline" / "secret"
        assert after(line, "-v") == [f"{folder}:{folder}", f"{folder}/result:{folder}/result", f"{secret}:{secret}:ro"]
        assert inside(line)[4:6] == HOST_FLAGS
    ps, chief, other = map(inside, lines)
    assert ps[:4] == ["paceline", "serve", "--job_name=ps", "--task_index=0"] and str(folder / "train.py") not in ps
    assert chief[2:4] == ["--job_name=worker", "--task_index=0"] and other[3] == "--task_index=1"
    assert chief[-3:] == [str(folder / "train.py"), "--lr", "0.1"]


def test_compose_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*HOSTS, "--mode", "sync", "--gpus", "all", "train.py", "a b", '"quoted"', "$HOME", "ü"]
    lines, services = docker(capsys, *words), compose(capsys, *words)
    assert list(services) == ["ps-0", "worker-0", "worker-1"]
    for line, (name, service) in zip(lines, services.items(), strict=True):
        assert after(line, "--name") == [f"paceline-{name}"]
        command = service["command"]
        assert isinstance(command, list) and [word.replace("$$", "$") for word in command] == inside(line)
        assert (service["volumes"], service["working_dir"]) == (after(line, "-v"), after(line, "-w")[0])
        assert ("deploy" in service) == (name != "ps-0") == bool(after(line, "--gpus"))
    assert inside(lines[1])[-4:] == ["a b", '"quoted"', "$HOME", "ü"]


def test_the_flags_are_those_that_a_task_reads(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--mode", "bounded", "--staleness", "2", "--no-allow-growth", "--worker-device", "/cpu:0", "--ema", "0.9"]
    for line in docker(capsys, *HOSTS, *flags, "--resume", "auto", "--workers", "1:2", "train.py"):
        words = [word for word in inside(line)[2:] if not word.endswith("train.py")]
        assert "--workers=1:2" in words
        found = discover(flags=True, argv=[word for word in words if not word.startswith("--workers=")], environ={})
        assert found is not None and found.settings.mode == "bounded" and found.settings.staleness == 2
        assert not found.settings.allow_growth and found.settings.worker_device == "/cpu:0"
        assert found.settings.ema == 0.9 and found.settings.resume == "auto"
        assert found.cluster.job_tasks("ps") == ["192.168.1.173:2222"]


def test_without_addresses_all_are_on_one_machine(capsys: pytest.CaptureFixture[str]) -> None:
    lines = docker(capsys, "--ps", "2", "--workers", "2", "train.py")
    assert len(lines) == 4 and all(after(line, "--network") == ["host"] and not after(line, "-p") for line in lines)
    assert "--ps_hosts=127.0.0.1:2222,127.0.0.1:2223" in lines[0]
    assert "--worker_hosts=127.0.0.1:2224,127.0.0.1:2225" in lines[0]
    assert all(service["network_mode"] == "host" for service in compose(capsys, "train.py").values())


def test_who_may_come_later_is_not_started_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    services = compose(capsys, "--workers", "1:3", "train.py")
    assert ["profiles" in service for service in services.values()] == [False, False, True, True]


def test_gpus_restarts_image_and_module(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    code = str(folder.parent)
    words = ["--gpus", "device=0,1", "--max-restarts", "5", "--image", "mine:1", "--code", code, "-m", "json"]
    ps, worker, _ = docker(capsys, *words)
    assert after(worker, "--gpus") == ['"device=0,1"'] and not after(ps, "--gpus")
    assert after(worker, "--restart") == ["on-failure:5"] and after(worker, "-w") == [code]
    assert inside(worker, "mine:1")[-2:] == ["-m", "json"]
    service = compose(capsys, *words)["worker-0"]
    assert service["restart"] == "on-failure:5"
    devices = json.loads(json.dumps(service["deploy"]))["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "device_ids": ["0", "1"], "capabilities": ["gpu"]}]


@pytest.mark.parametrize("hosts", [[], HOSTS])
def test_a_checkpoint_is_seen_inside_at_its_path(
    capsys: pytest.CaptureFixture[str], hosts: list[str], folder: Path
) -> None:
    checkpoint = write_step(folder.parent / "before" / "checkpoints", 5)
    ps, *workers = docker(capsys, "--insecure", *hosts, "--resume", "../before", "train.py")
    before = checkpoint.parents[1]
    for line in (ps, *workers):
        assert after(inside(line), "--resume") == [str(before)], "without .., which may lead nowhere inside"
    for worker in workers:
        assert after(worker, "-v")[2:] == [f"{before}:{before}:ro"]
    assert len(after(ps, "-v")) == 2, "a ps is given its numbers by the chief"
    shutil.move(checkpoint.parents[1], folder / "result")
    for line in docker(capsys, "--insecure", *hosts, "--resume", "result", "train.py"):
        assert len(after(line, "-v")) == 2, "what is mounted to be written needs no second mount"


def test_the_secret_is_mounted_and_never_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = emitted(capsys, "docker", *HOSTS, "train.py")
    secret = tmp_path / "config" / "paceline" / "secret"
    assert secret.read_text().strip() not in text and "copy" in text
    insecure = emitted(capsys, "docker", "--insecure", *HOSTS, "train.py")
    assert "secret-file" not in insecure and "--insecure" in insecure


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing.py"], "no script nothing.py"),
        (["--ps-hosts", "a:1", "train.py"], "both --ps_hosts and --worker_hosts"),
        (["--gpus", "two", "train.py"], "--gpus is 'two'"),
        (["--chaos", "kill=ps:0@5", "train.py"], "--chaos is for `paceline run`"),
        (["--mode", "snyc", "train.py"], "did you mean 'sync'"),
        (["--run-dir", "a:b", "train.py"], "colon"),
        (["--workers", "0", "train.py"], "at least 1"),
        (["--resume", "nowhere", "train.py"], "--resume 'nowhere': there is no such folder"),
        (["--code", "/usr", "train.py"], "train.py is not below --code /usr, which is all that a container sees"),
        (["--code", "/absent", "train.py"], "--code /absent: there is no such folder"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    told = emitted(capsys, "docker", *words, code=2)
    assert said in told and told.count("\n") == 1


# --- the image and the scripts ------------------------------------------------------------------------------


def test_the_image_is_made_of_what_is_there() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    kept = re.findall(r"^!(\S+)$", (ROOT / "deploy" / "Dockerfile.dockerignore").read_text(), re.M)
    copied = [name for line in re.findall(r"^COPY (.+)$", text, re.M) for name in line.split()[:-1]]
    assert sorted(copied) == sorted(kept) and all((ROOT / name).exists() for name in copied)
    extras = re.search(r"'\.\[([a-z,]+)\]'", text)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras and set(extras[1].split(",")) <= set(known)


DOCUMENT_003 = {
    "ps_and_worker.sh": """
dir=./log/1
date > $dir/output-0
python $1 --job_name="ps" --task_index=0 >> $dir/output-0 &
python $1 --job_name="worker" --task_index=0 >> $dir/output-0
date >> $dir/output-0
""",
    "worker.sh": """
dir=./log/1
date > $dir/output-1
python $1 --job_name="worker" --task_index=1 >> $dir/output-1
date >> $dir/output-1
""",
}


@pytest.mark.parametrize("name", DOCUMENT_003)
def test_the_two_scripts_have_the_documents_lines(name: str) -> None:
    lines = (ROOT / "examples" / "scripts" / name).read_text().splitlines()
    own = ("#", "mkdir -p $dir", "wait")
    assert [line for line in lines if line and not line.startswith(own)] == DOCUMENT_003[name].strip().splitlines()
