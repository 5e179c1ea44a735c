"""WHAT did TensorFlow call it? The names that the small programs of its first years use, over our graphs and sessions.

`import paceline.tf1 as tf` is the one line to change in such a program. No TensorFlow is needed or imported.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from paceline.cluster.spec import ClusterSpec
from paceline.cluster.spelling import hint
from paceline.errors import UsageError
from paceline.ingraph import dtypes, scope
from paceline.ingraph import session as sessions
from paceline.ingraph.app_flags import Flags
from paceline.ingraph.config import ConfigProto, GPUOptions
from paceline.ingraph.dtypes import DType
from paceline.ingraph.graph import KERNELS, Graph, Node
from paceline.ingraph.server import Server

__all__ = [
    "ConfigProto",
    "DType",
    "GPUOptions",
    "Graph",
    "Node",
    "Session",
    "add",
    "add_n",
    "app",
    "bfloat16",
    "constant",
    "control_dependencies",
    "device",
    "flags",
    "float16",
    "float32",
    "float64",
    "get_default_graph",
    "global_variables_initializer",
    "identity",
    "initialize_all_variables",
    "int8",
    "int16",
    "int32",
    "int64",
    "matmul",
    "multiply",
    "placeholder",
    "reset_default_graph",
    "string",
    "subtract",
    "train",
    "uint8",
]  # fmt: skip

float16, float32, float64, bfloat16 = dtypes.float16, dtypes.float32, dtypes.float64, dtypes.bfloat16
int8, int16, int32, int64, uint8 = dtypes.int8, dtypes.int16, dtypes.int32, dtypes.int64, dtypes.uint8
string = dtypes.string
_default = [Graph()]


# --- graphs -----------------------------------------------------------------------------------------------------------


def get_default_graph() -> Graph:
    """The graph that ops go into: the innermost `with graph.as_default():`, else one for the whole program."""
    graphs = scope.graphs()
    found: Graph = graphs[-1] if graphs else _default[0]
    return found


def reset_default_graph() -> None:
    """Begin a new one."""
    _default[0] = Graph()


def device(name: str | None) -> scope.device:
    """Ops made in this block go to that device; a block without any is no mistake."""
    return scope.device(name, must_be_used=False)


@contextmanager
def control_dependencies(nodes: Sequence[Node]) -> Iterator[None]:
    """Ops made in this block run after those."""
    with get_default_graph().control_dependencies(nodes):
        yield


# --- ops --------------------------------------------------------------------------------------------------------------


def constant(value: Any, dtype: DType | None = None, shape: Any = None, name: str | None = None) -> Node:
    """A node with a value of its own; too few values for the shape: the last one is repeated.

    >>> constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[2, 3]).kind
    'Const'
    """
    kind = dtype or dtypes.guessed(value)
    made = kind.tensor(value, None)
    if shape is not None:
        made = _shaped(made, shape)
    node = get_default_graph().constant(made, name)
    node.dtype = kind
    return node


def placeholder(dtype: DType, shape: Any = None, name: str | None = None) -> Node:
    """A node whose value is fed to session.run; None in the shape is any size."""
    if not isinstance(dtype, DType):
        raise UsageError(f"A placeholder needs a type, such as tf.float32, not {dtype!r}.")
    node = get_default_graph().placeholder(name)
    node.dtype, node.shape = dtype, shape
    return node


def matmul(a: Any, b: Any, name: str | None = None) -> Node:
    return _add("MatMul", "matmul", [_node(a), _node(b)], name)


def add(a: Any, b: Any, name: str | None = None) -> Node:
    return _add("Add", "add", [_node(a), _node(b)], name)


def subtract(a: Any, b: Any, name: str | None = None) -> Node:
    return _add("Sub", "subtract", [_node(a), _node(b)], name)


def multiply(a: Any, b: Any, name: str | None = None) -> Node:
    return _add("Mul", "multiply", [_node(a), _node(b)], name)


def add_n(inputs: Sequence[Any], name: str | None = None) -> Node:
    """The sum of several nodes, from the first to the last."""
    if not inputs:
        raise UsageError("add_n needs at least one input.")
    return _add("AddN", "add_n", [[_node(each) for each in inputs]], name)


def identity(value: Any, name: str | None = None) -> Node:
    return _add("Identity", "identity", [_node(value)], name)


def global_variables_initializer() -> Node:
    """TensorFlow's init_op. There are no variables here, so that it does nothing, in its turn."""
    return _add("NoOp", "no_op", [], "init")


initialize_all_variables = global_variables_initializer


