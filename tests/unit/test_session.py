"""HOW does a session run a graph? Fetches, feeds, two tasks at the same time, and every way a step can fail."""

import threading

import numpy as np
import pytest
import torch
from op_servers import Serving, double, fails, meet, returns_a_set, serving, where

import paceline
from paceline.cluster.pinning import GpuUse
from paceline.errors import ConnectionLost, PacelineError, RemoteOpError, UsageError, WaitTimeout
from paceline.frameworks.torch import devices as torch_devices
from paceline.ingraph import parts
from paceline.ingraph.graph import Graph, Node
from paceline.ingraph.session import Session

__all__ = ["serving"]
TASK_0, TASK_1 = "/job:worker/task:0", "/job:worker/task:1"


def node(value: object) -> Node:
    """What an op returns in a graph, to the type checker's surprise."""
    assert isinstance(value, Node)
    return value


# --- in this process ------------------------------------------------------------------------------------------------


def test_fetches_come_back_in_their_own_nesting() -> None:
    graph = Graph()
    a, b = graph.constant(1), graph.constant(2)
    with Session(graph=graph) as session:
        assert session.run([a, {"b": (b, a)}, a + b]) == [1, {"b": (2, 1)}, 3]
        assert session.run(a) == 1 and session.run("Const_1") == 2 and session.run("Const_1:0") == 2


def test_tensors_come_back_as_arrays() -> None:
    graph = Graph()
    with Session(graph=graph) as session:
        came = session.run([graph.constant(torch.ones(2, 3)), graph.constant(torch.tensor(2.5)), graph.constant(b"x")])
        assert type(came[0]) is np.ndarray and came[0].dtype == np.float32 and came[0].shape == (2, 3)
        assert isinstance(came[1], np.float32) and came[1] == 2.5 and came[2] == b"x"
        half = session.run(graph.constant(torch.ones(2, dtype=torch.bfloat16)))
        assert isinstance(half, torch.Tensor) and half.dtype == torch.bfloat16, "numpy has no such type"


def test_any_node_may_be_fed() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    y = x + 1
    with Session(graph=graph) as session:
        assert session.run(y, {x: 1}) == 2 and session.run(y, {"x": 5}) == 6
        assert session.run(y, {y: 9}) == 9
        assert session.run([x, y], feed_dict={x: 0}) == [0, 1]


def test_only_what_is_needed_runs() -> None:
    graph = Graph()
    ran.clear()
    with graph:
        wanted = node(noted("wanted"))
        noted("not wanted")
    with Session(graph=graph) as session:
        session.run([wanted, wanted])
    assert ran == ["wanted"]


ran: list[str] = []


@paceline.op
def noted(text: str) -> str:
    ran.append(text)
    return text


def test_control_inputs_are_waited_for() -> None:
    graph = Graph()
    ran.clear()
    with graph:
        last = node(noted("last"))
        first = node(noted("first"))
    graph.add_control(first, last)
    with Session(graph=graph) as session:
        session.run(last)
    assert ran == ["first", "last"]


def test_a_graph_grows_between_runs() -> None:
    graph = Graph()
    a = graph.constant(1)
    with Session(graph=graph) as session:
        assert session.run(a) == 1
        b = a + 1
        assert session.run(b) == 2
        graph.add_control(b, a)
        with pytest.raises(UsageError) as caught:
            session.run(b)
    assert str(caught.value) == "The graph has a cycle, so no node of it can be first: Add needs Const needs Add."


def test_an_input_that_the_graph_does_not_have_is_refused() -> None:
    graph = Graph()
    total = graph.constant(1) + graph.constant(2)
    del graph.nodes["Const_1"]
    with Session(graph=graph) as session, pytest.raises(UsageError) as caught:
        session.run(total)
    assert str(caught.value).startswith("Node 'Add' needs 'Const_1', which the graph does not have; did you mean")


