"""DO all graphs run to their end, whatever the order? Thousands of seeded graphs, cut over devices, run in any order.

The deciding code is the real one (ingraph/partition, ingraph/schedule); devices and the network are a bag from which
the seed draws what happens next: a device begins, runs a node, or a value arrives, early, late or twice.
"""

import random
from collections.abc import Callable, Collection, Mapping

import pytest

from paceline.cluster.devices import Device
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import UsageError
from paceline.ingraph.partition import AFTER, Def, Part, cut, place, prune
from paceline.ingraph.schedule import Schedule

CLUSTER = ClusterSpec({"worker": ["a:1", "b:1", "c:1"], "ps": ["d:1"]})
DEVICES = ["", "", "/cpu:0", "/gpu:0", "/gpu:3", "/task:1", "/job:worker/task:2", "/job:worker/task:2/gpu:1", "/job:ps"]
GPUS = {Task("worker", 0): 1, Task("worker", 2): 2}
MASTER = Task("worker", 0)


class Stuck(AssertionError):
    """Nothing can happen any more, and nodes are left."""


def made_graph(rng: random.Random) -> dict[str, Def]:
    """Nodes whose inputs and controls were made before them; some have an input twice, some are placeholders."""
    nodes: dict[str, Def] = {}
    for number in range(rng.randint(1, 30)):
        earlier = list(nodes)
        inputs = tuple(rng.choice(earlier) for _ in range(rng.randint(0, 3))) if earlier else ()
        controls = tuple(rng.sample(earlier, min(len(earlier), rng.randint(0, 2)))) if rng.random() < 0.4 else ()
        is_fed_only = not inputs and rng.random() < 0.2
        device = Device.parse(rng.choice(DEVICES))
        nodes[f"n{number}"] = Def(f"n{number}", "Op", inputs, controls, device, is_fed_only=is_fed_only)
    return nodes


def value_of(nodes: Mapping[str, Def], name: str, feeds: Mapping[str, object]) -> object:
    """What a single process computes: the name and what went in, as nested tuples."""
    known: dict[str, object] = dict(feeds)
    for each in prune(nodes, [name], list(feeds)):
        known[each] = (each, *(known[source] for source in nodes[each].inputs))
    return known[name]


class Device_:
    """One part while it runs: as ingraph/parts does it, without threads."""

    def __init__(self, part: Part, feeds: Mapping[str, object], schedule: Callable[..., Schedule]) -> None:
        self.part = part
        self.values: dict[str, object] = {name: feeds[name] for name in part.feeds}
        self.inbox: dict[str, object] = {}
        self.is_begun = False
        self.ran: list[str] = []
        self.schedule = schedule(part.needs)

    def may_run(self) -> bool:
        for name, value in self.inbox.items():
            self.values[name] = value
            self.schedule.done(name)
        self.inbox = {}
        return self.is_begun and bool(self.schedule._ready)

    def run(self, nodes: Mapping[str, Def]) -> list[tuple[Device, str, object]]:
        name = self.schedule.next()
        assert name is not None
        self.ran.append(name)
        self.values[name] = (name, *(self.values[source] for source in nodes[name].inputs))
        self.schedule.done(name)
        sent = []
        for key in (name, AFTER + name):
            for device in self.part.sends.get(key, ()):
                sent.append((device, key, self.values[name] if key == name else None))
        return sent


