"""HOW does the driver hear of its actors? A Ray of functions: what an actor says, that it dies, that it comes later."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGKILL, SIGTERM
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from small_checkpoint import write_step

from paceline.checkpoint.manifest import folder_name
from paceline.cluster.discovery import Assignment
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import CheckpointError, ClusterError
from paceline.launchers.children import Arrived, Exited
from paceline.launchers.crew import Run
from paceline.launchers.entry import Program
from paceline.launchers.here import Start
from paceline.launchers.ray import team as team_module
from paceline.launchers.ray.actors import News, Order, Place, torch_version
from paceline.launchers.ray.member import Member
from paceline.launchers.ray.team import Away, Team
from paceline.telemetry.paths import RunPaths
from paceline.version import VERSION

PS, WORKER = Task("ps", 0), Task("worker", 0)
SECRET = bytes(range(32))


class RayError(Exception): ...


class RayActorError(RayError): ...


class ActorUnavailableError(RayActorError): ...


class GetTimeoutError(RayError): ...


EXCEPTIONS = SimpleNamespace(
    RayError=RayError,
    RayActorError=RayActorError,
    ActorUnavailableError=ActorUnavailableError,
    GetTimeoutError=GetTimeoutError,
)
FAKE_RAY = SimpleNamespace(get=lambda ref, timeout=None: ref(), exceptions=EXCEPTIONS)


class FakeActor:
    """What launchers/ray/actors would answer; `told` is its next news, and an exception there is raised."""

    def __init__(self, life: str = "first", port: int = 2222, is_shared: bool = True) -> None:
        self.life, self.port, self.is_shared = life, port, is_shared
        self.version, self.torch = VERSION, torch_version()
        self.told: list[Any] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.has_room = threading.Event()
        self.has_room.set()

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Callable[[], Any]:
            self.calls.append((name, args))
            return lambda: getattr(self, f"do_{name}")(*args)

        return SimpleNamespace(remote=remote)

    def do_place(self, host: str, port: int) -> bytes:
        self.has_room.wait(10)
        versions = {"version": self.version, "torch": self.torch}
        return msgspec.json.encode(
            Place(host="10.0.0.1", port=self.port, machine="m", life=self.life, cards="", **versions)
        )

    def do_settle(self, *_: str) -> bool:
        return self.is_shared

    def do_start(self, order: bytes, secret: bytes, keys: object) -> int:
        return 1

    def do_news(self, number: int, wait_s: float, seen: int) -> Any:
        news = self.told.pop(0)
        if isinstance(news, Exception):
            raise news
        return news

    def do_send(self, *_: object) -> None: ...

    def do_rest(self, seen: int) -> Any:
        rest = self.told.pop(0)
        if isinstance(rest, Exception):
            raise rest
        return rest

    def do_clear(self) -> None: ...

    def do_keep(self, pieces: object) -> None: ...

    def called(self, name: str) -> list[tuple[Any, ...]]:
        return [args for each, args in self.calls if each == name]


def news(code: int | None, *pieces: tuple[str, int, bytes, bool], has_memory: bool = False, batch: int = 0) -> Any:
    return msgspec.json.encode(News(code, has_memory, batch)), list(pieces)


class Staff:
    """A team of one ps and one worker in a run folder."""

    def __init__(self, folder: Path, is_later: bool = False, **actor: Any) -> None:
        cluster = ClusterSpec({"ps": ["10.0.0.1:2222"], "worker": ["10.0.0.1:2223"]})
        self.settings = Settings(run_id="r", run_dir=str(folder), wait_s=1.0)
        self.paths = RunPaths(folder)
        self.paths.create()
        program = Program(script="train.py")
        self.run = Run(program=program, cluster=cluster, settings=self.settings, paths=self.paths, threads="1")
        self.ps, self.worker = FakeActor(**actor), FakeActor(port=2223, is_shared=False)
        if is_later:
            self.worker.has_room.clear()
        self.members = {PS: Member(PS, self.ps), WORKER: Member(WORKER, self.worker, is_later)}
        self.team = Team(FAKE_RAY, self.run, self.members, Away(program=program, token="t"))

    def start(self, task: Task, incarnation: int = 1) -> None:
        assignment = Assignment(self.run.cluster, task, incarnation, self.settings, SECRET, "launcher")
        self.team.start(Start(assignment, None if task == PS else self.run.program, self.paths.logs(task)))


@pytest.fixture
def staff(tmp_path: Path) -> Iterator[Staff]:
    yield Staff(tmp_path)


def test_a_task_is_started_and_its_end_comes_after_all_that_it_wrote(staff: Staff) -> None:
    staff.worker.told = [
        news(None, ("logs/worker-0.log", 0, b"one\n", False)),
        news(0, ("logs/worker-0.log", 4, b"two\n", False)),
        news(0),
    ]
    staff.start(WORKER)
    assert staff.team.children.next_event(5.0) == Exited(WORKER, 0)
    assert staff.paths.logs(WORKER).read_bytes() == b"one\ntwo\n"
    ((order, secret, keys),) = staff.worker.called("start")
    assert SECRET.hex().encode() not in order and secret == SECRET and keys == {}
    assert msgspec.json.decode(order, type=Order).task == WORKER


def test_an_actor_that_is_another_one_now_has_lost_its_task(staff: Staff) -> None:
    staff.ps.told = [news(None, has_memory=True), RayActorError("gone")]
    original = staff.ps.do_news

    def do_news(number: int, wait_s: float, seen: int) -> Any:
        if isinstance(staff.ps.told[0], Exception):
            staff.ps.life = "second"
        return original(number, wait_s, seen)

    staff.ps.do_news = do_news  # type: ignore[method-assign]
    staff.start(PS)
    assert staff.team.children.next_event(5.0) == Exited(PS, -SIGKILL)
    assert "its Ray actor is gone" in staff.paths.logs(PS).read_text() and not staff.team.has_memory(PS)


def test_one_that_was_only_out_of_reach_goes_on(staff: Staff) -> None:
    staff.ps.told = [news(None), ActorUnavailableError("try again"), GetTimeoutError(), news(7)]
    staff.start(PS)
    assert staff.team.children.next_event(5.0) == Exited(PS, 7)


def test_a_link_that_is_down_for_a_while_costs_no_task(staff: Staff) -> None:
    staff.ps.told = [news(None), ActorUnavailableError("no link"), news(7)]
    place, calls = staff.ps.do_place, []

    def do_place(host: str, port: int) -> bytes:
        calls.append(port)
        if len(calls) in (2, 3):
            raise ActorUnavailableError("no link")
        return place(host, port)

    staff.ps.do_place = do_place  # type: ignore[method-assign]
    staff.start(PS)
    assert staff.team.children.next_event(5.0) == Exited(PS, 7)
    assert len(staff.ps.called("start")) == 1


def test_news_that_take_long_are_waited_for_and_not_asked_for_twice(staff: Staff) -> None:
    staff.worker.told = [
        GetTimeoutError(),
        news(None, ("logs/worker-0.log", 0, b"one\n", False), batch=1),
        ActorUnavailableError("no link"),
        news(0, batch=1),
    ]
    staff.start(WORKER)
    assert staff.team.children.next_event(5.0) == Exited(WORKER, 0)
    assert [seen for _, _, seen in staff.worker.called("news")] == [0, 1, 1]


def test_an_actor_that_was_given_up_and_is_still_the_same_is_no_new_one(
    staff: Staff, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its files, and its ps is where it was."""
    monkeypatch.setattr(team_module, "REACH_S", 0.0)
    staff.paths.telemetry(WORKER).write_text("told\n")
    staff.worker.told = [ActorUnavailableError("no link"), news(0)]
    place, calls = staff.worker.do_place, []

    def do_place(host: str, port: int) -> bytes:
        calls.append(port)
        if len(calls) == 2:
            raise ActorUnavailableError("no link")
        return place(host, port)

    staff.worker.do_place = do_place  # type: ignore[method-assign]
    staff.start(WORKER)
    assert staff.team.children.next_event(5.0) == Exited(WORKER, -SIGKILL)
    brought = len(staff.worker.called("keep"))
    staff.start(WORKER, incarnation=2)
    assert staff.team.children.next_event(5.0) == Exited(WORKER, 0)
    assert len(staff.worker.called("keep")) == brought == 1