@pytest.mark.parametrize(
    ("fetch", "sentence"),
    [(3, "3 is no node"), (None, "None is no node"), ("missing", "no node 'missing'"), (torch.ones(1), "is no node")],
)
def test_what_is_no_node_is_refused(fetch: object, sentence: str) -> None:
    graph = Graph()
    graph.constant(1)
    with Session(graph=graph) as session, pytest.raises(UsageError, match=sentence):
        session.run(fetch)


@pytest.mark.parametrize("feeds", [[1], 1, "x"])
def test_feeds_that_are_no_dict_are_refused(feeds: object) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    with (
        Session(graph=graph) as session,
        pytest.raises(UsageError, match="feed_dict is a dict of nodes and values, not"),
    ):
        session.run(x, feeds)  # type: ignore[arg-type]


def test_a_session_at_a_server_that_this_process_has_stopped_is_one_sentence(serving: Serving) -> None:
    """Nobody else will start it again: there is nothing to wait for."""
    serving.start(0, 1)
    session = Session(serving.target(0), Graph())
    serving.servers[0].stop()
    with session, pytest.raises(UsageError, match=r"task:0 was stopped by this program"):
        session.graph = Graph()
        session.run(session.graph.constant(1))
    with pytest.raises(UsageError, match=r"task:0 was stopped by this program"):
        Session(serving.target(0), Graph())
    serving.start(0)
    with Session(serving.target(0), graph := Graph()) as session:
        assert session.run(graph.constant(1)) == 1, "started again"


def test_a_missing_feed_is_refused_before_anything_runs() -> None:
    graph = Graph()
    ran.clear()
    with graph:
        x = graph.placeholder("x")
        both = [node(noted("ran")), x + 1]
    with Session(graph=graph) as session, pytest.raises(UsageError, match="Placeholder 'x' has no value"):
        session.run(both)
    assert ran == []


def test_an_error_names_its_node_and_its_task() -> None:
    graph = Graph()
    with graph:
        bad = node(fails("broken"))
    with Session(graph=graph) as session, pytest.raises(RemoteOpError) as caught:
        session.run(bad)
    told = str(caught.value)
    assert "Node 'fails' (op_servers:fails) failed on /job:localhost/replica:0/task:0: ValueError: broken" in told
    assert "raise ValueError(message)" in told


def test_an_error_in_plain_arithmetic_names_the_node_only() -> None:
    graph = Graph()
    bad = graph.constant(1) + graph.constant("a")
    with Session(graph=graph) as session, pytest.raises(RemoteOpError, match=r"^Node 'Add' failed on /job:localhost"):
        session.run(bad)


@paceline.op
def leaves() -> None:
    raise SystemExit("as argparse does")


@pytest.mark.parametrize("device", ["/cpu:0", "/cpu:1"])
def test_an_op_that_would_end_the_process_ends_the_step(device: str) -> None:
    """On the thread that runs the step, and on that of a second device: nobody waits for it for ever."""
    graph = Graph()
    with graph:
        first = node(double(torch.ones(2)))
        with paceline.device(device):
            bad = node(leaves())
    with Session(graph=graph) as session, pytest.raises(RemoteOpError, match="SystemExit: as argparse does"):
        session.run([first, bad])


def test_a_job_elsewhere_needs_a_target() -> None:
    graph = Graph()
    with graph, paceline.device(TASK_1):
        far = node(where())
    with Session(graph=graph) as session, pytest.raises(UsageError, match=r"no job 'worker'; valid: localhost"):
        session.run(far)


def test_without_soft_placement_a_missing_gpu_is_refused() -> None:
    graph = Graph()
    with graph, paceline.device("/gpu:17"):
        far = node(where())
    config = paceline.ConfigProto(allow_soft_placement=False)
    with Session(graph=graph, config=config) as session, pytest.raises(UsageError, match="GPU:17, which is not there"):
        session.run(far)
    torch_devices.configure(GpuUse())


