"""HOW does a client run a graph? `paceline.Session(target).run(fetches, feed_dict)`, as TensorFlow's programs do.

Made by the user's script. The graph goes to the task at `target`, which is the session's master; with no target the
master is in this process, alone. Must never decide what runs where: the master does.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import torch

from paceline.cluster.discovery import CLIENT, Assignment, discover_as
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task, split_address
from paceline.cluster.spelling import with_article
from paceline.errors import PacelineError, UsageError, WaitTimeout
from paceline.exits import let_errors_set_the_exit_code
from paceline.frameworks.torch import devices as torch_devices
from paceline.ingraph import scope, values
from paceline.ingraph.config import ConfigProto
from paceline.ingraph.graph import Graph, Node
from paceline.ingraph.master import Master, NodeDef, Options
from paceline.ingraph.neighbours import LOCALHOST, Neighbours, current, remote_to, say, was_stopped
from paceline.ingraph.parts import Parts
from paceline.ingraph.remote import Remote

SCHEME = "paceline://"
MASTER_S = 5.0  # beyond a step's timeout, in which the master says who has not ended


class Session:
    """Runs nodes of one graph. Usable as a context manager.

    >>> graph = Graph()
    >>> x = graph.placeholder("x")
    >>> with Session(graph=graph) as session:
    ...     session.run({"sum": x + 1, "twice": [x * 2]}, feed_dict={x: 20})
    {'sum': 21, 'twice': [40]}
    """

    def __init__(self, target: str = "", graph: Graph | None = None, config: ConfigProto | None = None) -> None:
        let_errors_set_the_exit_code()
        self.target = target
        self.graph = graph
        if config is not None and not target:
            torch_devices.serve_all(config.gpu_use(torch_devices.here().use), say)
        config = config or ConfigProto()
        options = _options(config)
        self._sent: dict[str, int] = {}
        self._master = _Near(options) if not target else _Far(target, options)
        self._is_closed = False

    def run(self, fetches: Any, feed_dict: Mapping[Any, Any] | None = None) -> Any:
        """The values of these nodes, in the same nesting of lists, tuples and dicts; tensors come as numpy arrays."""
        if self._is_closed:
            raise UsageError("This session is closed; make a new one.")
        if feed_dict is not None and not isinstance(feed_dict, Mapping):
            given = with_article(type(feed_dict).__name__)
            raise UsageError(f"feed_dict is a dict of nodes and values, not {given}: session.run(fetches, {{x: 1}}).")
        nodes: list[Node] = []
        values.mapped(fetches, lambda leaf: nodes.append(self._node(leaf)))
        feeds = {self._node(key).name: _fed(self._node(key), value) for key, value in (feed_dict or {}).items()}
        self._extend()
        found = self._master.run([node.name for node in nodes], feeds)
        results = iter([values.mapped(value, _shown) for value in found])
        return values.mapped(fetches, lambda leaf: next(results))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._master.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _node(self, given: Any) -> Node:
        """A node of this session's graph, which is the graph of the first node that it hears of."""
        if isinstance(given, Node):
            if self.graph is None:
                self.graph = given.graph
            if given.graph is not self.graph:
                raise UsageError(f"Node {given.name!r} is not of this session's graph; a session runs one graph.")
            return given
        graph = self.graph or next(iter(reversed(scope.graphs())), None)
        if isinstance(given, str) and graph is not None:
            self.graph, name = graph, given.removesuffix(":0")  # TensorFlow's name of a node's first output
            if name in graph.nodes:
                return graph.nodes[name]
            raise UsageError(f"The graph has no node {given!r}.")
        raise UsageError(f"{given!r} is no node; fetch or feed what an op in a graph has returned.")

    def _extend(self) -> None:
        """What the master does not know yet: new nodes, and old ones with new controls."""
        new = [node for node in (self.graph.nodes.values() if self.graph else ()) if self._is_new(node)]
        if new:
            self._master.extend([_described(node) for node in new])
            self._sent.update({node.name: len(node.controls) for node in new})

    def _is_new(self, node: Node) -> bool:
        return self._sent.get(node.name) != len(node.controls)


