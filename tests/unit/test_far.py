"""What the launcher makes of its hosts, without any: fakes stand for them."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_checkpoint import write_step

from paceline.cluster.hosts import Host
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import ClusterError
from paceline.launchers.crew import Run
from paceline.launchers.entry import Program
from paceline.launchers.hosts import far as fars
from paceline.launchers.hosts import frames as f
from paceline.launchers.hosts.far import Far
from paceline.launchers.hosts.far_host import FarHost
from paceline.launchers.pieces import Piece
from paceline.launchers.restart import LOST
from paceline.launchers.supervisor import is_saved
from paceline.telemetry.paths import RunPaths
from paceline.telemetry.sink import append

PS, WORKER = Task("ps", 0), Task("worker", 0)
SIZE = 100_000  # more than a pipe holds
A, B = Host(name="a", target="a"), Host(name="b", target="b")


def hello(is_going_on: bool = False) -> f.Hello:
    return f.Hello(
        version="",
        settings=Settings(run_id="r"),
        program=Program(script="x"),
        ps=[],
        secret=b"",
        run_dir="r",
        token="t",
        is_going_on=is_going_on,
        num_workers=1,
    )


class FakeHost:
    """A host whose agent says Over, or that is lost at the end."""

    def __init__(self, host: Host, on_piece: object, on_lost: Callable[["FakeHost"], None]) -> None:
        self.host, self._on_lost = host, on_lost
        self.ready = f.Ready(
            host=host.name, cores=1, threads="1", cards=0, run_dir="r", is_shared=False, spare_ports=[]
        )
        self.heard_s = self.news_s = time.monotonic()
        self.is_lost = self.has_said_over = self.is_shared = False
        self.why = ""
        self.left: list[str] = []
        self.is_short = False
        self.tasks: list[Task] = []

    def say(self, message: f.Told) -> None:
        """Nobody hears it."""

    def lose(self, why: str) -> None:
        self.is_lost, self.why = True, why
        self._on_lost(self)

    def wait_until_ready(self, deadline_s: float) -> f.Ready:
        return self.ready

    def wait_until_over(self, seconds: float) -> bool:
        if self.host == B:
            self.lose("b is lost: no space left on device.")
        self.has_said_over = self.host != B
        return True

    def close(self) -> None:
        """There is nothing to end."""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    paths = RunPaths(tmp_path)
    paths.create()
    cluster = ClusterSpec({"ps": ["a:1"], "worker": ["b:2"]})
    return Run(
        program=Program(script="x"),
        cluster=cluster,
        settings=Settings(run_id="r", ledger=True),
        paths=paths,
        threads="1",
    )


def test_a_host_that_is_lost_while_it_sends_the_rest_is_told_of(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fars, "FarHost", FakeHost)
    far = Far(run, {PS: A, WORKER: B}, {})
    far.open([A, B], {"a": hello(), "b": hello()})
    assert not far.close()
    said = capsys.readouterr().err
    assert said == "paceline: b is lost: no space left on device. What it has not sent yet stays there.\n"
    cut = {path.name for path in run.paths.ledgers.glob("*.cut")}
    assert cut == {"worker-0.cut"}, "what is not whole is compared with nothing"


def test_a_full_disk_here_costs_no_host(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(fars, "keep", full)
    far, host = Far(run, {PS: A, WORKER: B}, {}), FakeHost(A, None, lambda host: None)
    for _ in range(2):
        far._keep(host, Piece("logs/ps-0.log", 0, b"x"))  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert host.is_short and not host.is_lost and said.count("\n") == 1
    assert said.startswith("paceline: a piece of logs/ps-0.log from a could not be kept here: no space left")


def test_a_full_disk_here_does_not_keep_the_run_from_its_end(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(fars, "FarHost", FakeHost)
    monkeypatch.setattr(fars, "note_cut", full)
    far = Far(run, {PS: A, WORKER: B}, {})
    far.open([A, B], {"a": hello(), "b": hello()})
    assert not far.close()
    assert "What it has not sent yet stays there." in capsys.readouterr().err


def test_tasks_end_with_their_host_though_nothing_can_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(far: FarHost) -> None:
        raise OSError("no space left on device")

    monkeypatch.setenv("PACELINE_SSH", "false")
    far = FarHost(A, lambda *_: None, fail)
    far.wait_until_over(30)
    assert far.is_lost and far.start(f.Start(WORKER, {}, 1)).wait() == LOST
    assert "what is known of a could not be written down: no space left" in capsys.readouterr().err
    far.close()


def test_an_agent_that_hangs_is_told_in_time(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fars.ready_s([hello(), hello()]) <= 12, "with the checks before it about 15"
    assert fars.ready_s([hello(), hello(is_going_on=True)]) == 30, "it may have much to remove"
    hanging = tmp_path / "ssh"
    hanging.write_text("#!/bin/sh\nwhile read line; do :; done\n")
    hanging.chmod(0o755)
    monkeypatch.setenv("PACELINE_SSH", str(hanging))
    monkeypatch.setattr(fars, "READY_S", 0.6)
    with pytest.raises(ClusterError, match=r"^The agent on a did not answer within \d+ s; look there whether"):
        Far(run, {PS: A, WORKER: A}, {}).open([A], {"a": hello()})


def test_whoever_is_no_agent_is_told_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = tmp_path / "ssh"
    stranger.write_text(f"#!/bin/sh\necho welcome\nexec 1>&-\ncat > {tmp_path / 'heard'}\n")
    stranger.chmod(0o755)
    monkeypatch.setenv("PACELINE_SSH", str(stranger))
    far = FarHost(A, lambda *_: None, lambda _: None)
    far.say(f.End())
    assert far.wait_until_ready(time.monotonic() + 30) is None
    far.close()
    heard = tmp_path / "heard"
    assert not heard.exists() or heard.read_bytes() == b""


def test_signals_and_the_end_do_not_wait_for_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, go, heard = tmp_path / "ssh", tmp_path / "go", tmp_path / "heard"
    os.mkfifo(go)
    agent.write_text(f"#!/bin/sh\nprintf '\\000paceline agent 1\\n'\nread line < {go}\ncat > {heard}\n")
    agent.chmod(0o755)
    monkeypatch.setenv("PACELINE_SSH", str(agent))
    far, has_begun = FarHost(A, lambda *_: None, lambda _: None), threading.Event()

    def pieces() -> Iterator[Piece]:
        for number in range(20):
            has_begun.set()
            yield Piece("model", number * SIZE, b"x" * SIZE)

    far.start(f.Start(PS, {}, 1))
    far.put(pieces())
    far.start(f.Start(WORKER, {}, 1))
    assert has_begun.wait(30)
    stop_ps, stop_worker = f.Signal(PS, 2), f.Signal(WORKER, 2)
    far.say(stop_worker)
    far.say(stop_ps)
    go.write_text("now\n")
    far.close()
    with heard.open("rb") as stream:
        told = list(iter(lambda: f.read_told(stream), None))
    puts = [place for place, message in enumerate(told) if isinstance(message, f.Put)]
    assert len(puts) == 20 and told.index(stop_ps) < puts[2]
    assert told.index(stop_worker) > told.index(f.Start(WORKER, {}, 1)) > puts[-1], "first it is started"


def test_a_ps_moves_only_to_where_a_port_is_left(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fars, "FarHost", FakeHost)
    far = Far(run, {PS: A, WORKER: B}, {})
    ready = far.open([A, B], {"a": hello(), "b": hello()})
    far._hosts["a"].lose("a is lost.")
    assert far.refusal(PS) == "no other host has room for it"
    ready["b"].spare_ports.append(29500)
    assert far.refusal(PS) == ""
    far.close()


def test_a_run_is_saved_when_its_last_step_is_here(run: Run) -> None:
    append(run.paths.telemetry(PS), "report", task="ps:0", report={"index": 0, "global_step": 20})
    assert not is_saved(run)
    write_step(run.paths.checkpoints, 10)
    assert not is_saved(run)
    write_step(run.paths.checkpoints, 20)
    assert is_saved(run)