def test_a_ps_that_ray_has_put_elsewhere_is_told_to_all(tmp_path: Path) -> None:
    staff = Staff(tmp_path, port=4444)
    staff.members[WORKER].place = msgspec.json.decode(staff.worker.do_place("", 0), type=Place)
    staff.members[WORKER].is_shared = False
    staff.ps.told = [news(0)]
    staff.start(PS, incarnation=2)
    assert staff.team.children.next_event(5.0) == Exited(PS, 0)
    assert msgspec.json.decode((tmp_path / "moved.json").read_bytes()) == {"ps:0": "10.0.0.1:4444"}
    assert staff.worker.called("move") == [({"ps:0": "10.0.0.1:4444"},)]
    assert msgspec.json.decode(staff.ps.called("start")[0][0], type=Order).moves == {"ps:0": "10.0.0.1:4444"}


def test_a_worker_that_may_come_later_is_no_task_before_there_is_room(tmp_path: Path) -> None:
    staff = Staff(tmp_path, is_later=True)
    assert staff.team.children.running() == [] and staff.team.children.next_event(0.0) is None
    staff.worker.has_room.set()
    assert staff.team.children.next_event(5.0) == Arrived(WORKER)
    staff.worker.told = [news(0)]
    staff.start(WORKER)
    assert staff.team.children.next_event(5.0) == Exited(WORKER, 0)