def test_placements_are_logged_once(capfd: pytest.CaptureFixture[str]) -> None:
    graph = Graph()
    total = graph.constant(1) + graph.constant(2)
    with Session(graph=graph, config=paceline.ConfigProto(log_device_placement=True)) as session:
        session.run(total)
        session.run(total)
    lines = [line for line in capfd.readouterr().out.splitlines() if "(" in line]
    assert lines == [
        f"{name}: ({kind}): /job:localhost/replica:0/task:0/device:CPU:0"
        for name, kind in (("Const", "Const"), ("Const_1", "Const"), ("Add", "Add"))
    ]


def test_a_closed_session_runs_nothing() -> None:
    session = Session()
    session.close()
    with pytest.raises(UsageError, match="is closed"):
        session.run([])


@pytest.mark.parametrize("target", ["grpc://localhost:2222", "localhost:2222", 3])
def test_a_target_that_is_none_is_refused(target: object) -> None:
    with pytest.raises(UsageError, match="A session's target is like paceline://localhost:2222"):
        Session(target)  # type: ignore[arg-type]


def test_an_unreachable_target_is_one_sentence(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paceline.ingraph.neighbours, "_latest", [])
    monkeypatch.setattr("sys.argv", ["script.py", "--wait-s=0.2"])
    with pytest.raises(WaitTimeout, match=r"gave up after [\d.]+ s: paceline://127.0.0.1:\d+ at .* did not answer"):
        Session(serving.target(0))


# --- on two tasks ---------------------------------------------------------------------------------------------------


def test_nodes_run_where_they_were_placed_and_unplaced_ones_on_task_0(serving: Serving) -> None:
    serving.start(0, 1)
    graph = Graph()
    with graph:
        unplaced = node(where())
        with paceline.device(TASK_1):
            placed = node(where())
        with paceline.device("/task:1"):
            in_the_masters_job = node(where())
    for master in (0, 1):
        with Session(serving.target(master), graph) as session:
            assert session.run([unplaced, placed, in_the_masters_job]) == [
                f"/job:worker/replica:0/task:{index}" for index in (0, 1, 1)
            ]


def test_independent_nodes_on_two_tasks_run_at_the_same_time(serving: Serving) -> None:
    serving.start(0, 1)
    graph = Graph()
    with graph:
        with paceline.device(TASK_0):
            one = node(meet("one"))
        with paceline.device(TASK_1):
            two = node(meet("two"))
    with Session(serving.target(0), graph) as session:
        assert session.run([one, two]) == ["one", "two"], "each waits until the other one is running"


def test_values_cross_between_tasks(serving: Serving) -> None:
    serving.start(0, 1)
    graph = Graph()
    with graph:
        x = graph.placeholder("x")
        value: Node = x
        for hop in range(6):
            with paceline.device(f"/job:worker/task:{hop % 2}"):
                value = node(double(value))
    tensor = torch.randn(50, 50)
    with Session(serving.target(1), graph) as session:
        assert np.array_equal(session.run(value, {x: tensor}), (tensor * 64).numpy())


def test_the_master_says_what_it_does(serving: Serving, capfd: pytest.CaptureFixture[str]) -> None:
    serving.start(0, 1)
    graph = Graph()
    with graph, paceline.device(TASK_1):
        graph.constant(b"hello")
    config = paceline.ConfigProto(log_device_placement=True)
    with Session(serving.target(0), graph, config) as session:
        assert session.run("Const") == b"hello"
    said = capfd.readouterr().out
    assert "Start master session " in said and " with config: log_device_placement: true" in said
    assert "Const: (Const): /job:worker/replica:0/task:1/device:CPU:0" in said