def _add(kind: str, kernel: str, args: list[Any], name: str | None) -> Node:
    return get_default_graph().add(kind, f"{KERNELS}:{kernel}", args, {}, name)


def _node(value: Any) -> Node:
    return value if isinstance(value, Node) else constant(value)


def _shaped(value: Any, shape: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        raise UsageError("A string constant has no shape; leave it out.")
    size = torch.Size(shape).numel()
    flat = value.reshape(-1)
    if flat.numel() == 0 or flat.numel() > size:
        raise UsageError(f"{flat.numel()} values do not fill the shape {list(shape)}, which has room for {size}.")
    return torch.cat([flat, flat[-1:].expand(size - flat.numel())]).reshape(list(shape))


# --- sessions, clusters, flags ----------------------------------------------------------------------------------------


class Session(sessions.Session):
    """As paceline.Session, of the default graph."""

    def __init__(self, target: str = "", graph: Graph | None = None, config: ConfigProto | None = None) -> None:
        super().__init__(target, graph or get_default_graph(), config)


class Supervisor:
    """TensorFlow 1's, as far as its small programs use it: a session for every worker, prepared by the chief.

    >>> with Supervisor(init_op=global_variables_initializer()).prepare_or_wait_for_session() as session:
    ...     int(session.run(constant(2) + 1))
    3
    """

    def __init__(self, is_chief: bool = True, init_op: Node | None = None) -> None:
        self._is_chief = is_chief
        self._init_op = init_op
        self._is_over = False

    def prepare_or_wait_for_session(self, master: str = "", config: ConfigProto | None = None) -> Session:
        """Waits until every task of the cluster is there; the chief then runs init_op."""
        session = Session(master, config=config)
        if self._is_chief and self._init_op is not None:
            session.run(self._init_op)
        return session

    def request_stop(self) -> None:
        """From now on should_stop() is true; there are no threads here that it would end."""
        self._is_over = True

    def should_stop(self) -> bool:
        return self._is_over


def replica_device_setter(
    worker_device: str = "/job:worker", cluster: ClusterSpec | dict[str, list[str]] | None = None
) -> str:
    """Where ops go that are no variables. Variables, which it would put on the ps, are ctx.prepare's here.

    >>> replica_device_setter(worker_device="/job:worker/task:1")
    '/job:worker/task:1'
    """
    return worker_device


class NotHere(UsageError, AttributeError):
    """A name of TensorFlow's that is not among ours; hasattr() says so, too."""


def _not_here(name: str, known: Sequence[str]) -> NotHere:
    near = hint(name.rpartition(".")[2], known)
    guess = f"; {near.partition(' (')[0]}" if near.startswith("did you mean") else "."
    return NotHere(
        f"tf.{name} is not here: paceline.tf1 has the graphs and sessions of TensorFlow's small programs, and training "
        f"(variables, gradients, optimizers) is PyTorch's; docs/ingraph.md has the names that there are{guess}"
    )


if not TYPE_CHECKING:  # else every name would be right for mypy

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _not_here(name, __all__)


class _Names(type):
    """What a class like tf.train says of names that it lacks."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _not_here(f"{cls.__name__}.{name}", [each for each in vars(cls) if not each.startswith("_")])


class train(metaclass=_Names):
    """tf.train."""

    ClusterSpec = ClusterSpec
    Server = Server
    Supervisor = Supervisor
    replica_device_setter = staticmethod(replica_device_setter)


class flags:
    """tf.app.flags and tf.flags."""

    FLAGS = Flags()

    @classmethod
    def DEFINE_string(cls, name: str, default: str | None, help: str | None = None) -> None:
        cls.FLAGS.define(name, default, help, str)

    @classmethod
    def DEFINE_integer(cls, name: str, default: int | None, help: str | None = None) -> None:
        cls.FLAGS.define(name, default, help, int)

    @classmethod
    def DEFINE_float(cls, name: str, default: float | None, help: str | None = None) -> None:
        cls.FLAGS.define(name, default, help, float)

    @classmethod
    def DEFINE_boolean(cls, name: str, default: bool | None, help: str | None = None) -> None:
        cls.FLAGS.define(name, default, help, bool)

    DEFINE_bool = DEFINE_boolean


class app(metaclass=_Names):
    """tf.app."""

    flags = flags

    @staticmethod
    def run(main: Callable[[list[str]], Any] | None = None, argv: list[str] | None = None) -> None:
        """Call the program's main with its arguments, and end with what it returns."""
        chosen = main or getattr(sys.modules["__main__"], "main", None)
        if chosen is None:
            raise UsageError("tf.app.run() calls the program's function main, and there is none.")
        sys.exit(chosen(argv if argv is not None else []))
