"""--tls and --insecure as users start them: by the launcher, and by hand with `paceline keys new`."""

import json
from pathlib import Path

import pytest
from processes import Processes

from paceline.launchers.ports import Reserved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def test_run_with_tls_and_a_look_inside(processes: Processes, train: Path, tmp_path: Path) -> None:
    flags = ["--mode=sync", "--ps=2", "--lane=tcp", "--tls", "--run-dir=made"]
    processes.paceline("run", *flags, train, "--kv").ends_with(0)
    summary = json.loads((tmp_path / "made" / "summary.json").read_text())
    assert summary["ok"] and summary["global_step"] == 40
    assert "kv says (32, 8)" in (tmp_path / "made" / "logs" / "worker-0.log").read_text()


def test_by_hand_with_one_folder_of_keys(processes: Processes, ports: Reserved, train: Path, tmp_path: Path) -> None:
    said = processes.paceline("keys", "new", "keys").ends_with(0).text
    assert "--secret-file keys/secret --tls" in said
    flags = [f"--ps_hosts={ports.addresses(1)[0]}", f"--worker_hosts={ports.addresses(1)[0]}"]
    flags += ["--secret-file=keys/secret", "--lane=tcp"]
    ps = processes.paceline("serve", "--job_name=ps", *flags, "--tls", name="ps")
    ps.wait_for("Started server")
    plain = processes.paceline("serve", "--job_name=worker", *flags, "--wait-s=2", train, name="plain").ends_with(3)
    assert "--tls" in plain.text and "Traceback" not in plain.text
    processes.paceline("serve", "--job_name=worker", *flags, "--tls", train, name="worker").ends_with(0)
    ps.ends_with(0)


def test_insecure_is_warned_of_and_trains(processes: Processes, train: Path) -> None:
    launcher = processes.paceline("run", "--mode=sync", "--lane=tcp", "--insecure", train).ends_with(0)
    assert sum(line.startswith("WARNING: --insecure") for line in launcher.lines) == 1
