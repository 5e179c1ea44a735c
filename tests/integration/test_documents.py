"""The very command lines of documents 000, 002 and 003, run by bash; only hosts and sizes are others.

Documents 000 and 002 with --log-style tf, which prints the documents' own words.
"""

import re
import shutil
from pathlib import Path

import pytest
from processes import Processes

from paceline.launchers.ports import Reserved

pytestmark = pytest.mark.timeout(180)

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = Path(__file__).with_name("programs")
WAIT_FOR_ALL = "\nfor job in $(jobs -p); do wait $job || exit $?; done\n"

ONE_AND_ONE = """
nohup python tfdist_between.py --job_name=ps --task_index=0 > ps.log 2>&1 &
nohup python tfdist_between.py --job_name=worker --task_index=0 > worker.log 2>&1 &
"""
ONE_AND_TWO = ONE_AND_ONE + "nohup python tfdist_between.py --job_name=worker --task_index=1 > worker1.log 2>&1 &\n"
TWO_AND_TWO = ONE_AND_TWO + "nohup python tfdist_between.py --job_name=ps --task_index=1 > ps1.log 2>&1 &\n"
ONE_AND_THREE = ONE_AND_TWO + "nohup python tfdist_between.py --job_name=worker --task_index=2 > worker2.log 2>&1 &\n"
CASES_000 = {  # the section of document 000: its commands, number of ps, of workers
    "1": (ONE_AND_ONE, 1, 1),
    "2": (ONE_AND_TWO, 1, 2),
    "4": (ONE_AND_TWO.replace("tfdist_between.py", "tfdist_between_sync.py"), 1, 2),
    "5": (TWO_AND_TWO, 2, 2),
    "6": (TWO_AND_TWO.replace("tfdist_between.py", "tfdist_between_sync.py"), 2, 2),
    "8": (ONE_AND_THREE, 1, 3),
}
NIGHTLY = pytest.mark.nightly("a section of document 000 whose number of tasks matters")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__")))


def localhost(ports: Reserved, count: int) -> list[str]:
    return [address.replace("127.0.0.1", "localhost") for address in ports.addresses(count)]


def write_settings(folder: Path, ps: list[str], workers: list[str]) -> None:
    (folder / "settings.py").write_text(f"ps_svrs = {ps!r}\nworker_svrs = {workers!r}\n")


def sized(commands: str, flags: str) -> str:
    """The commands, with the script's own flags for a short training."""
    return re.sub(r"(--task_index=\d)", rf"\1 --log_style=tf {flags}", commands)


@pytest.mark.parametrize(
    "section", [pytest.param(name, marks=pytest.mark.slow if name == "4" else NIGHTLY) for name in CASES_000]
)
def test_document_000(section: str, processes: Processes, ports: Reserved, folder: Path) -> None:
    commands, num_ps, num_workers = CASES_000[section]
    write_settings(folder, localhost(ports, num_ps), localhost(ports, num_workers))
    processes.bash(sized(commands, "--epochs=2 --batches=30") + WAIT_FOR_ALL, cwd=folder).ends_with(0)
    updates = 60 if "sync" in commands else 60 * num_workers
    for index in range(num_ps):
        log = (folder / f"ps{index or ''}.log").read_text().splitlines()
        assert log[2].startswith("Initialize GrpcChannelCache for job ps -> {0 -> localhost:")
        assert any(line.startswith("Started server with target: grpc://localhost:") for line in log)
        assert "job_name : ps" in log and f"task_index : {index}" in log and "Found by: settings.py" in log
        assert log[-1] == f"ps:{index} served {updates} updates"
    for index in range(num_workers):
        log = (folder / f"worker{index or ''}.log").read_text()
        assert re.search(r"^Epoch 2: cost \d+\.\d+, \d+\.\d+ s$", log, re.M)
        assert re.search(r"^Test-Accuracy: 0\.\d\d$", log, re.M)
        assert re.search(r"^Training elapsed time:\d+\.\d{6} s$", log, re.M)
        assert re.search(rf"^\d+\.\d{{6}}: Worker {index}: traing step \d+ dome \(global step:\d+\)$", log, re.M)