class _Near:
    """The master in this very process."""

    def __init__(self, options: Options) -> None:
        cluster = ClusterSpec({LOCALHOST.job: ["localhost:1"]})  # an address that nobody connects to
        neighbours = Neighbours(Assignment(cluster, LOCALHOST, 0, Settings(run_id=""), b"", ""), is_serving=True)
        self._master = Master(neighbours, Parts(neighbours), say)
        self._name = self._master.open(options, is_announced=False)

    def extend(self, nodes: Sequence[NodeDef]) -> None:
        self._master.extend(self._name, nodes)

    def run(self, fetches: list[str], feeds: dict[str, Any]) -> list[Any]:
        return self._master.run(self._name, fetches, feeds)

    def close(self) -> None:
        self._master.close(self._name)


class _Far:
    """The master at a target; it may be this process too, which makes no difference."""

    def __init__(self, target: str, options: Options) -> None:
        self._remote = _remote(target)
        self._wait_s = options.timeout_s or None
        self._limit_s = options.timeout_s + MASTER_S if options.timeout_s else None
        self._name: str = self._call("open_session", msgspec.to_builtins(options))

    def extend(self, nodes: Sequence[NodeDef]) -> None:
        self._call("extend", self._name, [msgspec.structs.asdict(node) for node in nodes])

    def run(self, fetches: list[str], feeds: dict[str, Any]) -> list[Any]:
        return list(self._call("run", self._name, fetches, feeds))

    def _call(self, verb: str, *args: Any) -> Any:
        """Ask the master; one that this very process has stopped is not waited for."""
        if not was_stopped(self._remote.address):
            return self._remote.call(verb, args, wait_s=self._wait_s, limit_s=self._limit_s, what="the session")
        try:
            return self._remote.call(verb, args, wait_s=0.0, limit_s=self._limit_s, what="the session")
        except WaitTimeout:
            raise UsageError(
                f"The server of {self._remote.name} was stopped by this program, and its sessions ended with it; make "
                "another server, and a new session at its target."
            ) from None

    def close(self) -> None:
        with suppress(PacelineError):  # a master that is gone has no session either
            self._remote.call("close_session", (self._name,), wait_s=0.0)
        self._remote.close()


def _options(config: ConfigProto) -> Options:
    if config.operation_timeout_in_ms < 0:
        raise UsageError(f"operation_timeout_in_ms is {config.operation_timeout_in_ms}; it must be 0 (none) or more.")
    return Options(
        is_soft=config.allow_soft_placement is not False,
        is_logged=bool(config.log_device_placement),
        text=str(config).replace("\n", " "),
        timeout_s=config.operation_timeout_in_ms / 1000,
    )


def _remote(target: str) -> Remote:
    if not isinstance(target, str) or not target.startswith(SCHEME):
        raise UsageError(f"A session's target is like {SCHEME}localhost:2222 (server.target), or '', not {target!r}.")
    address = target.removeprefix(SCHEME)
    split_address(address)
    try:
        assignment = current().assignment
    except UsageError:
        assignment = discover_as({CLIENT.job: [address]})  # a client that knows of no cluster but the target
    cluster = assignment.cluster
    known = [Task(job, index) for job in cluster.jobs for index in cluster.task_indices(job)]
    name = next((t.device for t in known if t.job != CLIENT.job and cluster.address(t) == address), target)
    return remote_to(assignment, name, address)


def _described(node: Node) -> NodeDef:
    args = values.mapped(list(node.args), lambda leaf: values.Ref(leaf.name) if isinstance(leaf, Node) else leaf)
    inputs, controls = [each.name for each in node.inputs], [each.name for each in node.controls]
    return NodeDef(node.name, node.kind, node.op, str(node.device), inputs, controls, args)


def _fed(node: Node, value: Any) -> Any:
    """A value for a node; where it has a type of its own (tf1), as a tensor of that type."""
    if isinstance(value, Node):
        raise UsageError(f"The feed of {node.name!r} is a node; feed a value, or join the nodes in the graph.")
    return value if node.dtype is None else node.dtype.tensor(value, node.shape)


def _shown(leaf: Any) -> Any:
    """As TensorFlow returns it: an array; what numpy has no type for stays a tensor."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    plain = leaf.detach().cpu()
    try:
        array = plain.numpy()
    except TypeError:
        return plain
    return array[()] if array.ndim == 0 else np.ascontiguousarray(array)
