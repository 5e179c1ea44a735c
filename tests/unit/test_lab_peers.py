"""ARE other systems measured fairly, and are the bars computed from the same run? Matrix, groups, verdicts, peers."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from paceline.lab.matrices import peers
from paceline.lab.measuring import starting
from paceline.lab.measuring.processes import Group, Process, Times
from paceline.lab.measuring.starting import Starter, find_peer, peers_python, peers_versions
from paceline.lab.scenario import Kind, Measured, Pair, Segment, groups, of_group, only, plan
from paceline.lab.scripts.start_script import imports
from paceline.launchers.ports import Reserved

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "bench" / "peers"
MATRIX = peers.matrix()


# --- the matrix ---------------------------------------------------------------------------------------------------


def test_the_matrix_is_whole() -> None:
    names = [each.name for each in MATRIX.scenarios]
    assert len(set(names)) == len(names)
    assert {name for row in MATRIX.rows for name in (row.scenario, row.beside)} == set(names)
    assert {name for _, *pair in peers.PAIRS for name in pair} <= {row.title for row in MATRIX.rows}
    for each in MATRIX.scenarios:
        if each.kind in (Kind.PEER, Kind.DRIVER):
            script = find_peer(each.what)
            assert script is not None and len(script.read_text().splitlines()) < 150


def test_what_the_bars_compare_is_measured_together_and_without_restless_neighbours() -> None:
    together = {row.title for row in MATRIX.rows if row.group == peers.BARS}
    compared = {title for bar in peers.RATIO_BARS for title in (bar.ours, bar.theirs)}
    assert compared | {peers.AA, peers.TF_SYNC} == together
    kinds = {each.what for each in of_group(MATRIX, peers.BARS)}
    assert kinds == {"", "tensorflow_graph", "ddp_gloo"}


def test_sync_of_tensorflow_is_a_peer_beside_its_own_single_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = [each for each in MATRIX.rows if each.title == peers.TF_SYNC]
    assert row.beside == peers.TF_SINGLE and ("2 workers, sync", peers.SYNC, peers.TF_SYNC) in peers.PAIRS
    started: list[Sequence[str]] = []
    monkeypatch.setattr(starting, "Process", lambda name, command, *args, **named: started.append(command))
    with Reserved() as ports:
        starter = Starter(tmp_path, tmp_path, 0, ports)
        for name in (peers.TF_SYNC, peers.TF_ASYNC):
            starter.start(next(each for each in MATRIX.scenarios if each.name == name), Group())
    assert ["--sync" in command for command in started] == [True] * 3 + [False] * 3


def test_peers_have_the_versions_that_we_are_tested_with() -> None:
    ours = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    lines = [line for line in (FOLDER / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    theirs = dict(line.split("==") for line in lines)
    assert set(theirs) == {"numpy", "ray", "tensorflow-cpu", "torch"}
    assert {name: ours[name] for name in theirs if name != "ray"} == {n: v for n, v in theirs.items() if n != "ray"}


def test_groups_are_planned_apart() -> None:
    assert groups(MATRIX.rows) == [peers.BARS, peers.RPC, peers.STRATEGY, peers.RAY, peers.STARTS]
    for group in groups(MATRIX.rows):
        segments = plan(MATRIX.rows, 0, 0, group)
        assert {segment.group for segment in segments} == {group}
        rows = [segment.row for segment in segments if segment.row is not None]
        assert sorted(rows) == [at for at, row in enumerate(MATRIX.rows) if row.group == group]
        assert {segment.scenario for segment in segments} == {each.name for each in of_group(MATRIX, group)}
    assert plan(MATRIX.rows, 0, 0, peers.STARTS)[0] == Segment(peers.IMPORTS, None, peers.STARTS)


def test_only_keeps_the_group() -> None:
    few = only(MATRIX, "Ray actors")
    assert groups(few.rows) == [peers.BARS, peers.RAY]
    assert {each.name for each in of_group(few, peers.RAY)} == {peers.SINGLE, peers.RAY_ONE, peers.RAY_ASYNC}


def test_a_start_is_one_step_and_is_not_warmed_up_fifty_times() -> None:
    assert MATRIX.amounts.of(Kind.START) == (0, 1) and MATRIX.amounts.warm_up(Kind.START) == 1
    assert MATRIX.amounts.warm_up(Kind.PEER) == MATRIX.amounts.warmup_steps


# --- what the rows say together -----------------------------------------------------------------------------------


def measured(others: float = 0.0, **ratios: Sequence[float]) -> Measured:
    """Rows by the name of their constant, each with these ratios to 100 µs."""
    pairs = {getattr(peers, name): [Pair(0, 100.0 * each, 100.0) for each in values] for name, values in ratios.items()}
    return Measured(pairs=pairs, others=dict.fromkeys(range(5), others))


@pytest.mark.parametrize(
    ("asynchronous", "sync", "told"),
    [
        (1.2, 1.4, ["within the bar"] * 2),
        (1.33, 1.53, ["OVER THE BAR"] * 2),
        (1.29, 1.49, ["within the bar"] * 2),
        (1.31, 1.50, ["within bar + A/A spread"] * 2),
    ],
)
def test_bars_are_shares_of_what_others_took_in_this_run(asynchronous: float, sync: float, told: list[str]) -> None:
    gave = measured(AA=[1.0, 1.02], ONE=[1.1], TF_ONE=[3.0], ASYNC=[asynchronous], TF_ASYNC=[3.9], SYNC=[sync], DDP=[3])
    one, *both, start = peers.bars(gave)
    assert one[1:] == ("1.10", "3.00", "1.15", "1.10", "within the bar")
    assert [line[-1] for line in both] == told and [line[3] for line in both] == ["1.30", "1.50"]
    assert start[-1] == "not measured"
    assert all(len(line) == len(MATRIX.verdicts[0].columns) + 1 for line in (one, *both, start))


def test_a_bar_without_the_other_system_is_not_judged() -> None:
    lines = peers.bars(measured(ONE=[1.2], ASYNC=[1.2], SYNC=[1.2]))
    assert [line[-1] for line in lines] == ["OVER THE BAR", *["not measured"] * 3]


def test_a_noisy_machine_gets_no_verdict() -> None:
    noisy = measured(AA=[0.8, 1.2], ONE=[1.0])
    assert peers.bars(noisy)[0][-1].startswith("too noisy to say (A/A")
    assert peers.bars(measured(others=0.5, ONE=[1.0]))[0][-1] == "too noisy to say (others used 0.50 cores)"


@pytest.mark.parametrize(("first_s", "told"), [(3.1, "within the bar"), (3.3, "OVER THE BAR")])
def test_the_first_step_may_come_a_second_after_the_imports(first_s: float, told: str) -> None:
    pairs = [Pair(0, 1e6 * first_s, 2.2e6)] * 2 + [Pair(0, 9e6, 3e6)]  # once something was in the way
    line = peers.first_step(Measured(pairs={peers.START: pairs}, others={}))
    assert line[1:] == (f"{first_s:.2f} s", "2.20 s", "1.00 s", f"{first_s - 2.2:.2f} s", told)


def test_ours_stand_beside_each_of_theirs() -> None:
    lines = peers.between(measured(ONE=[1.1], RAY_ONE=[11.0]))
    assert len(lines) == len(peers.PAIRS)
    assert {len(line) for line in lines} == {len(MATRIX.verdicts[1].columns) + 1}
    assert ("1 ps + 1 worker", "Ray actors", "110", "1100", "10.00", "1.10", "11.00", peers.OF_RATIOS) in lines
    assert lines[0] == ("1 ps + 1 worker", "TensorFlow's runtime", "110", "-", "-", "1.10", "-", "not measured")


def test_times_of_different_groups_are_not_divided() -> None:
    """The machine is half as fast when the second group is measured: nobody is slower for that."""
    later = [Pair(0, 440.0, 200.0)]
    pairs = {peers.ONE: [Pair(0, 110.0, 100.0)], peers.RPC_ONE: later, peers.STRATEGY_ONE: later, peers.TF_ONE: later}
    lines = {line[1]: line for line in peers.between(Measured(pairs=pairs, others={})) if line[0] == "1 ps + 1 worker"}
    assert lines["torch RPC"][2:] == ("110", "440", "2.00", "1.10", "2.20", peers.OF_RATIOS)
    assert lines["ParameterServerStrategy"][2:] == ("110", "440", "4.00", "1.10", "2.20", peers.APART)
    assert lines["TensorFlow's runtime"][2:] == ("110", "440", "4.00", "1.10", "2.20", "")


# --- processes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def restless() -> Iterator[Group]:
    made = Group(is_stopped_between=True)
    yield made
    made.kill()


def test_a_restless_peer_stands_still_between_orders(restless: Group, tmp_path: Path) -> None:
    code = "import sys; print('{}', flush=True)\nfor line in sys.stdin: print('{\"us\": 7}', flush=True)"
    process = Process("peer", [sys.executable, "-c", code], {}, tmp_path / "log", speaks=True)
    restless.processes.append(process)
    restless.await_ready(time.monotonic() + 30)
    for _ in range(2):
        await_stopped(process.pid)
        assert restless.run(1, 1, 30.0) == Times(us=[7.0])
    await_stopped(process.pid)
    assert restless.end(30.0) == []


def await_stopped(pid: int) -> None:
    """A signal is on its way for a moment; the test's own time limit ends a wait that never does."""
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        os.sched_yield()


