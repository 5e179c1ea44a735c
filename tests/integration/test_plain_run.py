"""`paceline run --plain`: programs that know nothing of paceline. One of the documents' runs on TensorFlow; the rest,
which is about processes, takes a small one that imports nothing."""

import json
import re
import signal
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
from process_fixtures import PROGRAMS
from processes import Gate, Process, Processes

from paceline.cluster.sources import tf_config
from paceline.launchers.ports import Reserved

pytestmark = pytest.mark.timeout(120)

SCRIPT = PROGRAMS / "plain.py"
ASKS = (("ctl", "show", "made"), ("kv", "ls", "made"), ("serve", "--join", "made"))
EXAMPLES = Path(__file__).parents[2] / "examples" / "tensorflow"


def plain(processes: Processes, *words: object, script: Path = SCRIPT, own: tuple[object, ...] = ()) -> Process:
    return processes.paceline("run", "--plain", "--run-dir=made", *words, script, *own, PACELINE_LEDGER="0")


def summary(processes: Processes) -> dict[str, Any]:
    return dict(json.loads((processes.folder / "made" / "summary.json").read_text()))


def log(processes: Processes, name: str) -> list[str]:
    return (processes.folder / "made" / "logs" / f"{name}.log").read_text().splitlines()


def given(processes: Processes, name: str) -> dict[str, Any]:
    return dict(json.loads(log(processes, name)[0]))


def test_every_task_gets_its_flags_and_tf_config_and_the_ps_is_ended(processes: Processes, gate: Gate) -> None:
    """All of a run that goes well: 2 ps that never end, 2 workers that do."""
    run = plain(processes, "--ps=2", own=("--gate", gate.path))
    waiting = gate.arrivals(2)
    ps = psutil.Process(processes.task("ps", 1).pid)
    refused = [processes.paceline(*words).ends_with(2).text for words in ASKS]
    assert all("is of a --plain program: it has no ps of ours that can be asked." in text for text in refused)
    assert ps.cmdline()[1:3] == [str(SCRIPT), "--gate"], "a ps runs the program, too, and nothing of ours is left in it"
    for arrival in waiting.values():
        arrival.release()
    run.ends_with(0)
    assert not ps.is_running()
    cluster = {job: given(processes, f"{job}-1")["argv"][-2:] for job in ("ps", "worker")}
    assert cluster["ps"] == cluster["worker"]
    for job in ("ps", "worker"):
        for index in (0, 1):
            told = given(processes, f"{job}-{index}")
            spec, task = tf_config(json.dumps(told["tf_config"])) or pytest.fail("no TF_CONFIG")
            assert (task.type, task.index) == (job, index)
            assert told["argv"] == [
                "--gate",
                str(gate.path),
                f"--job_name={job}",
                f"--task_index={index}",
                f"--ps_hosts={','.join(spec.job_tasks('ps'))}",
                f"--worker_hosts={','.join(spec.job_tasks('worker'))}",
            ]
            assert told["modules"] == [] and told["name"] == "__main__" and told["path"] == str(PROGRAMS)
            assert told["environ"]["OMP_NUM_THREADS"] == "1" and told["environ"]["PACELINE_TASK"] is None
            assert told["environ"]["CUDA_VISIBLE_DEVICES"] == ("" if job == "ps" else None)
    end = summary(processes)
    assert end["ok"] and end["mode"] == "plain" and end["error"] is None and end["lost"] == []
    assert end["codes"] == {"ps:0": None, "ps:1": None, "worker:0": 0, "worker:1": 0}
    assert [worker["lost"] for worker in end["workers"]] == [False, False]
    assert all(0 < used["cpu_s"] < 20 for used in end["utilisation"].values()) and len(end["utilisation"]) == 4
    assert any(line.startswith("Plain run done; ") for line in run.lines)
    config = json.loads((processes.folder / "made" / "config.json").read_text())
    assert config["plain"] is True
    assert json.loads((processes.folder / "made" / "cluster.json").read_text())["ps"] == spec.job_tasks("ps")


@pytest.mark.parametrize(("own", "code"), [((), 1), (("--code=2",), 2)])
def test_a_worker_that_fails_ends_the_run(own: tuple[str, ...], code: int, processes: Processes, gate: Gate) -> None:
    run = plain(processes, own=("--gate", gate.path, "--fails=1", *own))
    waiting = gate.arrivals(2)
    waiting["worker:1"].release()
    run.ends_with(code)
    end = summary(processes)
    assert end["lost"] == ["worker:1"] and end["codes"]["worker:1"] == code and end["codes"]["worker:0"] is None
    assert end["error"] == f"worker:1 failed with exit code {code}" and not end["ok"]
    (cause,) = [line for line in run.lines if line.startswith("Root cause: ")]
    assert cause.startswith(f"Root cause: worker:1 failed with exit code {code}; its log: made/logs/worker-1.log")
    assert ("  ValueError: as it was asked to" in run.lines) == (code == 1)


def test_a_ps_that_is_lost_ends_the_run(processes: Processes, gate: Gate) -> None:
    run = plain(processes, own=("--gate", gate.path))
    waiting = gate.arrivals(2)
    processes.task("ps", 0).kill()
    run.ends_with(3)
    assert len(waiting) == 2
    assert summary(processes)["error"] == "ps:0 was killed by SIGKILL"


