"""`paceline run --on ray` over two machines: tensors cross the link on our own lane, files come back to the driver."""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import Gate, Processes
from ray_cluster import RayCluster, ray_cluster
from running_hosts import RunningHost

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("ray"),
]
Hosts = Callable[[int], list[RunningHost]]


@pytest.fixture
def machines(hosts: Hosts) -> list[RunningHost]:
    return hosts(2)


@pytest.fixture
def cluster(processes: Processes, machines: list[RunningHost]) -> Iterator[RayCluster]:
    """Two machines with two CPUs each; the second sees nothing of the test's folder: what is there must be brought."""
    first, second = machines
    with ray_cluster(processes, first.enter) as made:
        made.start_head(2, "--include-dashboard=false", host=first.address)
        made.add(2, "--node-ip-address", second.address, enter=apart(second, processes.folder))
        yield made


def apart(machine: RunningHost, folder: Path) -> list[str]:
    """Into a machine that has an empty folder there."""
    empty = f'mount -t tmpfs none {shlex.quote(str(folder))} && exec "$@"'
    return [*machine.enter, "unshare", "--mount", "bash", "-c", empty, "bash"]


def on_machines(folder: Path) -> dict[str, list[str]]:
    """Which tasks cluster.json has at which address."""
    told = json.loads((folder / "cluster.json").read_text())
    found: dict[str, list[str]] = {}
    for job in ("ps", "worker"):
        for index, address in enumerate(told[job]):
            found.setdefault(address.rpartition(":")[0], []).append(f"{job}:{index}")
    return found


def lanes_said(folder: Path, num_workers: int) -> list[list[str]]:
    """What each worker's log says of its lanes, one after the other."""
    logs = [(folder / "logs" / f"worker-{index}.log").read_text() for index in range(num_workers)]
    return [re.findall(r"lane (\w+)", log) for log in logs]


def test_two_machines_train_one_model_and_all_files_come_back(
    machines: list[RunningHost], cluster: RayCluster, train: Path, tmp_path: Path
) -> None:
    """Two CPUs each, and four tasks: the ps are apart, and with --colocate each has a worker beside it."""
    first, second = machines
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_bytes(train.read_bytes())
    flags = ["--on", cluster.address, "--ps=2", "--workers=2", "--colocate", "--mode=sync", "--save-every=20"]
    words = ["run", *flags, f"--run-dir={tmp_path / 'made'}", "mine.py"]
    run = first.paceline(*words, cwd=tmp_path / "code", within_s=200, **cluster.environ).ends_with(0)
    assert on_machines(tmp_path / "made") == {
        first.address: ["ps:0", "worker:0"],
        second.address: ["ps:1", "worker:1"],
    } or on_machines(tmp_path / "made") == {
        second.address: ["ps:0", "worker:0"],
        first.address: ["ps:1", "worker:1"],
    }
    told = json.loads((tmp_path / "made" / "summary.json").read_text())
    lanes = {(pair["worker"], pair["ps"]): pair["lane"] for pair in told["pairs"]}
    assert lanes == {
        ("worker:0", "ps:0"): "shm",
        ("worker:1", "ps:1"): "shm",
        ("worker:0", "ps:1"): "tcp",
        ("worker:1", "ps:0"): "tcp",
    }
    assert told["ok"] and told["global_step"] == 40 and "Model: " in run.text
    for task in ("ps-0", "ps-1", "worker-0", "worker-1"):
        assert (tmp_path / "made" / "logs" / f"{task}.log").read_text().startswith("job_name : ")
        assert (tmp_path / "made" / "telemetry" / f"{task}.jsonl").stat().st_size > 0
        assert (tmp_path / "made" / "ledger" / f"{task}.bin").stat().st_size > 0
    again = ["run", *flags, "--tls", f"--run-dir={tmp_path / 'made'}", "--resume=auto", "mine.py", "--epochs=3"]
    more = first.paceline(*again, cwd=tmp_path / "code", within_s=200, **cluster.environ).ends_with(0)
    assert "global step 60" in more.text
    assert list(Path(cluster.environ["RAY_TMPDIR"]).rglob(".paceline")) == []  # no key, no log in Ray's copy


@pytest.mark.nightly("a ps that is not found where Ray puts it again, or a lane that is taken across machines")
def test_one_ps_and_two_workers_over_two_machines(
    machines: list[RunningHost], cluster: RayCluster, train: Path, tmp_path: Path
) -> None:
    """Two CPUs each: Ray has to put somebody on another machine than the ps, and that one crosses the link."""
    flags = ["--on", cluster.address, "--mode=sync", "--run-dir=made"]
    machines[0].paceline("run", *flags, train, within_s=120, **cluster.environ).ends_with(0)
    placed = on_machines(tmp_path / "made")
    (beside,) = (tasks for tasks in placed.values() if "ps:0" in tasks)
    wanted = [["shm"] if f"worker:{index}" in beside else ["tcp"] for index in range(2)]
    assert len(placed) == 2 and ["tcp"] in wanted, placed
    assert lanes_said(tmp_path / "made", 2) == wanted


@pytest.mark.nightly("a ps that is not found where Ray puts it again, or a lane that is taken across machines")
def test_a_machine_that_is_lost_is_replaced_and_the_ps_is_found_where_ray_puts_it(
    processes: Processes, machines: list[RunningHost], train: Path, gate: Gate, tmp_path: Path
) -> None:
    """The workers fill the first machine but for one CPU, so the ps is on the second; then that is gone."""
    processes.leave_unverified("a ps that lost its memory has forgotten updates that were told as made")
    first, second = machines
    with ray_cluster(processes, first.enter) as cluster:
        cluster.start_head(5, "--include-dashboard=false", host=first.address)
        cluster.add(1, "--node-ip-address", second.address, enter=apart(second, processes.folder))
        flags = ["--on", cluster.address, "--worker-cpus=2", "--mode=sync", "--save-every=10", "--run-dir=made"]
        run = first.paceline("run", *flags, train, "--gate", f"0:30:{gate.path}", within_s=240, **cluster.environ)
        arrived = gate.arrival()
        assert on_machines(tmp_path / "made")[second.address] == ["ps:0"]
        assert lanes_said(tmp_path / "made", 2) == [["tcp"], ["tcp"]]
        second.kill()
        run.wait_for("ps:0 was killed by SIGKILL; .* starting it again")
        arrived.release()
        run.ends_with(0)
        told = json.loads((tmp_path / "made" / "summary.json").read_text())
        assert told["ok"] and told["restarts_by_task"] == {"ps:0": 1}
        assert "(raylet)" not in run.text
        now = json.loads((tmp_path / "made" / "moved.json").read_text())["ps:0"]
        assert now.startswith(f"{first.address}:")