def test_peers_run_in_their_own_environment_once_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starting, "__file__", str(tmp_path / "src" / "starting.py"))
    assert peers_python() == sys.executable
    programs = tmp_path / ".venv-peers" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    assert peers_python() == sys.executable, "half of an environment"
    (programs.parent / ".installed").touch()
    assert peers_python() == str(programs / "python")
    places = tmp_path / ".venv-peers" / "lib" / "python3.11" / "site-packages"
    for name, version in (("ray", "2.60.0"), ("tensorflow_cpu", "2.20.0")):  # as their wheels spell them
        told = places / f"{name}-{version}.dist-info" / "METADATA"
        told.parent.mkdir(parents=True)
        told.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    found = {"ray of the peers": "2.60.0", "tensorflow-cpu of the peers": "2.20.0"}
    assert peers_versions(["ray", "tensorflow-cpu", "torch"]) == found


@pytest.mark.parametrize(
    ("script", "package", "told"),
    [
        ("tensorflow_graph", "tensorflow", "TensorFlow"),
        ("tensorflow_strategy", "tensorflow", "TensorFlow"),
        ("ddp_gloo", "torch", "A PyTorch with gloo"),
        ("torch_rpc", "torch", "A PyTorch with RPC"),
        ("ray_actors", "ray", "Ray, or the PyTorch that its workers need,"),
        ("ray_actors", "torch", "Ray, or the PyTorch that its workers need,"),
    ],
)
def test_a_peer_that_is_not_installed_says_how_to_get_it(script: str, package: str, told: str, tmp_path: Path) -> None:
    for name in {"ray", package}:  # if Ray is there or not, the other one is missing
        content = "raise ImportError\n" if name == package else ""
        (tmp_path / f"{name}.py").write_text(content)
    command = [sys.executable, str(FOLDER / f"{script}.py")]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert json.loads(done.stdout) == {"missing": f"{told} is not installed; make peers"}


