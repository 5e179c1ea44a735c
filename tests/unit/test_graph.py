"""WHAT of a graph runs, and where? Names, scopes, pruning, placement, borders; all refusals before anything runs."""

import pytest

import paceline
from paceline.cluster.devices import Device
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import UsageError
from paceline.ingraph import scope
from paceline.ingraph.graph import Graph
from paceline.ingraph.partition import Def, cut, place, prune

CLUSTER = ClusterSpec({"local": ["a:1", "a:2"]})
LOCAL_0 = Task("local", 0)


@paceline.op
def plus_one(x: int) -> int:
    return x + 1


def defs(*nodes: Def) -> dict[str, Def]:
    return {node.name: node for node in nodes}


# --- building -----------------------------------------------------------------------------------------------------


def test_names_count_as_in_tensorflow() -> None:
    graph = Graph()
    names = [graph.constant(1).name for _ in range(3)]
    assert [*names, graph.constant(2, name="Const").name] == ["Const", "Const_1", "Const_2", "Const_3"]


def test_a_name_that_was_given_is_not_counted_over() -> None:
    graph = Graph()
    graph.constant(1, name="Const_1")
    assert [graph.constant(1).name, graph.constant(1).name] == ["Const", "Const_2"]


def test_an_op_called_in_a_graph_becomes_a_node_of_it() -> None:
    with Graph() as graph:
        node = plus_one(1)
    assert graph.nodes["plus_one"] is node
    assert plus_one(1) == 2, "outside it runs"


def test_an_op_called_with_a_node_becomes_a_node_of_its_graph() -> None:
    graph = Graph()
    node = plus_one(graph.constant(1))
    assert node.graph is graph and [each.name for each in node.inputs] == ["Const"]  # type: ignore[attr-defined]


def test_scopes_merge_and_none_forgets_them() -> None:
    graph = Graph()
    with scope.device("/job:local/task:1"):
        with scope.device("/gpu:0"):
            inner = graph.constant(1)
        with scope.device(None):
            plain = graph.constant(1)
        outer = graph.constant(1)
    assert str(inner.device) == "/job:local/task:1/device:GPU:0"
    assert (str(outer.device), str(plain.device)) == ("/job:local/task:1", "")


def test_control_dependencies_are_kept_apart_from_inputs() -> None:
    graph = Graph()
    first = graph.constant(1)
    with graph.control_dependencies([first]):
        second = graph.constant(2)
    assert second.controls == [first] and second.inputs == []


def test_nodes_of_two_graphs_cannot_be_joined() -> None:
    with pytest.raises(UsageError, match="belongs to another graph"):
        Graph().constant(1) + Graph().constant(2)


def test_a_node_is_no_value() -> None:
    node = Graph().constant(1)
    with pytest.raises(UsageError, match="has no value before a session runs it"):
        bool(node)
    with pytest.raises(UsageError, match="has no value before a session runs it"):
        list(node)


def test_a_scope_around_something_that_is_no_op_is_refused() -> None:
    with (
        pytest.raises(UsageError, match="was an op, so nothing ran there"),
        paceline.device("/cpu:0"),
    ):
        sum([1, 2])


def test_an_error_in_a_scope_is_told_as_what_it_is() -> None:
    with pytest.raises(ZeroDivisionError), paceline.device("/cpu:0"):
        divmod(1, 0)


@pytest.mark.parametrize("name", ["gpu:0", "/tpu:0", "/gpu:-1", "/job:a/job:b"])
def test_a_device_that_nobody_can_read_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        paceline.device(name)


# --- pruning ------------------------------------------------------------------------------------------------------


def test_only_what_the_fetches_need_runs() -> None:
    graph = defs(Def("a", "Op"), Def("b", "Op", ("a",)), Def("c", "Op", ("a",)), Def("d", "Op", (), ("c",)))
    assert prune(graph, ["b"], []) == ["a", "b"]
    assert prune(graph, ["d"], []) == ["a", "c", "d"], "a control input is needed too"
    assert prune(graph, ["b"], ["a"]) == ["b"], "what is fed need not run"
    assert prune(graph, ["a"], ["a"]) == []


