"""What `paceline emit` prints for schedulers, started: as plain processes in the environment that each would give
them, and by Slurm, torchrun and mpirun themselves where they are installed."""

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import BIN, Process, Processes
from slurm import Slurm, slurm

from paceline.launchers.ports import Reserved

__all__ = ["slurm"]
pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

NAME = "mnist"


def emitted(processes: Processes, form: str, *words: object) -> str:
    return processes.paceline("emit", form, *words, name=f"emit {form}").ends_with(0).text


def check_trained(tasks: list[Process], result: Path, found_by: str) -> None:
    """All tasks end well, and all workers took part."""
    for task in tasks:
        task.ends_with(0)
        assert any(line.startswith(f"Found by: {found_by}") for line in task.lines), task.text
    summary = json.loads((result / "summary.json").read_text())
    assert summary["ok"] and summary["mode"] == "sync" and len(summary["workers"]) == len(tasks) - 1


def as_kubelet(text: str, environ: dict[str, str]) -> str:
    """What a kubelet makes of a value: $(NAME) is a variable that was set before, two dollars are one."""
    found = re.compile(r"\$\$|\$\((\w+)\)")
    return found.sub(lambda match: "$" if match[0] == "$$" else environ.get(match[1], match[0]), text)


def started_as_pods(
    processes: Processes, pods: dict[str, tuple[int, dict[str, Any]]], given: dict[str, dict[str, str]], secret: Path
) -> list[Process]:
    """The containers of all pods, with what the control plane would give to each, started as processes."""
    tasks = []
    for job, (size, container) in pods.items():
        for index in range(size):
            environ: dict[str, str] = {}
            for variable in container.get("env", []):
                value = str(index) if "valueFrom" in variable else as_kubelet(variable["value"], environ)
                environ[variable["name"]] = value
            environ |= given.get(f"{job}-{index}", {})
            words = [
                as_kubelet(word, environ).replace("/etc/paceline/keys/secret", str(secret))
                for word in container["command"]
            ]
            tasks.append(processes.start(*words, name=f"{job}-{index}", cwd=Path(container["workingDir"]), **environ))
    return tasks


def secret_of(processes: Processes) -> Path:
    return processes.folder / "config" / "paceline" / "secret"


