"""`paceline ctl`, what a ps tells while it serves, and how the launcher's view shows it: no sockets, no processes."""

import io
import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from paceline.cli import ctl
from paceline.cli.main import main
from paceline.cluster.discovery import Assignment
from paceline.cluster.membership import Membership
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import ConnectionLost, UsageError, WaitTimeout
from paceline.launchers import live, ticks
from paceline.launchers.ticks import PsTicks
from paceline.modes.spec import ModeSpec
from paceline.telemetry.paths import RunPaths
from paceline.telemetry.records import ModeChange
from paceline.wire import messages as m
from paceline.worker import control, reach
from paceline.worker.control import spec_of, switch_mode

CLUSTER = ClusterSpec({"ps": ["h:1"], "worker": ["h:2", "h:3"]})
ASYNC = ModeSpec(name="async")
Reply = m.Reply | Exception


class FakePs:
    """A ps:0 that answers each kind of question in turn; an exception is raised instead of an answer."""

    def __init__(self) -> None:
        self.answers: dict[type, list[Reply]] = {}
        self.asked: list[m.Request] = []
        self.open = 0

    def connect(self, address: str, lane: str, secret: bytes, role: str) -> "FakeChannel":
        assert (address, secret, role) == ("h:1", b"s" * 32, "operator")
        self.open += 1
        return FakeChannel(self)


class FakeChannel:
    def __init__(self, ps: FakePs) -> None:
        self._ps = ps
        self._last: m.Request | None = None

    def say(self, message: m.Request, bulk: object = ()) -> None:
        self._ps.asked.append(message)
        self._last = message

    def recv_cold(self) -> SimpleNamespace:
        answer = self._ps.answers[type(self._last)].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(tail=m.encode(answer), bulk_bytes=0)

    def ask(self, message: m.Request) -> tuple[Any, None]:
        self.say(message)
        return m.decode(self.recv_cold().tail), None

    def close(self) -> None:
        self._ps.open -= 1


@pytest.fixture
def ps(monkeypatch: pytest.MonkeyPatch) -> FakePs:
    fake = FakePs()
    monkeypatch.setattr(reach, "connect", fake.connect)
    return fake


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder under runs/, as the launcher leaves it."""
    paths = RunPaths(tmp_path / "runs" / "latest")
    paths.create()
    paths.cluster.write_text(json.dumps({**CLUSTER.as_dict(), "tasks": {"ps:0": {"host": "h"}}}))
    paths.write_secret(b"s" * 32)
    monkeypatch.chdir(tmp_path)
    return paths.root


class Clock:
    """Each look at it takes a second."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 1.0
        return self.now_s


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


# --- which mode was meant -----------------------------------------------------------------------------------------


def test_a_spec_says_the_whole_mode() -> None:
    assert spec_of("bounded", staleness=4) == ModeSpec(name="bounded", staleness=4)
    assert spec_of("sync", replicas_to_aggregate=2, grace_ms=5) == ModeSpec(
        name="sync", replicas_to_aggregate=2, grace_ms=5.0
    )
    assert spec_of("local", local_steps=8, outer="async", staleness=None).outer == "async"
    assert str(spec_of("async", staleness_scale=True)) != str(spec_of("async"))