@pytest.mark.parametrize("own", [(), ("--deaf",)], ids=["hears", "deaf"])
def test_ctrl_c_leaves_nothing(own: tuple[str, ...], processes: Processes, gate: Gate) -> None:
    run = plain(processes, own=("--gate", gate.path, *own))
    waiting = gate.arrivals(2)
    run.signal(signal.SIGINT)
    run.ends_with(130)
    assert not processes.alive() and len(waiting) == 2
    assert summary(processes)["error"] == "interrupted"
    assert "Interrupted: ending all tasks." in run.lines


def test_what_a_task_has_started_ends_with_it(processes: Processes) -> None:
    """A ps that is ended and a worker that ends by itself, each with a child that goes on."""
    plain(processes, "--workers=1", own=("--child",)).ends_with(0)
    assert not processes.survivors()


def test_tasks_end_with_their_launcher(processes: Processes, gate: Gate) -> None:
    run = plain(processes, own=("--gate", gate.path, "--deaf"))
    waiting = gate.arrivals(2)
    run.signal(signal.SIGKILL)
    run.end()
    assert not processes.survivors() and len(waiting) == 2


@pytest.mark.slow
def test_a_slowed_worker_stands_still_most_of_the_time(processes: Processes) -> None:
    """What others use of the machine can only add to it."""
    run = plain(processes, "--slow=worker:1=5x", own=("--paces",)).ends_with(0)
    paces = json.loads(log(processes, "worker-1")[1])
    assert median(paces[-4:]) > 4, paces
    assert median(paces[-4:]) > 1.5 * median(json.loads(log(processes, "worker-0")[1])), "the other one is not slowed"
    said = run.wait_for("worker:1 listens at its address")
    assert said.endswith("from now on it is slowed, as --slow says")
    end = summary(processes)
    assert end["slow"] == "worker:1=5x" and end["not_slowed"] == []


def test_a_worker_that_never_listens_is_not_slowed_and_that_is_told(processes: Processes) -> None:
    run = plain(processes, "--workers=1", "--slow=worker:0=5x").ends_with(0)
    assert "worker:0 never listened at its address, so it was not slowed" in run.lines
    assert summary(processes)["not_slowed"] == ["worker:0"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--mode=sync"], "--mode says how paceline trains"),
        (["--lane=tcp"], "--lane says"),
        (["--ema=0.9"], "--ema says"),
        (["--save-every=100"], "--save-every says"),
        (["--resume=auto"], "--resume says"),
        (["--ledger"], "--ledger says"),
        (["--chaos=kill=ps:0@5"], "--ledger says"),
        (["--no-soft-placement"], "--no-soft-placement says"),
        (["--worker-device=/gpu:0"], "--worker-device says"),
        (["--workers=2:4"], "--workers MIN:MAX lets others join"),
        (["--max-restarts=5"], "no task of a --plain program is started again"),
        (["--slow=worker:7=2x"], "--slow names worker:7, which is no worker of this cluster"),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
def test_flags_that_would_do_nothing_are_refused(
    flags: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.cli.main import main

    monkeypatch.delenv("PACELINE_LEDGER", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["run", "--plain", *flags, str(SCRIPT)])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "nothing is made before every check has passed"


def test_a_dry_run_shows_the_commands(
    ports: Reserved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.cli.main import main

    monkeypatch.delenv("PACELINE_LEDGER", raising=False)
    monkeypatch.chdir(tmp_path)
    ps, worker = ports.addresses(2)
    hosts = [f"--ps-hosts={ps}", f"--worker-hosts={worker}"]
    with pytest.raises(SystemExit) as ended:
        main(["run", "--plain", "--dry-run", *hosts, str(SCRIPT), "--paces"])
    assert ended.value.code == 0
    cluster = f"--ps_hosts={ps} --worker_hosts={worker}"
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("python ")] == [
        f"python {SCRIPT} --paces --job_name=ps --task_index=0 {cluster}",
        f"python {SCRIPT} --paces --job_name=worker --task_index=0 {cluster}",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("tensorflow")
def test_tensorflow_trains(processes: Processes) -> None:
    """Document 000's program on TensorFlow's own runtime; the second worker goes on when the chief has ended."""
    size = ("--epochs=2", "--batches=60", "--lr=0.01")
    run = plain(processes, script=EXAMPLES / "tfdist_between.py", own=size).ends_with(0)
    for index in (0, 1):
        text = "\n".join(log(processes, f"worker-{index}"))
        assert re.search(r"^Epoch 2: cost \d+\.\d+, \d+\.\d+ s$", text, re.M), text
        assert re.search(r"^Test-Accuracy: 0\.\d\d$", text, re.M), text
    assert "Started server with target: grpc://" in "\n".join(log(processes, "ps-0"))
    end = summary(processes)
    assert end["ok"] and end["codes"]["ps:0"] is None, "its server.join() never returns"
    assert end["utilisation"]["worker:0"]["cpu_s"] > 1
    assert run.lines[-1].startswith("Run folder: made")
