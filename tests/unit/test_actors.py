"""WHAT does an actor do, without a Ray? Its calls, one after the other and at once, with processes of functions."""

import threading
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL, Signals

import msgspec
import pytest

from paceline.cluster.settings import Settings
from paceline.cluster.spec import Task
from paceline.launchers.children import Children
from paceline.launchers.entry import Program
from paceline.launchers.here import Start
from paceline.launchers.ray import actors
from paceline.launchers.ray.actors import News, Order, TaskActor
from paceline.telemetry.losses import Loss

WORKER = Task("worker", 0)
SECRET = bytes(32)


class FakeProcess:
    """One that runs until it is killed, or told to end."""

    pid = 0

    def __init__(self) -> None:
        self.over = threading.Event()
        self.code = 0

    def end(self, code: int) -> None:
        self.code = code
        self.over.set()

    def wait(self) -> int:
        self.over.wait(60)
        return self.code

    def reap(self) -> None: ...

    def signal(self, number: Signals) -> None:
        self.end(-number)

    def signal_all(self, number: Signals) -> None:
        self.end(-number)

    def status(self) -> str | None:
        return None


class FakeHere:
    """Starts nothing but those."""

    def __init__(self, *_: object) -> None:
        self.children = Children()
        self.started: list[FakeProcess] = []
        self.found: list[Loss] = []

    def start(self, start: Start) -> None:
        self.started.append(FakeProcess())
        self.children.add(start.task, self.started[-1])

    def has_memory(self, task: Task) -> bool:
        return False

    def losses(self) -> list[Loss]:
        found, self.found = self.found, []
        return found


class Machine:
    """An actor that sees nothing of the driver's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.here = FakeHere()
        self.actor = TaskActor()

    def start(self, keys: dict[str, bytes] | None = None) -> int:
        settings = Settings(run_id="r", run_dir=str(self.folder / "runs" / "r"))
        order = Order(
            cluster={"ps": ["10.0.0.1:2222"], "worker": ["10.0.0.1:2223"]},
            task=WORKER,
            incarnation=1,
            settings=settings,
            program=Program(script="train.py"),
            threads="1",
            cwd="/nowhere",
            moves={},
        )
        self.actor.settle(settings.run_dir, str(WORKER), "token")
        return self.actor.start(msgspec.json.encode(order), SECRET, keys or {})

    @property
    def root(self) -> Path:
        (found,) = (self.folder / ".paceline" / "r").iterdir()
        return found


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.chdir(tmp_path)
    made = Machine(tmp_path)
    monkeypatch.setattr(actors, "Here", lambda *_: made.here)
    yield made
    for process in made.here.started:
        process.end(0)


def told(answer: tuple[bytes, object]) -> News:
    return msgspec.json.decode(answer[0], type=News)


def test_a_task_that_is_started_again_while_it_runs_has_one_process(machine: Machine) -> None:
    """As by a driver that could not reach us for long."""
    first = machine.start()
    second = machine.start()
    old, new = machine.here.started
    assert old.code == -SIGKILL and not new.over.is_set()
    assert told(machine.actor.news(first, 0.0, 0)).code == 3  # nobody hears of that one again
    machine.here.found = [Loss(file="a.log", why="full", lost="it is lost")]
    news = told(machine.actor.news(second, 0.0, 0))
    assert news.code is None and [loss.file for loss in news.losses] == ["a.log"]
    assert told(machine.actor.news(second, 0.0, 0)).losses == []
    new.end(5)
    assert told(machine.actor.news(second, 5.0, 0)).code == 5


def test_what_was_lost_on_its_way_is_sent_again(machine: Machine) -> None:
    number = machine.start()
    log = machine.root / "logs" / "worker-0.log"
    log.write_text("one\n")
    lost = machine.actor.news(number, 0.0, 0)
    log.write_text("one\ntwo\n")
    again = machine.actor.news(number, 0.0, 0)
    assert again == lost and again[1] == [("logs/worker-0.log", 0, b"one\n", False)]
    batch = told(again).batch
    more = machine.actor.news(number, 0.0, batch)
    assert more[1] == [("logs/worker-0.log", 4, b"two\n", False)]
    assert machine.actor.rest(batch)[1] == more[1]
    assert machine.actor.rest(told(more).batch)[1] == []


def test_nothing_is_left_where_ray_keeps_its_copy(machine: Machine) -> None:
    machine.start({"certificate.pem": b"c", "key.pem": b"k"})
    key = machine.root / "key.pem"
    assert key.read_bytes() == b"k" and key.stat().st_mode & 0o777 == 0o600
    machine.actor.clear()
    assert not (machine.folder / ".paceline").exists()