def test_a_new_worker_gets_the_newest_checkpoint_its_manifest_last(staff: Staff) -> None:
    write_step(staff.paths.checkpoints, 10)
    staff.worker.told = [news(0)]
    staff.start(WORKER)
    assert staff.team.children.next_event(5.0) == Exited(WORKER, 0)
    brought = [piece for (pieces,) in staff.worker.called("keep") for piece in pieces]
    folder = f"checkpoints/{folder_name(10)}"
    assert {Path(path).parent.as_posix() for path, *_ in brought} == {folder}
    assert (brought[-1][0], brought[-1][3]) == (f"{folder}/MANIFEST.json", True)


def test_one_checkpoint_is_sent_once_though_a_ps_and_the_worker_itself_ask_for_it(staff: Staff) -> None:
    """Two who send it at once would write one draft there."""
    write_step(staff.paths.checkpoints, 10)
    has_settled = threading.Event()

    def do_settle(*_: str) -> bool:
        has_settled.set()
        return True

    def do_keep(pieces: object) -> None:
        if len(staff.worker.called("keep")) == 1:
            staff.start(PS)  # in the middle of what the worker's own start sends
            assert has_settled.wait(5)

    staff.ps.do_settle, staff.worker.do_keep = do_settle, do_keep  # type: ignore[method-assign]
    staff.ps.told, staff.worker.told = [news(0)], [news(0)]
    staff.start(WORKER)
    ended = {staff.team.children.next_event(5.0), staff.team.children.next_event(5.0)}
    assert ended == {Exited(PS, 0), Exited(WORKER, 0)}
    sent = [(path, offset) for (pieces,) in staff.worker.called("keep") for path, offset, *_ in pieces]
    assert len(sent) == len(set(sent)) > 1


@pytest.mark.parametrize("error", [GetTimeoutError(), RayError("OSError: No space left on device")])
def test_a_worker_that_does_not_take_the_checkpoint_keeps_no_ps_from_its_start(staff: Staff, error: Exception) -> None:
    def do_keep(pieces: object) -> None:
        raise error

    write_step(staff.paths.checkpoints, 10)
    staff.members[WORKER].place = msgspec.json.decode(staff.worker.do_place("", 0), type=Place)
    staff.members[WORKER].is_there, staff.members[WORKER].is_shared = True, False
    staff.worker.do_keep = do_keep  # type: ignore[method-assign]
    staff.ps.told = [news(0)]
    staff.start(PS)
    assert staff.team.children.next_event(5.0) == Exited(PS, 0)
    assert staff.worker.called("keep")


def test_who_is_asked_to_end_before_it_began_never_begins(staff: Staff) -> None:
    staff.ps.has_room.clear()
    staff.start(PS)
    staff.team.children.send([PS], SIGTERM)
    staff.ps.has_room.set()
    assert staff.team.children.next_event(5.0) == Exited(PS, -SIGKILL)
    assert staff.ps.called("start") == []


def test_what_ray_refuses_ends_the_task_with_its_reason(staff: Staff) -> None:
    def dead(host: str, port: int) -> bytes:
        raise RayActorError("The actor died for good.\nmore")

    staff.ps.do_place = dead  # type: ignore[method-assign]
    staff.start(PS)
    assert staff.team.children.next_event(5.0) == Exited(PS, 3)
    assert "could not go on: The actor died for good." in staff.paths.logs(PS).read_text()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), CheckpointError("it cannot be removed.")])
