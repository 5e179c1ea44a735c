"""DO TensorFlow's names mean what they meant? Constants, placeholders, flags; the documents' programs run elsewhere."""

import sys

import numpy as np
import pytest
import torch

import paceline.tf1 as tf
from paceline.errors import UsageError
from paceline.ingraph import app_flags


@pytest.fixture(autouse=True)
def fresh_graph() -> None:
    tf.reset_default_graph()


def run(node: tf.Node, **feeds: object) -> object:
    with tf.Session() as session:
        return session.run(node, feeds)


def test_the_matrix_of_document_001() -> None:
    products = []
    for device in ("/device:GPU:2", "/device:GPU:3"):
        with tf.device(device):
            a = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[2, 3])
            b = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[3, 2])
            products.append(tf.matmul(a, b))
    with tf.device("/cpu:0"):
        total = tf.add_n(products)
    came = run(total)
    assert isinstance(came, np.ndarray) and came.dtype == np.float32
    assert came.tolist() == [[44.0, 56.0], [98.0, 128.0]]
    assert list(tf.get_default_graph().nodes) == [
        "Const",
        "Const_1",
        "MatMul",
        "Const_2",
        "Const_3",
        "MatMul_1",
        "AddN",
    ]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (1, "int32"),
        (1.0, "float32"),
        (True, "bool"),
        ([1, 2.5], "float32"),
        (np.float64(1), "float64"),
        (np.arange(3), "int64"),
        (torch.ones(2, dtype=torch.bfloat16), "bfloat16"),
        ("text", "string"),
        (b"text", "string"),
        (["a", "b"], "string"),
    ],
)
def test_a_constant_has_the_type_that_tensorflow_gives_it(value: object, name: str) -> None:
    assert tf.constant(value).dtype.name == name


def test_strings_are_bytes() -> None:
    assert run(tf.constant("Hello")) == b"Hello"
    assert np.asarray(run(tf.constant(["a", "ö"]))).tolist() == [b"a", "ö".encode()]


def test_too_few_values_repeat_the_last_one() -> None:
    assert np.asarray(run(tf.constant([1, 2], shape=[2, 3]))).tolist() == [[1, 2, 2], [2, 2, 2]]


def test_names_may_be_given() -> None:
    assert (tf.constant(1, name="one").name, tf.add(1, 2, name="three").name) == ("one", "three")
    assert run(tf.get_default_graph().nodes["three"]) == 3


def test_a_placeholder_makes_a_tensor_of_what_it_is_fed() -> None:
    x = tf.placeholder(tf.float32, shape=[None, 2], name="x")
    came = run(tf.matmul(x, tf.constant([[1.0], [2.0]])), x=[[1, 2], [3, 4]])
    assert np.asarray(came).tolist() == [[5.0], [11.0]]


def test_arithmetic_on_nodes() -> None:
    x = tf.constant(6.0)
    came = [run(each) for each in (x + 1, 1 + x, x - 1, 1 - x, x * 2, x / 4, tf.subtract(x, 1.0), tf.multiply(x, x))]
    assert came == [7.0, 7.0, 5.0, -5.0, 12.0, 1.5, 5.0, 36.0]


def test_control_dependencies() -> None:
    first = tf.constant(1)
    with tf.control_dependencies([first]):
        second = tf.identity(2)
    assert second.controls == [first] and run(second) == 2


def test_a_scope_without_ops_is_no_mistake_here() -> None:
    with tf.device("/cpu:0"):
        pass