def simulate(seed: int, schedule: Callable[[Mapping[str, Collection[str]]], Schedule] = Schedule) -> int:
    """One graph, one order of events; how many values crossed from one device to another."""
    rng = random.Random(seed)
    nodes = made_graph(rng)
    fed = [name for name, node in nodes.items() if node.is_fed_only or rng.random() < 0.05]
    feeds = {name: f"fed {name}" for name in fed}
    fetches = rng.sample(list(nodes), rng.randint(1, min(4, len(nodes))))
    order = prune(nodes, fetches, fed)
    placed, _ = place(nodes, order, MASTER, CLUSTER, GPUS)
    devices = {part.device: Device_(part, feeds, schedule) for part in cut(nodes, order, placed, fetches)}
    on_the_way: list[tuple[Device, str, object]] = []
    crossed: list[tuple[Device, str]] = []
    while not all(device.is_begun and device.schedule.is_over for device in devices.values()):
        events: list[Callable[[], None]] = []
        for device in devices.values():
            if not device.is_begun:
                events.append(lambda device=device: setattr(device, "is_begun", True))
            elif device.may_run():
                events.append(lambda device=device: on_the_way.extend(device.run(nodes)))
        for number in range(len(on_the_way)):
            events.append(lambda number=number: arrive(on_the_way, number, devices, crossed, rng))
        if not events:
            raise Stuck(f"seed {seed}: {[d.schedule.awaited for d in devices.values()]}")
        rng.choice(events)()
    ran = [name for device in devices.values() for name in device.ran]
    assert sorted(ran) == sorted(order), "each needed node once, no other"
    for device in devices.values():
        for place_, name in enumerate(device.ran):
            assert not set(device.ran[place_:]) & (set(nodes[name].needs) - {name}) - set(fed)
        for name in device.part.fetches:
            assert device.values[name] == value_of(nodes, name, feeds)
    fetched = {name for device in devices.values() for name in device.part.fetches} | set(fed)
    assert set(fetches) <= fetched
    assert len(crossed) == len(set(crossed)), "what two nodes of a device need crosses once"
    return len(crossed)


def arrive(
    on_the_way: list[tuple[Device, str, object]],
    number: int,
    devices: Mapping[Device, Device_],
    crossed: list[tuple[Device, str]],
    rng: random.Random,
) -> None:
    device, key, value = on_the_way.pop(number)
    devices[device].inbox[key] = value
    crossed.append((device, key))
    if rng.random() < 0.1:
        devices[device].inbox[key] = value  # a second time, which changes nothing
        devices[device].may_run()
        devices[device].inbox[key] = value


def test_every_graph_runs_to_its_end_in_any_order() -> None:
    crossed = [simulate(seed) for seed in range(3000)]
    assert sum(count > 0 for count in crossed) > 1000, "most of them are cut somewhere"


class CountsTwice(Schedule):
    """Wrong: an input that is there twice is waited for twice."""

    def __init__(self, needs: Mapping[str, Collection[str]]) -> None:
        super().__init__(needs)
        for name, needed in needs.items():
            self._waits_for[name] = len(list(needed)) + (1 if len(list(needed)) > 2 else 0)


class ForgetsWhatCameEarly(Schedule):
    """Wrong: what comes from elsewhere before its node exists is not counted."""

    def done(self, name: str) -> None:
        if name in self._waits_for or not self._ready:
            super().done(name)


@pytest.mark.parametrize("wrong", [CountsTwice, ForgetsWhatCameEarly])
def test_wrong_schedules_get_stuck(wrong: type[Schedule]) -> None:
    stuck = 0
    for seed in range(300):
        try:
            simulate(seed, wrong)
        except Stuck:
            stuck += 1
    assert stuck > 10


def test_a_cycle_is_found_in_every_graph_that_has_one() -> None:
    found = 0
    for seed in range(1000):
        rng = random.Random(seed)
        nodes = made_graph(rng)
        fetch = rng.choice(list(nodes))
        fed = [name for name, node in nodes.items() if node.is_fed_only]
        needed = prune(nodes, [fetch], fed)
        if not needed:
            continue
        first = needed[0]
        back = Def(first, "Op", nodes[first].inputs, (*nodes[first].controls, fetch), nodes[first].device)
        with pytest.raises(UsageError, match="has a cycle") as caught:
            prune({**nodes, first: back}, [fetch], fed)
        circle = str(caught.value).partition(": ")[2].rstrip(".").split(" needs ")
        assert circle[0] == circle[-1] and len(circle) > 1

        found += 1
    assert found > 500


def test_a_deep_graph_needs_no_deep_stack() -> None:
    nodes = {"n0": Def("n0", "Op")}
    for number in range(1, 20_000):
        nodes[f"n{number}"] = Def(f"n{number}", "Op", (f"n{number - 1}",))
    assert prune(nodes, ["n19999"], [])[-1] == "n19999"
