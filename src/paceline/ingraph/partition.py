"""WHAT of a graph runs, where, and what crosses? Pruned to the fetches, placed on devices, cut at their borders.

Called by ingraph/master before a step. Pure, and all refusals are made here, so nothing has run when one comes:

1. prune: from the fetches backwards, as far as fed nodes; a cycle or a placeholder without a value is refused,
2. place: a full device for each node: what its scopes say, the rest filled in; a missing GPU becomes the CPU, or not,
3. cut: one part a device. Where a node's value is needed on another device it is sent there once, and received.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from paceline.cluster.devices import Device
from paceline.cluster.spec import ClusterSpec, Task
from paceline.cluster.spelling import hint
from paceline.errors import UsageError

AFTER = "^"  # TensorFlow's mark of a control input


class Def(msgspec.Struct, frozen=True):
    """A node as these decisions see it; its arguments do not matter here. `is_fed_only`: a placeholder."""

    name: str
    kind: str
    inputs: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()
    device: Device = Device()
    is_fed_only: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        """All that must be done before it, each once."""
        return tuple(dict.fromkeys((*self.inputs, *self.controls)))


class Part(msgspec.Struct):
    """What one device does in a step: `nodes` in an order that is possible and what each `needs` first, `feeds` that
    the client brings, `receives` from other parts, `sends` to other devices, `fetches` that go back to the client.
    What is only to be waited for, and not passed on, has the name of its node with AFTER in front."""

    device: Device
    nodes: list[str] = []
    needs: dict[str, list[str]] = {}
    feeds: list[str] = []
    receives: list[str] = []
    sends: dict[str, list[Device]] = {}
    fetches: list[str] = []


def prune(nodes: Mapping[str, Def], fetches: Sequence[str], fed: Collection[str]) -> list[str]:
    """The nodes that must run for these fetches, each after all that it needs; fed ones need not run.

    >>> graph = {n.name: n for n in (Def("a", "Const"), Def("b", "Add", ("a",)), Def("c", "Const"))}
    >>> prune(graph, ["b"], [])
    ['a', 'b']
    """
    for name in [*fetches, *fed]:
        if name not in nodes:
            raise UsageError(f"The graph has no node {name!r}; {_near(name, nodes)}.")
    order: list[str] = []
    done: set[str] = set(fed)
    for fetch in fetches:
        _visit(nodes, fetch, done, order)
    for name in order:
        if nodes[name].is_fed_only:
            needed = next((f" and {n!r} needs it" for n in order if name in nodes[n].needs), "")
            raise UsageError(f"Placeholder {name!r} has no value{needed}; give session.run feed_dict={{{name}: …}}.")
    return order


def _near(name: str, nodes: Mapping[str, Def]) -> str:
    return hint(name, list(nodes)[:20])


def _visit(nodes: Mapping[str, Def], start: str, done: set[str], order: list[str]) -> None:
    """Depth first without recursion: graphs may be deeper than Python's stack."""
    path: list[tuple[str, list[str]]] = []
    on_path: dict[str, None] = {}

    def enter(name: str) -> None:
        path.append((name, list(reversed(nodes[name].needs))))
        on_path[name] = None

    if start not in done:
        enter(start)
    while path:
        name, left = path[-1]
        if not left:
            path.pop()
            del on_path[name]
            done.add(name)
            order.append(name)
            continue
        need = left.pop()
        if need in on_path:
            circle = [*list(on_path)[list(on_path).index(need) :], need]
            raise UsageError(f"The graph has a cycle, so no node of it can be first: {' needs '.join(circle)}.")
        if need not in nodes:
            raise UsageError(f"Node {name!r} needs {need!r}, which the graph does not have; {_near(need, nodes)}.")
        if need not in done:
            enter(need)


def place(
    nodes: Mapping[str, Def],
    names: Sequence[str],
    default: Task,
    cluster: ClusterSpec,
    gpus: Mapping[Task, int],
    strict: Collection[Task] = (),
) -> tuple[dict[str, Device], list[str]]:
    """The full device of each node, and a sentence for each device that had to be replaced.

    `default` is where a node goes that says nothing: task 0 of the job that the session was opened at. `strict` are the
    tasks on which a missing GPU is refused.

    >>> graph = {"a": Def("a", "Const", device=Device.parse("/gpu:2"))}
    >>> cluster = ClusterSpec({"local": ["localhost:2222"]})
    >>> placed, said = place(graph, ["a"], Task("local", 0), cluster, {})
    >>> str(placed["a"]), said[0].partition(":")[0]
    ('/job:local/replica:0/task:0/device:CPU:0', 'There is no /job')
    """
    placed: dict[str, Device] = {}
    said: dict[str, None] = {}
    for name in names:
        full = nodes[name].device.filled(default)
        try:
            full.check(cluster)
        except UsageError as error:
            raise UsageError(f"Node {name!r} is placed on '{nodes[name].device}': {error}") from None
        task = full.task_of()
        assert task is not None
        if full.kind == "GPU" and (full.index or 0) >= gpus.get(task, 0):
            if task in strict:
                raise UsageError(
                    f"Node {name!r} is placed on {full}, which is not there; name a device that is, or set "
                    "allow_soft_placement=True."
                )
            said[f"There is no {full}: the CPU of that task is used instead"] = None
            full = Device(kind="CPU", index=0).filled(task)
        elif full.kind == "CPU":
            full = msgspec.structs.replace(full, index=0)  # a task has one CPU, and any number of names for it
        placed[name] = full if full.index is not None else msgspec.structs.replace(full, index=0)
    return placed, list(said)


def cut(
    nodes: Mapping[str, Def], order: Sequence[str], placed: Mapping[str, Device], fetches: Sequence[str]
) -> list[Part]:
    """One part a device, in the order in which they are first needed.

    >>> graph = {n.name: n for n in (Def("a", "Const"), Def("b", "Add", ("a",)))}
    >>> one, two = Device.parse("/job:w/task:0"), Device.parse("/job:w/task:1")
    >>> parts = cut(graph, ["a", "b"], {"a": one, "b": two}, ["b"])
    >>> parts[0].sends, parts[1].receives, parts[1].fetches
    ({'a': [Device(job='w', replica=None, task=1, kind=None, index=None)]}, ['a'], ['b'])
    """
    parts: dict[Device, Part] = {}
    for name in order:
        here = placed[name]
        part = parts.setdefault(here, Part(here))
        part.nodes.append(name)
        part.needs[name] = []
        for need in nodes[name].needs:
            is_passed_on = need in nodes[name].inputs
            if need not in placed:
                if is_passed_on and need not in part.feeds:
                    part.feeds.append(need)
                continue
            key = need if is_passed_on or placed[need] == here else AFTER + need
            part.needs[name].append(key)
            if placed[need] != here and key not in part.receives:
                part.receives.append(key)
                parts[placed[need]].sends.setdefault(key, []).append(here)
    for name in dict.fromkeys(fetches):
        if name in placed:
            parts[placed[name]].fetches.append(name)
    return list(parts.values())
