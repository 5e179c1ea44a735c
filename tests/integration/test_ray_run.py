"""`paceline run --on ray` on a real Ray: it trains, comes back after deaths, and leaves nothing; what it refuses."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from process_fixtures import started_processes
from processes import Gate, Processes
from ray_cluster import RayCluster, ray_cluster

from paceline.telemetry.paths import RunPaths

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300), pytest.mark.usefixtures("ray")]
CLIENT = pytest.mark.nightly("actors that outlive a driver which reached Ray by its client")
CPUS = 4


@pytest.fixture(scope="module")
def cluster(ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """One machine with four CPUs, and two cards that Ray believes in, for all tests here."""
    with started_processes(tmp_path_factory.mktemp("ray")) as started, ray_cluster(started) as made:
        made.start_head(CPUS, "--num-gpus", "2")
        yield made


def summary(folder: Path) -> dict[str, object]:
    told: dict[str, object] = json.loads((folder / "summary.json").read_text())
    return told


@pytest.mark.slow
def test_a_run_on_all_that_there_is_twice_and_by_the_client(
    processes: Processes, cluster: RayCluster, train: Path, tmp_path: Path
) -> None:
    for name, on in (("by-address", cluster.address), ("by-client", cluster.client)):
        flags = ["--on", on, "--ps=2", "--workers=2", "--mode=sync", f"--run-dir={name}"]
        run = processes.paceline("run", *flags, train, within_s=120, **cluster.environ).ends_with(0)
        assert run.text.count("Cluster: job ps") == 1 and f"--on {on}" in run.lines[-1]
        told = summary(tmp_path / name)
        assert told["ok"] and told["global_step"] == 40
        assert {pair["lane"] for pair in told["pairs"]} == {"shm"}  # type: ignore[attr-defined]
        assert (tmp_path / name / "logs" / "worker-1.log").read_text().count("Training ends") == 1
        assert cluster.is_clear()


@pytest.mark.slow
def test_tasks_that_are_killed_come_back_where_they_were(
    processes: Processes, cluster: RayCluster, train: Path, tmp_path: Path
) -> None:
    flags = ["--on", cluster.address, "--chaos=kill=worker:1@5,kill=ps:0@20", "--run-dir=made"]
    run = processes.paceline("run", *flags, train, within_s=120, **cluster.environ).ends_with(0)
    assert "Started again: ps:0 1x, worker:1 1x" in run.lines
    assert summary(tmp_path / "made")["restarts_by_task"] == {"ps:0": 1, "worker:1": 1}
    assert cluster.is_clear()


@pytest.mark.slow
def test_ray_starts_an_actor_again_and_its_task_rejoins(
    processes: Processes, cluster: RayCluster, train: Path, gate: Gate, tmp_path: Path
) -> None:
    """A ps goes back to the checkpoint, as after the loss of its machine; a worker begins where it was."""
    processes.leave_unverified("a ps that lost its memory has forgotten updates that were told as made")
    flags = ["--on", cluster.address, "--mode=sync", "--save-every=10", "--run-dir=made"]
    run = processes.paceline("run", *flags, train, "--gate", f"0:30:{gate.path}", within_s=200, **cluster.environ)
    arrived = gate.arrival()
    for task in ("ps:0", "worker:1"):
        cluster.actor_of(task).kill()
        run.wait_for(f"{task} was killed by SIGKILL")
    arrived.release()
    run.ends_with(0)
    told = summary(tmp_path / "made")
    assert told["ok"] and told["restarts_by_task"] == {"ps:0": 1, "worker:1": 1}
    assert cluster.is_clear()


@pytest.mark.nightly("a Ray run without a checkpoint that waits for ever; by hand it is in CI")
def test_without_a_checkpoint_the_run_ends_with_the_reason(
    processes: Processes, cluster: RayCluster, train: Path, gate: Gate, tmp_path: Path
) -> None:
    """Also the worker that is not the chief: the ps says that the chief will not come back."""
    processes.leave_unverified("a ps that lost its memory has forgotten updates that were told as made")
    flags = ["--on", cluster.address, "--mode=sync", "--save-every=none", "--run-dir=made"]
    run = processes.paceline("run", *flags, train, "--gate", f"0:30:{gate.path}", within_s=120, **cluster.environ)
    arrived = gate.arrival()
    cluster.actor_of("ps:0").kill()
    run.wait_for("ps:0 was killed by SIGKILL")
    arrived.release()
    run.ends_with(3)
    for index in (0, 1):
        log = (tmp_path / "made" / "logs" / f"worker-{index}.log").read_text()
        assert "ps:0 lost its memory, and there is no checkpoint to go back to" in log
    assert cluster.is_clear()


@pytest.mark.parametrize(
    ("number", "is_client"),
    [
        pytest.param(signal.SIGINT, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, True, marks=CLIENT),
        pytest.param(signal.SIGKILL, True, marks=CLIENT),
    ],
)
def test_nothing_is_left_when_the_driver_ends(
    processes: Processes, cluster: RayCluster, train: Path, gate: Gate, number: signal.Signals, is_client: bool
) -> None:
    processes.leave_unverified("the run ends in the middle")
    flags = ["--on", cluster.client if is_client else cluster.address, "--run-dir=made"]
    gates = [word for index in range(2) for word in ("--gate", f"{index}:5:{gate.path}")]
    run = processes.paceline("run", *flags, train, *gates, within_s=120, **cluster.environ)
    arrived = gate.arrivals(2)  # one alone may be there before the other has begun
    assert len(cluster.tasks()) >= 6  # an actor and a process for each of three
    run.signal(number)
    for each in arrived.values():
        each.release()
    assert run.end() == (130 if number is signal.SIGINT else -signal.SIGKILL)
    assert cluster.is_clear()


@pytest.mark.slow
def test_the_secret_is_nowhere_that_ray_shows(
    processes: Processes, cluster: RayCluster, train: Path, gate: Gate, tmp_path: Path
) -> None:
    run = processes.paceline(
        "run", "--on", cluster.address, "--run-dir=made", train, "--gate", f"0:5:{gate.path}", within_s=120,
        **cluster.environ,
    )  # fmt: skip
    arrived = gate.arrival()
    secret = RunPaths(tmp_path / "made").read_secret()
    for what in ("actors", "tasks", "workers"):
        listed = processes.start("ray", "list", what, "--detail", "--address", cluster.dashboard, **cluster.environ)
        text = listed.ends_with(0).text
        assert "TaskActor" in text or what == "workers"
        assert secret.hex() not in text and repr(bytes(secret))[2:-1] not in text
    lines = [" ".join(each.cmdline()) for each in cluster.tasks()]
    assert lines and not any(secret.hex() in line for line in lines)
    logs = Path(cluster.environ["RAY_TMPDIR"], "session_latest", "logs")
    told = [path for path in logs.rglob("*") if path.is_file() and secret.hex().encode() in path.read_bytes()]
    assert told == []
    arrived.release()
    run.ends_with(0)


@pytest.mark.slow
def test_every_worker_sees_the_cards_that_ray_gave_it(
    processes: Processes, cluster: RayCluster, train: Path, gate: Gate, tmp_path: Path
) -> None:
    flags = ["--on", cluster.address, "--worker-gpus=1", "--run-dir=made"]
    gates = [word for index in range(2) for word in ("--gate", f"{index}:5:{gate.path}")]
    run = processes.paceline("run", *flags, train, *gates, within_s=120, **cluster.environ)
    arrived = gate.arrivals(2)
    seen = {name: psutil.Process(each.pid).environ()["CUDA_VISIBLE_DEVICES"] for name, each in arrived.items()}
    told = json.loads((tmp_path / "made" / "cluster.json").read_text())["tasks"]
    assert sorted(seen.values()) == ["0", "1"] and {name: told[name]["cards"] for name in seen} == seen
    assert "cards" not in told["ps:0"]
    for each in arrived.values():
        each.release()
    run.ends_with(0)


@pytest.mark.nightly("a worker that does not join when a machine is added by hand")
def test_workers_follow_the_machines_that_come(
    processes: Processes, cluster: RayCluster, train: Path, gate: Gate, tmp_path: Path
) -> None:
    """1:5 on four CPUs: a ps, a worker, then two more; the fifth CPU comes with another machine."""
    flags = ["--on", cluster.address, "--workers=1:5", "--run-dir=made"]
    gates = [word for index in range(5) for word in ("--gate", f"{index}:5:{gate.path}")]
    run = processes.paceline("run", *flags, train, *gates, within_s=240, **cluster.environ)
    arrived = list(gate.arrivals(3).values())
    assert "1 of 5 workers are started; the others join when Ray has room for them" in run.lines
    machine = cluster.add(1)
    arrived.append(gate.arrival())
    for each in arrived:
        each.release()
    run.ends_with(0)
    told = summary(tmp_path / "made")
    assert told["ok"] and len(told["workers"]) == 4  # type: ignore[arg-type]
    machine.signal(signal.SIGTERM)
    machine.popen.wait(30)


@pytest.mark.slow
def test_workers_follow_the_autoscaler(
    processes: Processes, train: Path, gate: Gate, tmp_path: Path, ray: None
) -> None:
    """2:4 on three CPUs: Ray's autoscaler sees that two more workers wait, and starts a machine for each of them."""
    (tmp_path / "ray").mkdir()
    with started_processes(tmp_path / "ray") as started, ray_cluster(started) as made:
        made.start_growing(3, at_most=2)
        flags = ["--on", made.address, "--workers=2:4", "--run-dir=made"]
        gates = [word for index in range(4) for word in ("--gate", f"{index}:5:{gate.path}")]
        run = processes.paceline("run", *flags, train, *gates, within_s=240, **made.environ)
        arrived = gate.arrivals(4)
        assert "2 of 4 workers are started; the others join when Ray has room for them" in run.lines
        for each in arrived.values():
            each.release()
        run.ends_with(0)
        told = summary(tmp_path / "made")
        assert told["ok"] and len(told["workers"]) == 4  # type: ignore[arg-type]
        assert {f"worker:{index} joins: there is room for it now." for index in (2, 3)} <= set(run.lines)


