"""WHAT does a run ask of a Ray cluster? Bundles of CPUs and GPUs, which task lies in which, and whether they ever fit.

Called by ray/on_ray. Pure. Must never ask for more than one machine can hold of what must lie together.

A bundle lies on one machine, and Ray reserves all bundles of a run at once, or none. Each task has a bundle of its own,
and they are spread over the machines; with --colocate each ps shares one bundle with its part of the workers, so that
they surely meet on one machine. Workers that may join later (--workers MIN:MAX) are asked for one by one.
"""

from collections.abc import Mapping, Sequence

import msgspec

from paceline.cluster.spec import Task
from paceline.errors import UsageError

Resources = Mapping[str, float]
SHOWN = ("CPU", "GPU")
PS_CPUS = 1.0
TINY = 1e-6


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """How many tasks, and what each of them needs."""

    ps: int = 1
    workers: int = 2
    started: int | None = None  # of the workers, at first; None: all
    worker_cpus: float = 1.0
    worker_gpus: float = 0.0
    is_colocated: bool = False

    @property
    def of_ps(self) -> dict[str, float]:
        """What a ps needs."""
        return {"CPU": PS_CPUS}

    @property
    def of_worker(self) -> dict[str, float]:
        """What a worker needs."""
        return {"CPU": self.worker_cpus, **({"GPU": self.worker_gpus} if self.worker_gpus else {})}

    @property
    def num_started(self) -> int:
        """Workers that must be there at the start."""
        return self.workers if self.started is None else self.started


class Bundles(msgspec.Struct, frozen=True):
    """What Ray reserves at once, and the bundle of every task."""

    wanted: list[dict[str, float]]
    of: dict[Task, int]
    later: list[Task]  # these have none: they come when there is room


def check(wish: Wish) -> None:
    """Refuse numbers that no task can have."""
    for flag, value in (("worker-cpus", wish.worker_cpus), ("worker-gpus", wish.worker_gpus)):
        if not 0 <= value < float("inf"):
            raise UsageError(f"--{flag} is {value:g}; it must be 0 or more.")
        if value > 1 and value != int(value):
            raise UsageError(f"--{flag} is {value:g}; Ray gives a share of one, or a whole number.")
    if wish.worker_cpus == 0 and wish.worker_gpus == 0:
        raise UsageError("--worker-cpus 0 leaves nothing to ask Ray for; give a worker CPUs or GPUs.")
    if wish.is_colocated and wish.num_started < wish.ps:
        raise UsageError(
            f"--colocate puts every ps beside a worker, and there are {wish.ps} ps and {wish.num_started} workers; "
            "use fewer ps, or leave it out."
        )


def bundles(wish: Wish) -> Bundles:
    """The bundles of a run.

    >>> bundles(Wish(ps=1, workers=2)).wanted
    [{'CPU': 1.0}, {'CPU': 1.0}, {'CPU': 1.0}]
    >>> together = bundles(Wish(ps=2, workers=3, worker_gpus=1.0, is_colocated=True))
    >>> together.wanted, together.of[Task("worker", 2)]
    ([{'CPU': 3.0, 'GPU': 2.0}, {'CPU': 2.0, 'GPU': 1.0}], 0)
    """
    servers = [Task("ps", index) for index in range(wish.ps)]
    workers = [Task("worker", index) for index in range(wish.workers)]
    started, later = workers[: wish.num_started], workers[wish.num_started :]
    if not wish.is_colocated:
        wanted = [wish.of_ps for _ in servers] + [wish.of_worker for _ in started]
        return Bundles(wanted, {task: place for place, task in enumerate([*servers, *started])}, later)
    of = {task: task.index for task in servers}
    of |= {task: task.index % wish.ps for task in started}
    shares = [sum(1 for task in started if of[task] == place) for place in range(wish.ps)]
    return Bundles([added(wish.of_ps, wish.of_worker, share) for share in shares], of, later)


def added(one: Resources, other: Resources, times: int) -> dict[str, float]:
    """One, and so many times the other."""
    return {name: one.get(name, 0.0) + times * other.get(name, 0.0) for name in {**one, **other}}


def fit(wanted: Sequence[Resources], machines: Sequence[Resources]) -> bool:
    """Whether these machines, if nobody else used them, could hold all bundles. Exact: a run has two kinds of them.

    >>> fit([{"CPU": 2}] * 3, [{"CPU": 3}, {"CPU": 3}])
    False
    >>> fit([{"CPU": 1}, {"CPU": 2, "GPU": 1}], [{"CPU": 1}, {"CPU": 2, "GPU": 1}])
    True
    """
    kinds = sorted({tuple(sorted(bundle.items())) for bundle in wanted})
    counts = [sum(1 for bundle in wanted if tuple(sorted(bundle.items())) == kind) for kind in kinds]
    first, second = ([dict(kind) for kind in kinds] + [{}, {}])[:2]
    num_first, num_second = [*counts, 0, 0][:2]
    most = {0: 0}  # so many of the first kind placed -> at most so many of the second
    for machine in machines:
        most = _with_machine(most, machine, (first, num_first), (second, num_second))
    return most.get(num_first, -1) >= num_second


def _with_machine(
    most: Mapping[int, int],
    machine: Resources,
    first: tuple[Resources, int],
    second: tuple[Resources, int],
) -> dict[int, int]:
    better: dict[int, int] = {}
    for here in range(min(times(first[0], machine), first[1]) + 1):
        rest = added(machine, first[0], -here)
        beside = min(times(second[0], rest), second[1])
        for placed, others in most.items():
            total = min(placed + here, first[1])
            better[total] = max(better.get(total, 0), others + beside)
    return better


def times(bundle: Resources, machine: Resources) -> int:
    """How many of a bundle a machine holds.

    >>> times({"CPU": 2, "GPU": 1}, {"CPU": 8, "GPU": 3})
    3
    """
    shares = [(machine.get(name, 0.0) + TINY) / need for name, need in bundle.items() if need > 0]
    return max(0, int(min(shares))) if shares else 0


def told(wanted: Sequence[Resources]) -> str:
    """Bundles in words.

    >>> told([{"CPU": 1.0}, {"CPU": 1.0}, {"CPU": 2.0, "GPU": 1.0}])
    '2 x (1 CPU), 1 x (2 CPU, 1 GPU)'
    """
    kinds: dict[str, int] = {}
    for bundle in wanted:
        text = resources(bundle)
        kinds[text] = kinds.get(text, 0) + 1
    return ", ".join(f"{count} x ({text})" for text, count in kinds.items())


def resources(given: Resources) -> str:
    """CPUs and GPUs in words.

    >>> resources({"CPU": 2.0, "GPU": 1.0, "memory": 7.0}), resources({})
    ('2 CPU, 1 GPU', 'nothing')
    """
    return ", ".join(f"{given[name]:g} {name}" for name in SHOWN if given.get(name)) or "nothing"


def machines_told(machines: Sequence[Resources]) -> str:
    """What a cluster has, machine by machine.

    >>> machines_told([{"CPU": 2.0}, {"CPU": 2.0}])
    '2 machines: 2 x (2 CPU)'
    """
    count = len(machines)
    return f"{count} machine{'s' if count != 1 else ''}: {told(machines)}" if machines else "no machine"