def test_a_graph_of_ones_own() -> None:
    graph = tf.Graph()
    with graph.as_default():
        node = tf.constant(5)
    assert node.graph is graph and not tf.get_default_graph().nodes
    with tf.Session(graph=graph) as session:
        assert session.run(node) == 5


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: tf.constant([1, 2, 3], shape=[2]), "3 values do not fill the shape"),
        (lambda: tf.constant("a", shape=[2]), "A string constant has no shape"),
        (lambda: tf.constant({"a": 1}), "is no tensor"),
        (lambda: tf.constant([[1], [2, 3]]), r"\[\[1\], \[2, 3\]\] is no tensor: its lists differ in length"),
        (lambda: tf.constant([["a"], ["b", "c"]], tf.string), "is no tensor: its lists differ in length"),
        (lambda: tf.Variable(1.0), r"tf.Variable is not here.*PyTorch's.*docs/ingraph.md"),
        (lambda: tf.global_variables(), "tf.global_variables is not here"),
        (lambda: tf.train.GradientDescentOptimizer(0.1), "tf.train.GradientDescentOptimizer is not here"),
        (lambda: tf.matmull, "did you mean 'matmul'"),
        (lambda: tf.constant("abc", dtype=tf.float32), "cannot become float32"),
        (lambda: tf.constant(3, dtype=tf.string), "is no string"),
        (lambda: tf.placeholder("float32"), "A placeholder needs a type"),
        (lambda: tf.add_n([]), "at least one input"),
    ],
)
def test_what_tensorflow_would_refuse_is_refused(make: object, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        make()  # type: ignore[operator]


def test_whoever_asks_whether_a_name_is_there_is_told_so() -> None:
    assert hasattr(tf, "matmul") and not hasattr(tf, "Variable") and not hasattr(tf.train, "Saver")


def test_a_feed_of_another_shape_is_refused() -> None:
    x = tf.placeholder(tf.float32, shape=[None, 2], name="x")
    with pytest.raises(UsageError, match=r"shape \(3,\) was given where \(None, 2\) belongs"):
        run(x, x=[1, 2, 3])


# --- flags ----------------------------------------------------------------------------------------------------------


def flags(*argv: str) -> app_flags.Flags:
    made = app_flags.Flags()
    made.define("job_name", "worker", "which job", str)
    made.define("task_index", None, "which task", int)
    made.define("rate", 0.5, "learning rate", float)
    made.define("sync", False, "together", bool)
    made._parse(list(argv))
    return made


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        ((), "job_name", "worker"),
        ((), "task_index", None),
        (("--job_name=ps",), "job_name", "ps"),
        (("-task_index", "3"), "task_index", 3),
        (("--rate", "0.25"), "rate", 0.25),
        (("--sync",), "sync", True),
        (("--sync=false",), "sync", False),
        (("--sync", "--nosync"), "sync", False),
        (("--other=1", "file"), "job_name", "worker"),
    ],
)
def test_flags(argv: tuple[str, ...], name: str, value: object) -> None:
    assert getattr(flags(*argv), name) == value


def test_a_flag_that_nobody_defined() -> None:
    with pytest.raises(UsageError, match="No flag 'jobname' was defined; did you mean 'job_name'"):
        assert flags().jobname


def test_a_flag_may_be_changed() -> None:
    values = flags()
    values.rate = 0.1
    assert values.rate == 0.1


def test_app_run_calls_main_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "main", lambda argv: 3, raising=False)
    with pytest.raises(SystemExit) as caught:
        tf.app.run()
    assert caught.value.code == 3


def test_flags_are_where_tensorflow_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script.py", "--test_tf1_number=4"])
    tf.app.flags.DEFINE_integer("test_tf1_number", 0, "a number")
    assert tf.app.flags.FLAGS.test_tf1_number == 4 == tf.flags.FLAGS.test_tf1_number


def test_train_has_the_cluster_and_the_server() -> None:
    assert tf.train.ClusterSpec({"local": ["a:1"]}).jobs == ["local"]
    assert callable(tf.train.Server.create_local_server)


@pytest.mark.parametrize("is_chief", [True, False])
def test_the_chief_of_document_003_initialises_and_others_do_not(is_chief: bool) -> None:
    init_op = tf.initialize_all_variables()
    supervisor = tf.train.Supervisor(is_chief=is_chief, init_op=init_op)
    made: list[object] = []
    plain = tf.Session.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.Session, "run", lambda self, node, feeds=None: made.append(node) or plain(self, node, feeds))
        session = supervisor.prepare_or_wait_for_session()
    assert made == ([init_op] if is_chief else [])
    assert session.run(tf.constant("Hello")) == b"Hello" and session.run(init_op) is None
    session.close()
    assert not supervisor.should_stop()
    supervisor.request_stop()
    assert supervisor.should_stop()


def test_ops_under_a_replica_device_setter_are_the_workers() -> None:
    cluster = tf.train.ClusterSpec({"ps": ["a:1"], "worker": ["b:1", "b:2"]})
    with tf.device(tf.train.replica_device_setter(worker_device="/job:worker/task:1", cluster=cluster)):
        node = tf.constant(1.0)
    assert str(node.device) == "/job:worker/task:1"