@pytest.mark.parametrize(
    ("name", "numbers", "sentence"),
    [
        ("snyc", {}, "Unknown mode 'snyc'; did you mean 'sync'"),
        ("async", {"staleness": 4}, "--staleness only makes sense with mode bounded, not async"),
        ("sync", {"local_steps": 4}, "--local-steps only makes sense with mode local, not sync"),
        ("bounded", {"outer": "sync"}, "--outer only makes sense with mode local, not bounded"),
        ("sync", {"extra_token": 2}, "no 'extra_token'; did you mean 'extra_tokens'"),
        ("sync", {"replicas_to_aggregate": "2"}, "Expected `int"),
        ("sync", {"grace_ms": "soon"}, "--grace-ms is 'soon'"),
    ],
)
def test_what_no_mode_can_mean_is_refused(name: str, numbers: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        spec_of(name, **numbers)


# --- paceline ctl mode --------------------------------------------------------------------------------------------


def test_ctl_mode_asks_ps_0_and_prints_one_line(ps: FakePs, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bounded = ModeSpec(name="bounded", staleness=4)
    ps.answers[m.SwitchMode] = [m.Switched(ASYNC, bounded, 1234, 3.21)]
    assert call("ctl", "mode", "bounded", "--staleness", "4", "latest") == 0
    assert ps.asked == [m.SwitchMode(bounded, waits=True)]
    said = capsys.readouterr()
    assert said.out == "mode async -> bounded, staleness 4 at global step 1234; workers stood still for 3.2 ms\n"
    assert (said.err, ps.open) == ("", 0)


def test_every_number_of_a_mode_is_a_flag(ps: FakePs, run_dir: Path) -> None:
    ps.answers[m.SwitchMode] = [m.Switched(ASYNC, ASYNC, 1, None)] * 3
    flags = ["--replicas_to_aggregate=3", "--extra-tokens=1", "--grace-ms=20%"]
    assert call("ctl", "mode", "sync", *flags, str(run_dir)) == 0
    assert call("ctl", "mode", "local", "--local-steps=8", "--outer=async", "latest") == 0
    assert call("ctl", "mode", "async", "--staleness-scale", "latest") == 0
    assert [each.spec for each in ps.asked if isinstance(each, m.SwitchMode)] == [
        ModeSpec(name="sync", replicas_to_aggregate=3, extra_tokens=1, grace_share=0.2),
        ModeSpec(name="local", local_steps=8, outer="async"),
        ModeSpec(name="async", staleness_scale=True),
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("snyc latest", "Unknown mode 'snyc'"),
        ("sync --replicas-to-aggregate 0 latest", "--replicas-to-aggregate is 0"),
        ("sync --replicas-to-aggregate 5 --extra-tokens 1 latest", "at most 4 gradients"),
        ("async --replicas-to-aggregate 2 latest", "only makes sense with --mode sync"),
        ("bounded --staleness -1 latest", "--staleness is -1"),
        ("local --local-steps 0 latest", "--local-steps is 0"),
        ("local --outer soon latest", "--outer is 'soon'"),
        ("async --local-steps 3 latest", "--local-steps only makes sense with mode local"),
        ("sync --staleness-scale latest", "--staleness-scale is for async, bounded and local with --outer async"),
        ("sync --wait-s 0 latest", "--wait-s is 0"),
        ("sync nowhere", "No run folder 'nowhere'"),
    ],
)
def test_bad_input_is_one_sentence_and_nobody_is_asked(
    words: str, sentence: str, ps: FakePs, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("ctl", "mode", *words.split()) == 2
    said = capsys.readouterr()
    assert said.out == "" and sentence in said.err and len(said.err.splitlines()) == 1
    assert ps.asked == []


def test_a_finished_run_is_not_asked(ps: FakePs, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "summary.json").write_text("{}")
    for words in (("mode", "sync"), ("show",)):
        assert call("ctl", *words, "latest") == 2
        assert "has ended" in capsys.readouterr().err
    assert ps.asked == []


def test_a_run_that_does_not_answer_may_have_ended(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionLost("nobody listens at h:1")

    monkeypatch.setattr(reach, "connect", refuse)
    assert call("ctl", "mode", "sync", "latest") == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and "does not answer" in said and "nobody listens at h:1" in said


@pytest.mark.parametrize("text", ["", "{oops", "[1]", '{"ps": [7]}'])
def test_a_folder_whose_cluster_cannot_be_read(text: str, ps: FakePs, run_dir: Path) -> None:
    (run_dir / "cluster.json").write_text(text)
    with pytest.raises(UsageError, match="No readable cluster at"):
        switch_mode(run_dir, "sync")


def test_what_ps_0_refuses_is_a_usage_error(ps: FakePs, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ps.answers[m.SwitchMode] = [m.Failed("a run cannot change between local and async")]
    assert call("ctl", "mode", "local", "latest") == 2
    assert capsys.readouterr().err == "paceline: a run cannot change between local and async\n"
    assert ps.open == 0


def test_a_ps_that_ends_while_it_is_asked(ps: FakePs, run_dir: Path) -> None:
    ps.answers[m.SwitchMode] = [ConnectionLost("closed")]
    with pytest.raises(ConnectionLost, match="ps:0 ended while it was asked for mode sync"):
        switch_mode(run_dir, "sync")


def test_whom_it_waits_for_is_said_after_a_while_and_then_every_ten_seconds(
    ps: FakePs, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "time", Clock())
    sync = ModeSpec(name="sync")
    ps.answers[m.SwitchMode] = [*[WaitTimeout()] * 25, m.Switched(ASYNC, sync, 7, 1.0)]
    ps.answers[m.AskStatus] = [m.Status([], [1], 7), m.Status([], [0, 1], 7), ConnectionLost("busy")]
    said: list[str] = []
    assert switch_mode(run_dir, "sync", say=said.append).after == sync
    waits = "Still waiting for response from worker: /job:"
    assert said == [
        f"{waits}worker/replica:0/task:1 (3 s)",
        f"{waits}worker/replica:0/task:0 (13 s)",
        f"{waits}worker/replica:0/task:1 (13 s)",
        f"{waits}ps/replica:0/task:0 (23 s)",
    ]
    assert ps.open == 0


def test_it_gives_up_and_names_whom_it_waited_for(ps: FakePs, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "time", Clock())
    ps.answers[m.SwitchMode] = [WaitTimeout()] * 3
    ps.answers[m.AskStatus] = [m.Status([], [1], 7)]
    with pytest.raises(WaitTimeout, match="within 2 s: ps:0 waits for /job:worker/replica:0/task:1"):
        switch_mode(run_dir, "sync", wait_s=2.0)
    assert ps.open == 0


# --- paceline ctl show --------------------------------------------------------------------------------------------


def test_ctl_show(ps: FakePs, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ps.answers[m.Describe] = [m.Described("r", ModeSpec(name="bounded", staleness=2), "bytes", 1, 77, None)]
    ps.answers[m.AskStatus] = [m.Status([], [], 77, live=[1], lacks=1)]
    assert call("ctl", "show", "latest") == 0
    assert capsys.readouterr().out.splitlines() == [
        "mode: bounded, staleness 2",
        "global step: 77",
        "live workers: worker:1 (1 of 2)",
        "paused: 1 more worker needed",
    ]


def test_a_run_without_workers_shows_none() -> None:
    now = control.Shown(mode=ASYNC, global_step=0, live=[], num_workers=2, lacks=0)
    assert ctl.shown(now)[-1] == "live workers: none (0 of 2)"


# --- what a ps tells while it serves ------------------------------------------------------------------------------


@dataclass
class Notes:
    """A sink that keeps what it is given."""

    events: list[dict[str, Any]] = field(default_factory=list)

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def tick(self, **fields: Any) -> None:
        self.event("tick", **fields)

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] in kinds]


@dataclass
class FakeCore:
    """What PsTicks looks at of a ps."""

    members: Any = field(default_factory=lambda: SimpleNamespace(missing=[], live=[0, 1], gone=[]))
    mode_changes: list[ModeChange] = field(default_factory=list)
    lacking: int = 0
    shard: Any = None
    control: Any = None
    lock: Any = field(default_factory=threading.Lock)
    state: Any = field(
        default_factory=lambda: SimpleNamespace(
            version=0, mode=SimpleNamespace(spec=ASYNC), staleness={}, waited_s={0: 1.23456}
        )
    )

    def __post_init__(self) -> None:
        self.control = self

    def lacks(self) -> int:
        return self.lacking


class PsUnderTest:
    """A PsTicks with its clock, its printed lines and its notes."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, index: int = 0, is_supervised: bool = False, **settings: Any
    ) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(ticks, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        cluster = ClusterSpec({"ps": ["h:1", "h:4"], "worker": ["h:2", "h:3"]})
        chosen = Settings(run_id="r", wait_s=60.0, **settings)
        assignment = Assignment(cluster, Task("ps", index), 1, chosen, b"", "launcher")
        self.core, self.notes, self.said = FakeCore(), Notes(), list[str]()
        self.ticks = PsTicks(assignment, self.notes, self.said.append, is_supervised)  # type: ignore[arg-type]

    def tick(self, after_s: float = 0.25) -> None:
        self.now_s += after_s
        self.ticks.tick(self.core)  # type: ignore[arg-type]


def test_a_tick_a_second_says_mode_staleness_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    ps = PsUnderTest(monkeypatch)
    ps.core.control.state.version = 30
    ps.core.control.state.staleness = {1: Counter({20: 4}), 0: Counter({0: 4})}
    for _ in range(8):
        ps.tick()
    first, second = ps.notes.of("tick")
    assert first == {
        "kind": "tick", "task": "ps:0", "version": 30, "global_step": 30, "updates_per_s": 30.0, "workers": 2,
        "mode": "async", "lacks": 0, "staleness_mean": 10.0, "staleness": {"0": {"0": 4}, "1": {"16+": 4}},
        "waited_s": {"0": 1.235},
    }  # fmt: skip
    assert second["updates_per_s"] == 0.0 and ps.said == []


@pytest.mark.parametrize("index", [0, 1])
def test_a_change_of_mode_is_told_once_by_ps_0_alone(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ps = PsUnderTest(monkeypatch, index, mode="sync")
    ps.tick()
    ps.core.control.mode_changes.append(ModeChange(at_step=7, mode="bounded, staleness 2", pause_ms=3.25))
    ps.core.control.mode_changes.append(ModeChange(at_step=9, mode="async", pause_ms=0.0))
    ps.tick()
    ps.tick()
    told = [
        "mode sync -> bounded, staleness 2 at global step 7; workers stood still for 3.2 ms",
        "mode bounded, staleness 2 -> async at global step 9; workers stood still for 0.0 ms",
    ]
    events = [("ps:0", 7, "bounded, staleness 2", 3.25, told[0]), ("ps:0", 9, "async", 0.0, told[1])]
    assert ps.said == (told if index == 0 else [])
    noted = [(e["task"], e["at_step"], e["mode"], e["pause_ms"], e["text"]) for e in ps.notes.of("mode")]
    assert noted == (events if index == 0 else [])


def test_a_pause_for_want_of_workers_is_told_when_it_begins_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ps = PsUnderTest(monkeypatch, min_workers=2)
    ps.tick()
    ps.core.lacking = 1
    ps.tick(5.0)
    ps.tick(30.0)
    ps.core.lacking = 0
    ps.tick(12.0)
    ps.tick()
    assert ps.said == ["Paused: 1 more worker needed (--min-workers 2)", "Going on: 2 workers are in again, after 42 s"]
    assert [e["text"] for e in ps.notes.of("warning")] == ps.said
    assert ps.notes.of("tick")[0]["lacks"] == 1


def test_a_pause_that_lasts_too_long_ends_the_ps(monkeypatch: pytest.MonkeyPatch) -> None:
    ps = PsUnderTest(monkeypatch, min_workers=2)
    ps.core.lacking = 1
    ps.tick(1000.0)  # the limit counts from when the pause began
    ps.tick(60.0)
    with pytest.raises(WaitTimeout, match=r"gave up after 60 s: 1 more worker needed \(--min-workers 2\)"):
        ps.tick(0.25)


def test_workers_that_never_came_end_the_ps_after_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    ps = PsUnderTest(monkeypatch)
    ps.core.control.members.missing = [1]
    for _ in range(60):
        ps.tick(1.0)
    assert [line.rpartition("(")[2] for line in ps.said] == [f"{s} s)" for s in (1, 10, 20, 30, 40, 50, 60)]
    with pytest.raises(WaitTimeout, match="gave up after 61 s: /job:worker/replica:0/task:1 did not join"):
        ps.tick(1.0)


def test_a_client_of_tasks_that_serve_ops_need_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them ever does, and the run is in good health. Where nobody serves, or somebody waits for those who are
    missing, the limit holds: a worker that stands before its prepare would hold up everybody for ever."""
    ps = PsUnderTest(monkeypatch, is_supervised=True)
    ps.core.control.members = Membership(2)
    ps.core.control.members.stand_aside(1, 1)
    for _ in range(70):
        ps.tick(1.0)
    assert ps.said[-1].endswith("(60 s)"), "it says no more after that"
    ps.core.shard = SimpleNamespace()  # one has joined
    with pytest.raises(WaitTimeout, match="task:0 did not join"):
        ps.tick(1.0)
    ps.core.control.members, ps.core.shard = Membership(2), None
    with pytest.raises(WaitTimeout, match="task:0, /job:worker/replica:0/task:1 did not join"):
        ps.tick(1.0)


@pytest.mark.parametrize("index", [0, 1])
def test_old_gradients_with_momentum_are_warned_of_once_by_ps_0(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ps = PsUnderTest(monkeypatch, index)
    ps.core.control.state.staleness = {0: Counter({9: 200})}
    ps.tick(1.0)  # no shard yet: nobody has joined
    ps.core.shard = SimpleNamespace(optimizer_name="AdamW", options=[{"lr": 0.1}])
    ps.tick(1.0)
    ps.tick(1.0)
    assert [e["text"] for e in ps.notes.of("warning")] == ps.said
    assert [line.partition(":")[0] for line in ps.said] == (
        ["async with AdamW at a mean staleness of 9.0"] if index == 0 else []
    )


# --- how the launcher's view shows it -----------------------------------------------------------------------------


def wrote(paths: RunPaths, task: Task, *records: dict[str, object]) -> None:
    with paths.telemetry(task).open("a") as file:
        file.writelines(json.dumps({"t": 1.0, "task": str(task), **record}) + "\n" for record in records)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    made = RunPaths(tmp_path)
    made.create()
    return made


TICK = {"kind": "tick", "version": 9, "global_step": 9, "mode": "sync"}
WARNING = {"kind": "warning", "text": "async with Adam"}
CHANGE = {"kind": "mode", "text": "mode async -> sync at global step 9", "mode": "sync", "at_step": 9, "pause_ms": 1.0}


def test_plain_lines_print_warnings_and_changes_of_mode_once(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    view = live.PlainLines(CLUSTER, paths)
    wrote(paths, Task("ps", 0), TICK, WARNING, TICK, CHANGE)
    wrote(paths, Task("worker", 1), {"kind": "warning", "text": "mine"}, {"kind": "report", "text": "no"})
    view.update({})
    view.update({})
    wrote(paths, Task("ps", 0), {**WARNING, "text": "the last"})
    view.close()
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("[")]
    assert said == [
        "ps:0: async with Adam",
        "ps:0: mode async -> sync at global step 9",
        "worker:1: mine",
        "ps:0: the last",
    ]


def test_the_table_prints_them_above_itself_and_shows_the_mode(paths: RunPaths) -> None:
    screen = io.StringIO()
    view = live.LiveTable(CLUSTER, paths, Console(file=screen, force_terminal=True, width=120))
    wrote(paths, Task("ps", 0), CHANGE, TICK)
    view.update({})
    view.update({})
    view.close()
    assert screen.getvalue().count("ps:0: mode async -> sync at global step 9") == 1
    assert "sync" in screen.getvalue().split("global step 9")[-1]


def test_a_ps_row_shows_mode_staleness_and_a_pause() -> None:
    tick = live.Tick(version=4, global_step=4, mode="bounded, staleness 2", staleness_mean=0.5, lacks=1)
    assert live.row(Task("ps", 0), tick, None)[-2:] == ("bounded, staleness 2  staleness 0.50", "paused")


def test_places_of_an_elastic_cluster_are_shown_when_taken(paths: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ClusterSpec({"ps": ["h:1"], "worker": [f"h:{port}" for port in range(2, 6)]})
    view = live.PlainLines(cluster, paths, started=2)
    wrote(paths, Task("worker", 3), {"kind": "tick", "step": 5})
    view.update({})
    assert capsys.readouterr().out.rstrip().endswith("worker:0 starting | worker:1 starting | worker:3 step 5 (0/s)")


def test_who_goes_away_and_comes_back_is_in_the_log_of_ps_0(monkeypatch: pytest.MonkeyPatch) -> None:
    ps = PsUnderTest(monkeypatch)
    ps.tick()
    ps.core.control.members.gone, ps.core.control.members.live = [1], [0]
    ps.tick()
    ps.tick()
    ps.core.control.members.gone, ps.core.control.members.live = [], [0, 1]
    ps.tick()
    assert [line for line in ps.said if "worker:1" in line] == [
        "worker:1 is gone: its connection ended, or it was silent; 1 live",
        "worker:1 is back; 2 live",
    ]