def test_a_file_that_cannot_be_kept_is_told_once_and_costs_no_task(
    staff: Staff, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def keep(root: Path, piece: object, sender: str) -> None:
        raise error

    monkeypatch.setattr(team_module, "keep", keep)
    piece = ("logs/worker-0.log", 0, b"one\n", False)
    staff.worker.told = [news(None, piece), news(None, piece), news(0)]
    staff.start(WORKER)
    assert staff.team.children.next_event(5.0) == Exited(WORKER, 0)
    assert capsys.readouterr().err.count("logs/worker-0.log could not be kept") == 1


def test_a_task_that_nobody_can_watch_any_more_is_killed(staff: Staff) -> None:
    staff.ps.told = [news(None), RayError("no answer can be read")]
    staff.start(PS)
    assert staff.team.children.next_event(5.0) == Exited(PS, 3)
    assert staff.ps.called("send") == [(SIGKILL, True)]


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_actor_clears_its_folder_when_all_of_it_has_come(staff: Staff, is_whole: bool) -> None:
    staff.worker.told = [news(0), (1, [("logs/worker-0.log", 0, b"one\n", False)])]
    staff.worker.told.append((1, []) if is_whole else GetTimeoutError())
    staff.start(WORKER)
    assert staff.team.children.next_event(5.0) == Exited(WORKER, 0)
    staff.team.close()
    assert staff.paths.logs(WORKER).read_text() == "one\n"
    assert [seen for (seen,) in staff.worker.called("rest")] == [0, 1]
    assert bool(staff.worker.called("clear")) == is_whole


def test_an_actor_on_a_machine_with_another_paceline_starts_nothing(
    staff: Staff, capsys: pytest.CaptureFixture[str]
) -> None:
    staff.ps.version, staff.ps.torch = "0.0.1", "1.0"
    staff.start(PS)
    assert staff.team.children.next_event(5.0) == Exited(PS, 3)
    assert "m has paceline 0.0.1, and this is" in staff.paths.logs(PS).read_text()
    assert staff.ps.called("start") == []


def test_one_with_another_paceline_cannot_join(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    staff = Staff(tmp_path, is_later=True)
    staff.worker.version = "0.0.1"
    staff.worker.has_room.set()
    for thread in [each for each in threading.enumerate() if each.name == "expect-worker:0"]:
        thread.join(5.0)
    assert "worker:0 cannot join: m has paceline 0.0.1" in capfd.readouterr().err
    assert staff.team.children.next_event(0.0) is None


def test_one_that_can_never_join_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def failing(*_: object) -> bool:
        raise RayActorError("ray::TaskActor.__init__()\nModuleNotFoundError: No module named 'paceline'")

    staff = Staff(tmp_path, is_later=True)
    staff.worker.do_settle = failing  # type: ignore[method-assign]
    staff.worker.has_room.set()
    for thread in [each for each in threading.enumerate() if each.name == "expect-worker:0"]:
        thread.join(5.0)
    assert "worker:0 cannot join: paceline is not installed on that machine" in capfd.readouterr().err


def test_another_torch_is_a_note(staff: Staff, capsys: pytest.CaptureFixture[str]) -> None:
    staff.ps.torch = staff.worker.torch = "1.0"
    for task in (PS, WORKER):
        actor = staff.ps if task == PS else staff.worker
        actor.told = [news(0)]
        staff.start(task)
        assert staff.team.children.next_event(5.0) == Exited(task, 0)
    assert capsys.readouterr().out.count("Note: m has torch 1.0, and this machine") == 1


def test_what_ray_says_before_the_first_start_is_a_sentence(staff: Staff) -> None:
    def failing(*_: str) -> bool:
        raise RayError("ray::TaskActor.settle()\nOSError: [Errno 30] Read-only file system")

    staff.members[PS].place = msgspec.json.decode(staff.ps.do_place("", 0), type=Place)
    staff.ps.do_settle = failing  # type: ignore[method-assign]
    with pytest.raises(ClusterError, match=r"could not be made ready: OSError: .* Read-only file system$"):
        staff.team.settle_all()