@pytest.mark.parametrize("how", ["its own", "beside", "beside, newer"])
@pytest.mark.nightly("a run that does not begin when a kind of autoscaler has made room")
def test_a_run_begins_when_the_autoscaler_has_made_room(
    processes: Processes, train: Path, tmp_path: Path, ray: None, how: str
) -> None:
    """1 ps and 2 workers, and a first machine without a CPU: three must come. Where that is known, a fourth cannot."""
    (tmp_path / "ray").mkdir()
    with started_processes(tmp_path / "ray") as started, ray_cluster(started) as made:
        made.start_growing(0, at_most=3, is_beside=how != "its own", is_newer="newer" in how)
        run = processes.paceline("run", "--on", made.address, "--run-dir=made", train, within_s=200, **made.environ)
        run.ends_with(0)
        limit = ", to which its autoscaler adds at most 3 x (1 CPU)" if how == "its own" else "; its autoscaler may add"
        assert f"asks for 3 x (1 CPU), and Ray has 1 machine: 1 x (nothing){limit}" in run.text
        told = summary(tmp_path / "made")
        assert told["ok"] and len(told["workers"]) == 2  # type: ignore[arg-type]
        if how == "its own":
            more = processes.paceline("run", "--on", made.address, "--worker-cpus=2", train, **made.environ).ends_with(
                2
            )
            more.wait_for(r"can never fit: it asks for .* its autoscaler adds at most 3 x \(1 CPU\)")


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (("--workers=4",), 2, r"can never fit: it asks for 5 x \(1 CPU\), and Ray has 1 machine: 1 x \(4 CPU, 2 GPU\)"),
        (("--worker-gpus=2",), 2, r"can never fit: it asks for .* 2 x \(1 CPU, 2 GPU\)"),
        (("--plain",), 2, r"--plain starts programs on this host"),
        (("--hosts=a",), 2, r"--on ray says where tasks go, and so does --hosts"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_is_refused_at_once(
    processes: Processes, cluster: RayCluster, train: Path, tmp_path: Path, flags: tuple[str, ...], code: int, says: str
) -> None:
    run = processes.paceline("run", "--on", cluster.address, *flags, train, within_s=30, **cluster.environ)
    run.ends_with(code).wait_for(says)
    assert not (tmp_path / "runs").exists()


@pytest.mark.nightly("a wait for room that has no end")
def test_it_waits_for_room_for_as_long_as_it_may(
    processes: Processes, cluster: RayCluster, train: Path, gate: Gate
) -> None:
    first = processes.paceline(
        "run", "--on", cluster.address, "--run-dir=first", train, "--gate", f"0:5:{gate.path}", within_s=120,
        **cluster.environ,
    )  # fmt: skip
    arrived = gate.arrival()
    late = processes.paceline(
        "run", "--on", cluster.address, "--run-dir=late", "--wait-s=3", train, **cluster.environ
    ).ends_with(3)
    late.wait_for(
        r"gave up after 3 s \(--wait-s\): the run asks Ray for 3 x \(1 CPU\), and 1 CPU, 2 GPU is free of 1 machine"
    )
    arrived.release()
    first.ends_with(0)


@pytest.mark.slow
def test_a_wrong_token_is_told_in_a_sentence(processes: Processes, cluster: RayCluster, train: Path) -> None:
    wrong = {**cluster.environ, "RAY_AUTH_TOKEN": "0" * 64}
    run = processes.paceline("run", "--on", cluster.address, train, **wrong).ends_with(3)
    assert len(run.lines) == 1 and "is RAY_AUTH_TOKEN the cluster's" in run.text


@pytest.mark.slow
def test_without_a_cluster_one_is_started_for_the_run(processes: Processes, train: Path, tmp_path: Path) -> None:
    with TemporaryDirectory(prefix="ray-test-") as short:  # Ray's sockets lie below it
        own = {"RAY_TMPDIR": short, "RAY_ADDRESS": "local"}
        run = processes.paceline("run", "--on", "ray", "--workers=3", "--run-dir=made", train, within_s=120, **own)
        run.ends_with(0)
    assert "one was started for this run" in run.text
    assert summary(tmp_path / "made")["global_step"] == 120


@pytest.mark.nightly("a run that does not find its files as a submitted Ray job")
def test_the_same_command_as_a_submitted_job(
    processes: Processes, cluster: RayCluster, train: Path, tmp_path: Path
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_bytes(train.read_bytes())
    words = ["paceline", "run", "--on", "ray", "--run-dir", str(tmp_path / "made"), "mine.py"]
    submit = ["ray", "job", "submit", "--address", cluster.dashboard, "--working-dir", ".", "--", *words]
    where = {"cwd": tmp_path / "code", "within_s": 200, **cluster.environ}
    run = processes.start(*submit, **where)
    while run.end() and "No available agent" in run.text:  # Ray's own service for jobs comes after Ray
        run = processes.start(*submit, **where)
    assert "Training done; global step 80" in run.text
    assert summary(tmp_path / "made")["ok"] and cluster.is_clear()
