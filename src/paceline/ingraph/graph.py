"""WHAT is to be computed, and what needs what? Nodes, each an op with its arguments, made now and run later.

Built by the user's script (ops called in a graph) and by paceline.tf1; sent to the master by ingraph/session.
Pure: nothing runs here, and nothing is placed; partition does that when a session runs.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.cluster.devices import Device
from paceline.errors import UsageError
from paceline.ingraph import scope

KERNELS = "paceline.ingraph.kernels"
PLACEHOLDER = ""  # the op of a node that has none: its value is fed


class Node:
    """One op in a graph; its value exists only while a session runs. Arithmetic on it makes further nodes."""

    __array_ufunc__ = None  # so that numpy leaves `array + node` to us

    def __init__(
        self, graph: "Graph", name: str, kind: str, op: str, args: tuple[list[Any], dict[str, Any]], device: Device
    ) -> None:
        self.graph = graph
        self.name = name
        self.kind = kind
        self.op = op
        self.args = args
        self.device = device
        self.controls: list[Node] = []
        self.dtype: Any = None  # of a placeholder or a constant: what fed values become (tf1)
        self.shape: Any = None

    @property
    def inputs(self) -> "list[Node]":
        """Nodes whose values are among the arguments."""
        return list(dict.fromkeys(_nodes_in(self.args)))

    def __repr__(self) -> str:
        where = f" on {self.device}" if self.device != Device() else ""
        return f"<node {self.name!r} ({self.kind}){where}>"

    def __add__(self, other: Any) -> "Node":
        return self._with("Add", "add", self, other)

    def __radd__(self, other: Any) -> "Node":
        return self._with("Add", "add", other, self)

    def __sub__(self, other: Any) -> "Node":
        return self._with("Sub", "subtract", self, other)

    def __rsub__(self, other: Any) -> "Node":
        return self._with("Sub", "subtract", other, self)

    def __mul__(self, other: Any) -> "Node":
        return self._with("Mul", "multiply", self, other)

    def __rmul__(self, other: Any) -> "Node":
        return self._with("Mul", "multiply", other, self)

    def __truediv__(self, other: Any) -> "Node":
        return self._with("RealDiv", "divide", self, other)

    def __rtruediv__(self, other: Any) -> "Node":
        return self._with("RealDiv", "divide", other, self)

    def __matmul__(self, other: Any) -> "Node":
        return self._with("MatMul", "matmul", self, other)

    def __getitem__(self, key: Any) -> "Node":
        if not isinstance(key, int | str):
            raise UsageError(f"A node is indexed by a number or a string, not by {key!r}; slice inside an op.")
        return self._with("Item", "item", self, key)

    def __iter__(self) -> Iterator[Any]:
        raise UsageError(f"Node {self.name!r} has no value before a session runs it; take {self.name}[0], [1], ….")

    def __bool__(self) -> bool:
        raise UsageError(f"Node {self.name!r} has no value before a session runs it; fetch it with session.run.")

    def _with(self, kind: str, kernel: str, *args: Any) -> "Node":
        return self.graph.add(kind, f"{KERNELS}:{kernel}", args, {})


class Graph:
    """Nodes in the order in which they were made. Ops called in `with graph:` become nodes of it.

    >>> graph = Graph()
    >>> with graph:
    ...     total = graph.constant(1) + graph.placeholder("x")
    >>> total, [node.name for node in total.inputs]
    (<node 'Add' (Add)>, ['Const', 'x'])
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, kind: str, op: str, args: Sequence[Any], kwargs: Mapping[str, Any], name: str | None = None) -> Node:
        """A new node on the device of the scopes around, after the nodes of the control scopes around."""
        for each in _nodes_in((list(args), dict(kwargs))):
            self._check_mine(each)
        with self._lock:
            made = Node(self, self._free(name or kind), kind, op, (list(args), dict(kwargs)), scope.use())
            made.controls = list(dict.fromkeys(each for block in scope.controls() for each in block))
            self.nodes[made.name] = made
        return made

    def constant(self, value: Any, name: str | None = None) -> Node:
        """A node with a value of its own."""
        return self.add("Const", f"{KERNELS}:const", (value,), {}, name)

    def placeholder(self, name: str | None = None) -> Node:
        """A node whose value is given to session.run."""
        return self.add("Placeholder", PLACEHOLDER, (), {}, name)

    @contextmanager
    def control_dependencies(self, nodes: Sequence[Node]) -> Iterator[None]:
        """What is made in this block runs after those nodes, though it takes nothing from them."""
        for each in nodes:
            self._check_mine(each)
        scope.controls().append(list(nodes))
        try:
            yield
        finally:
            scope.controls().pop()

    def add_control(self, before: Node, after: Node) -> None:
        """Run `after` only when `before` is done."""
        self._check_mine(before)
        self._check_mine(after)
        after.controls.append(before)

    def as_default(self) -> "Graph":
        """TensorFlow's word: `with graph.as_default():`."""
        return self

    def __enter__(self) -> "Graph":
        scope.graphs().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert scope.graphs()[-1] is self, "graphs are left in the order in which they were entered"
        scope.graphs().pop()

    def _free(self, wanted: str) -> str:
        """TensorFlow's way to count names: Const, Const_1, Const_2."""
        while True:
            count = self._counts.get(wanted, 0)
            self._counts[wanted] = count + 1
            name = f"{wanted}_{count}" if count else wanted
            if name not in self.nodes:
                return name

    def _check_mine(self, node: Node) -> None:
        if not isinstance(node, Node):
            raise UsageError(f"{node!r} is no node of a graph; only what an op in a graph returned is.")
        if node.graph is not self:
            raise UsageError(f"Node {node.name!r} belongs to another graph; nodes of two graphs cannot be joined.")


def graph_for(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Graph | None:
    """The graph that an op called with these arguments becomes a node of; None: it runs now."""
    for node in _nodes_in((list(args), dict(kwargs))):
        return node.graph
    graphs = scope.graphs()
    return graphs[-1] if graphs else None


def _nodes_in(value: Any) -> Iterator[Node]:
    """In their order, however deep they lie; what is in itself is looked at once."""
    left, seen = [value], set()
    while left:
        each = left.pop()
        if isinstance(each, Node):
            yield each
        elif type(each) in (dict, list, tuple) and id(each) not in seen:
            seen.add(id(each))
            left += reversed(list(each.values()) if type(each) is dict else each)
