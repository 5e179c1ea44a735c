"""The commands that `paceline emit` prints, started as plain processes; and document 003's two shell scripts."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from processes import Processes

from paceline.launchers.ports import Reserved

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"
IMAGE = "paceline:latest"


def commands(form: str, text: str) -> list[list[str]]:
    """What runs inside each container."""
    if form == "compose":
        return [service["command"] for service in yaml.safe_load(text)["services"].values()]
    lines = [shlex.split(line) for line in text.splitlines() if line and not line.startswith("#")]
    return [line[line.index(IMAGE) + 1 :] for line in lines]


def test_what_is_emitted_trains(processes: Processes, ports: Reserved, train: Path, tmp_path: Path) -> None:
    """Both forms emit the same commands, so they are started once."""
    ps, *workers = ports.addresses(3)
    hosts = ["--ps-hosts", ps, "--worker-hosts", ",".join(workers)]
    result = tmp_path / "result"
    flags = ["--mode", "sync", *hosts, "--run-dir", result, train, "--epochs", "1"]
    emitted = {form: processes.paceline("emit", form, *flags, name=form) for form in ("docker", "compose")}
    docker, compose = (commands(form, emit.ends_with(0).text) for form, emit in emitted.items())
    assert docker == compose
    tasks = [processes.start(*words, name=words[2]) for words in docker]
    assert len(tasks) == 3
    for task in tasks:
        task.ends_with(0)
    assert "Found by: flags" in tasks[0].lines and tasks[0].lines[-1] == "ps:0 served 20 updates"
    summary = json.loads((result / "summary.json").read_text())
    assert summary["ok"] and summary["mode"] == "sync" and len(summary["workers"]) == 2


def test_document_003s_scripts(processes: Processes, ports: Reserved, train: Path, tmp_path: Path) -> None:
    ps, *workers = ports.addresses(3)
    shutil.copy(train, tmp_path / "model.py")
    (tmp_path / "settings.py").write_text(f"ps_svrs = {[ps]!r}\nworker_svrs = {workers!r}\n")
    hosts = [
        processes.start("sh", EXAMPLES / "scripts" / name, "model.py") for name in ("ps_and_worker.sh", "worker.sh")
    ]
    for host in hosts:
        host.ends_with(0)
    first, second = ((tmp_path / "log" / "1" / f"output-{index}").read_text().splitlines() for index in (0, 1))
    assert "job_name : ps" in first and "ps:0 served 80 updates" in first
    assert any(line.startswith("Training elapsed time: ") for line in second)