def test_a_session_waits_for_every_task(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    serving.start(0)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("Still waiting"):
            serving.start(1)

    monkeypatch.setattr(paceline.ingraph.neighbours, "say", say)
    with Session(serving.target(0), Graph()):
        pass
    assert said[0] == "Still waiting for response from worker: /job:worker/replica:0/task:1 (0 s)"


def test_an_error_far_away_ends_the_step_for_all(serving: Serving) -> None:
    serving.start(0, 1)
    graph = Graph()
    with graph:
        with paceline.device(TASK_1):
            bad = node(fails("far"))
        with paceline.device(TASK_0):
            waits = node(double(bad))
    with Session(serving.target(0), graph) as session:
        with pytest.raises(
            RemoteOpError, match=r"Node 'fails' .* failed on /job:worker/replica:0/task:1: ValueError: far"
        ):
            session.run(waits)
        with graph:
            fine = node(where())
        assert session.run(fine).endswith("task:0"), "the session goes on"


def test_an_op_that_one_task_does_not_have_ends_the_step(serving: Serving) -> None:
    serving.start(0, 1)
    graph = Graph()
    with paceline.device(TASK_1):
        graph.add("square", "work:square", (1,), {})
    told = "'work:square' is not registered on /job:worker/replica:0/task:1"
    with Session(serving.target(0), graph) as session, pytest.raises(UsageError, match=told):
        session.run("square")


def test_a_task_that_ends_in_a_step_is_named_and_the_others_stop_waiting(serving: Serving) -> None:
    serving.start(0, 1)
    graph = Graph()
    with graph:
        with paceline.device(TASK_1):
            lost = node(hangs())
        with paceline.device(TASK_0):
            waits = node(double(lost))
    error: list[BaseException] = []
    session = Session(serving.target(0), graph)

    def run() -> None:
        try:
            session.run(waits)
        except BaseException as raised:
            error.append(raised)

    thread = threading.Thread(target=run)
    thread.start()
    assert began.wait(10)
    serving.servers[1]._acceptor.shut()
    thread.join(15)
    goes_on.set()
    assert isinstance(error[0], ConnectionLost) and "/job:worker/replica:0/task:1" in str(error[0])
    assert "went away while it ran node 'hangs'" in str(error[0]), "in the program's words"
    session.close()


began, goes_on = threading.Event(), threading.Event()


@paceline.op
def hangs() -> None:
    began.set()
    goes_on.wait(20)


def test_a_step_whose_master_is_gone_is_given_up(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LOOK_S", 0.05)
    serving.start(0)
    work = parts.Work("/job:worker/replica:0/task:0/device:CPU:0", [], {"a": ["never"]}, {}, {}, [])
    with pytest.raises(PacelineError, match="the master went away while never was waited for"):
        serving.servers[0]._parts.run("step", [work], is_wanted=lambda: False)


def test_values_of_a_step_that_never_came_are_not_kept_for_ever(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "MAX_EARLY", 3)
    serving.start(0)
    for number in range(10):
        serving.servers[0]._parts.deliver(f"step {number}", "/cpu:0", "x", 1)
    assert list(serving.servers[0]._parts._steps) == ["step 7", "step 8", "step 9"]
    for number in range(10):
        serving.servers[0]._parts.abort(f"another {number}", "its master says so")
    assert list(serving.servers[0]._parts._steps) == ["another 7", "another 8", "another 9"]


def test_many_steps_at_once_do_not_mix(serving: Serving) -> None:
    serving.start(0, 1)
    graph = Graph()
    with graph:
        x = graph.placeholder("x")
        with paceline.device(TASK_1):
            y = node(double(x))
        with paceline.device(TASK_0):
            z = node(double(y))
    came: dict[int, object] = {}
    with Session(serving.target(0), graph) as session:
        threads = [threading.Thread(target=lambda n=n: came.__setitem__(n, session.run(z, {x: n}))) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert came == {n: 4 * n for n in range(8)}


def test_what_cannot_be_fetched_is_told_without_words_of_ours(serving: Serving) -> None:
    serving.start(0, 1)
    graph = Graph()
    with graph, paceline.device(TASK_1):
        bad = node(returns_a_set())
    with (
        Session(serving.target(0), graph) as session,
        pytest.raises(UsageError, match=r"^What was computed on .*task:1: .*a set cannot travel there") as caught,
    ):
        session.run(bad)
    assert "run_parts" not in str(caught.value)