def test_a_cycle_is_refused_in_one_sentence() -> None:
    graph = defs(Def("a", "Op", (), ("c",)), Def("b", "Op", ("a",)), Def("c", "Op", ("b",)))
    with pytest.raises(UsageError) as caught:
        prune(graph, ["c"], [])
    assert str(caught.value) == "The graph has a cycle, so no node of it can be first: c needs b needs a needs c."


def test_a_missing_feed_is_refused_and_says_who_needs_it() -> None:
    graph = defs(Def("x", "Placeholder", is_fed_only=True), Def("y", "Op", ("x",)))
    with pytest.raises(UsageError, match=r"Placeholder 'x' has no value and 'y' needs it; give session.run feed_dict"):
        prune(graph, ["y"], [])


def test_an_unknown_fetch_is_refused() -> None:
    with pytest.raises(UsageError, match="no node 'matmul'; did you mean"):
        prune(defs(Def("MatMul", "Op")), ["matmul"], [])


# --- placing ------------------------------------------------------------------------------------------------------


def placed_on(device: str, **options: object) -> str:
    graph = defs(Def("a", "Op", device=Device.parse(device)))
    placed, _ = place(graph, ["a"], LOCAL_0, CLUSTER, {Task("local", 1): 1}, **options)  # type: ignore[arg-type]
    return str(placed["a"])


@pytest.mark.parametrize(
    ("device", "where"),
    [
        ("", "/job:local/replica:0/task:0/device:CPU:0"),
        ("/task:1", "/job:local/replica:0/task:1/device:CPU:0"),
        ("/job:local", "/job:local/replica:0/task:0/device:CPU:0"),
        ("/job:local/task:1/gpu:0", "/job:local/replica:0/task:1/device:GPU:0"),
        ("/job:local/task:1/gpu:1", "/job:local/replica:0/task:1/device:CPU:0"),
        ("/gpu:0", "/job:local/replica:0/task:0/device:CPU:0"),
        ("/cpu:7", "/job:local/replica:0/task:0/device:CPU:0"),
    ],
)
def test_what_nothing_is_said_about_is_filled_in(device: str, where: str) -> None:
    assert placed_on(device) == where


def test_without_soft_placement_a_missing_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Node 'a' is placed on .*GPU:2, which is not there"):
        placed_on("/gpu:2", strict=[LOCAL_0])
    assert placed_on("/task:1/gpu:2", strict=[LOCAL_0]).endswith("task:1/device:CPU:0"), "another task may be soft"


@pytest.mark.parametrize(
    ("device", "sentence"),
    [("/job:lokal", "did you mean 'local'"), ("/job:local/task:2", "no task local:2; job 'local' has 2 tasks")],
)
def test_an_unknown_job_or_task_is_refused_with_what_would_work(device: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        placed_on(device)


# --- cutting ------------------------------------------------------------------------------------------------------


def test_a_value_crosses_once_for_all_who_need_it_there() -> None:
    one, two = Device.parse("/job:local/task:0"), Device.parse("/job:local/task:1")
    graph = defs(Def("a", "Op"), Def("b", "Op", ("a",)), Def("c", "Op", ("a", "b")), Def("d", "Op", (), ("a",)))
    parts = cut(graph, ["a", "b", "c", "d"], {"a": one, "b": two, "c": two, "d": two}, ["c", "d"])
    assert [part.nodes for part in parts] == [["a"], ["b", "c", "d"]]
    assert parts[0].sends == {"a": [two], "^a": [two]}
    assert parts[1].receives == ["a", "^a"] and parts[1].needs["c"] == ["a", "b"]
    assert (parts[0].fetches, parts[1].fetches) == ([], ["c", "d"])


def test_fed_values_go_where_they_are_needed_and_nowhere_else() -> None:
    one, two = Device.parse("/job:local/task:0"), Device.parse("/job:local/task:1")
    graph = defs(Def("x", "Placeholder", is_fed_only=True), Def("b", "Op", ("x",)), Def("c", "Op", (), ("x",)))
    parts = cut(graph, ["b", "c"], {"b": one, "c": two}, ["b", "c"])
    assert [part.feeds for part in parts] == [["x"], []]
    assert parts[1].needs == {"c": []}, "what is fed need not be waited for"