def test_a_worker_of_tensorflow_in_sync_counts_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice it has the other's token: a call more, and none that the other one is not there for."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setitem(sys.modules, "tensorflow.compat.v1", None)  # it is not needed for this
    import tensorflow_graph

    tokens = iter([1, 1, 2, 2, 3, 4, 5])
    session = SimpleNamespace(make_callable=lambda step, feed_list: lambda *fed: next(tokens))
    data = (np.zeros((5, 784), np.float32), np.zeros(5, np.int64))
    monkeypatch.setattr(tensorflow_graph.speaking, "load", lambda folder: data)
    train = tensorflow_graph.trainer(session, None, [], SimpleNamespace(data=None, task=0, sync=True))
    train(2)
    assert next(tokens) == 2, "three calls for two updates"
    train(2)
    assert next(tokens) == 5, "the next order begins where the last one ended"


def test_a_peer_that_trains_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import speaking

    chance = np.random.default_rng(0)
    before = [chance.normal(size=shape) for shape in ((784, 100), (100,), (100, 10), (10,))]
    after = [each + 1e-3 for each in before]
    speaking.check_changed(before, after)
    for wrong, told in (
        (before, "nothing is trained"),
        ([*after[:3], before[3]], "nothing is trained"),
        ([*after[:3], after[3] * np.nan], "not finite"),
    ):
        with pytest.raises(SystemExit, match=told):
            speaking.check_changed(before, wrong)
    with pytest.raises(SystemExit, match="not document 000's model"):
        speaking.check_changed(before[:2], after[:2])
    flat = [np.zeros_like(each) for each in before]
    assert speaking.loss(flat, chance.random((5, 784)), np.arange(5)) == pytest.approx(np.log(10))


def test_an_import_that_fails_is_no_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(Exception, match="ended with exit code 3"):
        imports(2)