DOCUMENT_002 = """
python /home/user/code/distributed.py --job_name="ps" --ps_hosts="192.168.1.173:2222" \
--worker_hosts="192.168.1.171:2222,192.168.1.172:2222" --task_index=0 > ps.log 2>&1 &
python /home/user/code/distributed.py --job_name="worker" --ps_hosts="192.168.1.173:2222" \
--worker_hosts="192.168.1.171:2222,192.168.1.172:2222"  --task_index=0 > worker.log 2>&1 &
python /home/user/code/distributed.py --job_name="worker" --ps_hosts="192.168.1.173:2222" \
--worker_hosts="192.168.1.171:2222,192.168.1.172:2222"  --task_index=1 > worker1.log 2>&1 &
"""
DOCUMENT_002_BELOW = """
python distributed.py --job_name=ps --task_index=0 > ps.log 2>&1 &
python distributed.py --job_name=worker --task_index=0 > worker.log 2>&1 &
python distributed.py --job_name=worker --task_index=1 > worker1.log 2>&1 &
"""


def check_document_002(folder: Path, source: str) -> None:
    ps = (folder / "ps.log").read_text().splitlines()
    assert ps[:2] == ["job_name : ps", "task_index : 0"] and f"Found by: {source}" in ps
    assert ps[-1] == "ps:0 served 300 updates", "the workers share exactly so many global steps"
    for name in ("worker.log", "worker1.log"):
        log = (folder / name).read_text()
        assert re.search(r"^\d+\.\d{6}: Worker [01]: traing step \d+ dome \(global step:\d+\)$", log, re.M), log
        assert re.search(r"^After 300 training step\(s\), validation cross entropy = \d+(\.\d+)?$", log, re.M), log
        assert re.search(r"^Training ends @ \d+\.\d{6}$", log, re.M), log


@pytest.mark.nightly("hosts in flags of a document's script that are not taken any more")
def test_document_002_with_the_hosts_in_flags(processes: Processes, ports: Reserved, folder: Path) -> None:
    commands = DOCUMENT_002.replace("/home/user/code/", "")
    for host in ("192.168.1.173:2222", "192.168.1.171:2222", "192.168.1.172:2222"):
        commands = commands.replace(host, localhost(ports, 1)[0])
    processes.bash(sized(commands, "--train_steps=300") + WAIT_FOR_ALL, cwd=folder).ends_with(0)
    check_document_002(folder, "flags")


@pytest.mark.slow
def test_document_002_with_task_flags_only(processes: Processes, ports: Reserved, folder: Path) -> None:
    write_settings(folder, localhost(ports, 1), localhost(ports, 2))
    processes.bash(sized(DOCUMENT_002_BELOW, "--train_steps=300") + WAIT_FOR_ALL, cwd=folder).ends_with(0)
    check_document_002(folder, "settings.py")


SCRIPT_003 = """
import sys
sys.path.append({programs!r})
import paceline, train

parameter_servers = ["{ps}"]
workers = ["{worker_0}",
           "{worker_1}"]
cluster = paceline.ClusterSpec({{"ps": parameter_servers, "worker": workers}})
train.main(paceline.init(cluster=cluster))
"""
ON_PS_AND_WORKER = """#!/bin/sh

dir=./log/1

date > $dir/output-0
python $1 --job_name="ps" --task_index=0 >> $dir/output-0 &
python $1 --job_name="worker" --task_index=0 >> $dir/output-0
date >> $dir/output-0
"""
ON_WORKER = """#!/bin/sh

dir=./log/1

date > $dir/output-1
python $1 --job_name="worker" --task_index=1 >> $dir/output-1
date >> $dir/output-1
"""


@pytest.mark.slow
def test_document_003_with_the_cluster_in_the_script(processes: Processes, ports: Reserved, tmp_path: Path) -> None:
    ps, worker_0, worker_1 = localhost(ports, 3)
    script = SCRIPT_003.format(programs=str(PROGRAMS), ps=ps, worker_0=worker_0, worker_1=worker_1)
    (tmp_path / "model.py").write_text(script)
    (tmp_path / "log" / "1").mkdir(parents=True)
    hosts = []
    for name, text in (("ps_and_worker.sh", ON_PS_AND_WORKER), ("worker.sh", ON_WORKER)):
        (tmp_path / name).write_text(text)
        hosts.append(processes.start("sh", name, "model.py"))
    for host in hosts:
        host.ends_with(0)
    assert not processes.survivors(), "the ps ends by itself"
    first, second = ((tmp_path / "log" / "1" / f"output-{i}").read_text().splitlines() for i in (0, 1))
    assert "job_name : ps" in first and "ps:0 served 80 updates" in first
    assert "Found by: cluster argument" in first and "Found by: cluster argument" in second
    assert any(line.startswith("Training elapsed time: ") for line in first)
    assert any(line.startswith("Training elapsed time: ") for line in second)