def test_a_jobsets_pods_train(processes: Processes, ports: Reserved, train: Path, tmp_path: Path) -> None:
    result = tmp_path / "result"
    words = ["--name", NAME, "--mode", "sync", "--run-dir", result, train, "--epochs", "1"]
    text = emitted(processes, "jobset", *words)
    names = [f"{NAME}-{job}-0-{index}.{NAME}:2222" for job, index in (("ps", 0), ("worker", 0), ("worker", 1))]
    for name, address in zip(names, ports.addresses(3), strict=True):
        assert name in text
        text = text.replace(name, address)  # what DNS would do
    pods = {}
    for job in yaml.safe_load(text)["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        pods[job["name"]] = (spec["completions"], spec["template"]["spec"]["containers"][0])
    check_trained(started_as_pods(processes, pods, {}, secret_of(processes)), result, "TF_CONFIG")


@pytest.mark.skipif(os.geteuid() != 0, reason="a hosts file of the test's own needs root")
def test_a_jobset_written_by_hand_trains(processes: Processes, ports: Reserved, train: Path, tmp_path: Path) -> None:
    """Without TF_CONFIG, and at JobSet's own names, which a hosts file resolves as DNS would."""
    pods = [("ps", 0), ("worker", 0), ("worker", 1)]
    hosts = [f"127.77.0.{last} {NAME}-{job}-0-{index}.{NAME}" for last, (job, index) in enumerate(pods, 1)]
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n" + "\n".join(hosts) + "\n")
    alone = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', tmp_path / "hosts"]
    command = [BIN / "paceline", "serve", "--mode", "sync", "--run-dir", tmp_path / "result", train, "--epochs", "1"]
    port = ports.addresses(1)[0].rpartition(":")[2]
    same = {"JOBSET_NAME": NAME, "PACELINE_PS": "1", "PACELINE_WORKERS": "2", "PACELINE_PORT": port}
    tasks = [
        processes.start(
            *alone, *command, name=f"{job}-{index}", REPLICATED_JOB_NAME=job, JOB_COMPLETION_INDEX=str(index), **same
        )
        for job, index in pods
    ]
    check_trained(tasks, tmp_path / "result", "JobSet: pod")


def test_a_tfjobs_pods_train(processes: Processes, ports: Reserved, train: Path, tmp_path: Path) -> None:
    result = tmp_path / "result"
    text = emitted(processes, "tfjob", "--mode", "sync", "--run-dir", result, train, "--epochs", "1")
    ps, *workers = ports.addresses(3)
    cluster = {"ps": [ps], "worker": workers}
    pods, given = {}, {}
    for name, replica in yaml.safe_load(text)["spec"]["tfReplicaSpecs"].items():
        job = name.lower()
        pods[job] = (replica["replicas"], replica["template"]["spec"]["containers"][0])
        for index in range(replica["replicas"]):  # as the operator writes it
            config = {"cluster": cluster, "task": {"type": job, "index": index}, "environment": "cloud"}
            given[f"{job}-{index}"] = {"TF_CONFIG": json.dumps(config)}
    check_trained(started_as_pods(processes, pods, given, secret_of(processes)), result, "TF_CONFIG")


def test_the_shell_script_trains(processes: Processes, ports: Reserved, train: Path, tmp_path: Path) -> None:
    ps, *workers = ports.addresses(3)
    result = tmp_path / "result"
    hosts = ["--ps-hosts", ps, "--worker-hosts", ",".join(workers)]
    text = emitted(processes, "env", "--mode", "sync", *hosts, "--run-dir", result, train, "--epochs", "1")
    (tmp_path / "cluster.sh").write_text(text)
    names = ("worker-1", "ps-0", "worker-0")
    check_trained([processes.start("sh", "cluster.sh", name, name=name) for name in names], result, "TF_CONFIG")


def test_the_parts_of_an_sbatch_train(processes: Processes, ports: Reserved, train: Path, tmp_path: Path) -> None:
    """Its commands, in the variables that the tasks of a real heterogeneous step had (Slurm 22.05)."""
    result = tmp_path / "result"
    text = emitted(processes, "sbatch", "--mode", "sync", "--run-dir", result, train, "--epochs", "1")
    words = shlex.split(text[text.index("srun ") :].replace("\\\n", " "))
    cut = words.index(":")
    ps, worker = (part[part.index("paceline") :] for part in (words[:cut], words[cut:]))
    step = {
        "SLURM_JOB_ID": "4",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": "127.0.0.[2-3]",
        "SLURM_STEP_TASKS_PER_NODE": "1,2",
        "SLURM_DISTRIBUTION": "block",
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "127.0.0.2",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "127.0.0.3",
        "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1",
        "SLURM_TASKS_PER_NODE_HET_GROUP_1": "2",
        "PACELINE_PORT": ports.addresses(1)[0].rpartition(":")[2],
    }
    tasks = [
        processes.start(*command, name=f"task {number}", SLURM_PROCID=str(number), **step)
        for number, command in enumerate((ps, worker, worker))
    ]
    check_trained(tasks, result, "Slurm: task")


def test_a_real_sbatch_trains(slurm: Slurm, processes: Processes, train: Path, tmp_path: Path) -> None:
    result = tmp_path / "result"
    words = ["--name", NAME, "--mode", "sync", "--run-dir", result, train, "--epochs", "1"]
    (tmp_path / "job.sh").write_text(emitted(processes, "sbatch", *words) + "\n")
    job = processes.start("sbatch", "--wait", "job.sh", within_s=150.0, **slurm.environ)
    code = job.end()
    (output,) = tmp_path.glob(f"{NAME}-*.txt")
    told = output.read_text()
    assert code == 0, told
    for number, task in enumerate(("ps", "worker", "worker")):
        assert re.search(rf"^{number}: job_name : {task}$", told, re.M), told
    assert re.search(r"^2: Found by: Slurm: task 2 of 3 of step \d+\.0; the first is ps$", told, re.M), told
    assert re.search(r"job ps -> \{0 -> 127\.0\.0\.2:\d+\}", told) and "job worker -> {0 -> 127.0.0.3:" in told
    summary = json.loads((result / "summary.json").read_text())
    assert summary["ok"] and summary["mode"] == "sync" and len(summary["workers"]) == 2


def test_a_real_srun_trains(slurm: Slurm, processes: Processes, train: Path, tmp_path: Path) -> None:
    """A plain step, without any file: the first task is ps."""
    command = ["paceline", "serve", "--mode", "sync", "--run-dir", "result", train, "--epochs", "1"]
    step = processes.start("srun", "--ntasks=3", "--label", *command, within_s=150.0, **slurm.environ).ends_with(0)
    assert any(re.search(r"^0: A ps runs no script", line) for line in step.lines)
    assert any("Found by: Slurm: task 1 of 3 of step" in line for line in step.lines)
    assert json.loads((tmp_path / "result" / "summary.json").read_text())["ok"]


def test_a_real_torchrun_trains(processes: Processes, train: Path, tmp_path: Path) -> None:
    """The script itself, whose init() finds its task."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", train]
    flags = ["--mode=sync", "--run-dir=result", "--epochs", "1"]
    run = processes.start(*command, *flags, name="torchrun", within_s=150.0).ends_with(0)
    assert sum("Found by: torchrun: process" in line for line in run.lines) == 3, run.text
    assert json.loads((tmp_path / "result" / "summary.json").read_text())["ok"]


def test_workers_of_hosts_without_a_name_train(
    processes: Processes, ports: Reserved, train: Path, tmp_path: Path
) -> None:
    """What torchrun sets on two hosts with two processes each: only the first host's name is known."""
    port = ports.addresses(1)[0].rpartition(":")[2]
    same = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    command = [BIN / "paceline", "serve", "--mode", "sync", "--run-dir", "result", train, "--epochs", "1"]
    tasks = [
        processes.start(*command, name=f"process {number}", RANK=str(number), PACELINE_PORT=port, **same)
        for number in range(4)
    ]
    check_trained(tasks, tmp_path / "result", "torchrun: process")
    assert "job worker -> {0 -> 127.0.0.1:" in tasks[0].text and "1 -> host1.invalid:" in tasks[0].text


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed: apt-get install openmpi-bin")
def test_a_real_mpirun_trains(processes: Processes, ports: Reserved, train: Path, tmp_path: Path) -> None:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    port = ports.addresses(1)[0].rpartition(":")[2]
    command = [BIN / "paceline", "serve", "--mode", "sync", "--run-dir", "result", train, "--epochs", "1"]
    start = ["mpirun", "-n", "3", "--oversubscribe", "--bind-to", "none", "-x", f"PACELINE_PORT={port}"]
    run = processes.start(*start, *command, name="mpirun", within_s=150.0, **root).ends_with(0)
    assert sum("Found by: MPI: process" in line for line in run.lines) == 3, run.text
    assert json.loads((tmp_path / "result" / "summary.json").read_text())["ok"]
