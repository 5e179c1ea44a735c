"""WHO takes part? The cluster's jobs, their tasks and addresses, in the words of tf.train.ClusterSpec.

Made by discovery, the launcher or the user's script; read everywhere.
Must never look up a host, open a socket or read the environment.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence

import msgspec

from paceline.cluster.spelling import hint, with_article
from paceline.errors import UsageError

Addresses = Sequence[str] | Mapping[int, str] | Mapping[str, str]

_JOB_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_HOST_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_INDEX = re.compile(r"[0-9]{1,6}")
_PORT = re.compile(r"[0-9]{1,5}")


class Task(msgspec.Struct, frozen=True, order=True):
    """One process of the cluster.

    >>> str(Task("worker", 1)), Task("worker", 1).device
    ('worker:1', '/job:worker/replica:0/task:1')
    """

    job: str
    index: int

    def __str__(self) -> str:
        return f"{self.job}:{self.index}"

    @property
    def device(self) -> str:
        """TensorFlow's name of the task."""
        return f"/job:{self.job}/replica:0/task:{self.index}"

    @classmethod
    def parse(cls, text: str) -> "Task":
        """Read what str() wrote.

        >>> Task.parse("ps:0")
        Task(job='ps', index=0)
        """
        job, _, index = text.partition(":")
        if not _JOB_NAME.fullmatch(job) or not _INDEX.fullmatch(index):
            raise UsageError(f"{text!r} is not a task; write it as job:index, such as worker:1.")
        return cls(job, int(index))


class ClusterSpec:
    """Jobs and the addresses of their tasks; never changes after it was made.

    >>> spec = ClusterSpec({"ps": ["a:2222"], "worker": ["b:2222", "c:2222"]})
    >>> spec.num_tasks("worker"), spec.task_address("worker", 1), str(spec.chief)
    (2, 'c:2222', 'worker:0')
    """

    def __init__(self, cluster: "ClusterSpec | Mapping[str, Addresses]") -> None:
        if isinstance(cluster, ClusterSpec):
            self._jobs: dict[str, tuple[str, ...]] = cluster._jobs
            return
        if not isinstance(cluster, Mapping):
            given = with_article(type(cluster).__name__)
            raise UsageError(f'A cluster is a mapping such as {{"ps": ["host:2222"]}}, not {given}.')
        if not cluster:
            raise UsageError('The cluster is empty; it needs at least one job, such as {"worker": ["host:2222"]}.')
        self._jobs = {_job_name(job): _addresses(job, given) for job, given in cluster.items()}
        if len(self._jobs.get("chief", ())) > 1:
            raise UsageError(f"Job 'chief' may have only one task, not {self.num_tasks('chief')}.")
        self._refuse_duplicates()

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs, in the order given."""
        return list(self._jobs)

    def num_tasks(self, job: str) -> int:
        """Return how many tasks a job has."""
        return len(self._of(job))

    def task_indices(self, job: str) -> list[int]:
        """Return the indices of a job's tasks: 0, 1, …."""
        return list(range(self.num_tasks(job)))

    def task_address(self, job: str, index: int) -> str:
        """Return "host:port" of one task."""
        addresses = self._of(job)
        if not 0 <= index < len(addresses):
            count = len(addresses)
            has = "1 task, index 0" if count == 1 else f"{count} tasks, indices 0 to {count - 1}"
            raise UsageError(f"There is no task {job}:{index}; job {job!r} has {has}.")
        return addresses[index]

    def job_tasks(self, job: str) -> list[str]:
        """Return the addresses of a job in index order."""
        return list(self._of(job))

    def as_dict(self) -> dict[str, list[str]]:
        """Return TF_CONFIG's "cluster" shape."""
        return {job: list(addresses) for job, addresses in self._jobs.items()}

    @property
    def ps(self) -> list[Task]:
        """The parameter servers in index order; empty where there is no job ps."""
        return self._tasks("ps")

    @property
    def workers(self) -> list[Task]:
        """All that compute gradients, in worker_index order: the chief's own job first."""
        return self._tasks("chief") + self._tasks("worker")

    @property
    def chief(self) -> Task:
        """The one task of job chief, else worker:0."""
        if not self.workers:
            raise UsageError(f"The cluster has no chief; its jobs are {', '.join(self.jobs)}, none is worker.")
        return self.workers[0]

    def worker_index(self, task: Task) -> int:
        """Return the position of a task among all workers, the chief at 0."""
        if task not in self.workers:
            raise UsageError(f"{task} is no worker of this cluster, so it has no worker index.")
        return self.workers.index(task)

    def tasks_beside(self, task: Task) -> list[Task]:
        """Return all ps and worker tasks whose address names the same host."""
        if task.job not in self._jobs:
            return []
        host = split_address(self.address(task))[0]
        return [t for t in [*self.ps, *self.workers] if split_address(self.address(t))[0] == host]

    def address(self, task: Task) -> str:
        """Return "host:port" of a task."""
        return self.task_address(task.job, task.index)

    def __eq__(self, other: object) -> bool:
        return self._jobs == other._jobs if isinstance(other, ClusterSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset(self._jobs.items()))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"

    def _of(self, job: str) -> tuple[str, ...]:
        if job not in self._jobs:
            raise UsageError(f"The cluster has no job {job!r}; {hint(job, self._jobs)}.")
        return self._jobs[job]

    def _tasks(self, job: str) -> list[Task]:
        return [Task(job, index) for index in range(len(self._jobs.get(job, ())))]

    def _refuse_duplicates(self) -> None:
        owner: dict[tuple[str, int], Task] = {}
        for job, addresses in self._jobs.items():
            for index, address in enumerate(addresses):
                host, port = split_address(address)
                task = Task(job, index)
                first = owner.setdefault((host.lower(), port), task)
                if first != task:
                    raise UsageError(f"{first} and {task} both have the address {address}; each needs its own.")


def split_address(address: str) -> tuple[str, int]:
    """Take "host:port" apart; an IPv6 host stands in brackets and comes back without them.

    >>> split_address("localhost:2222"), split_address("[::1]:2222")
    (('localhost', 2222), ('::1', 2222))
    """
    if not isinstance(address, str):
        raise UsageError(f'Address {address!r} is not a string; write it as "host:port".')
    host, colon, port = address.rpartition(":")
    if not colon or not port:
        raise UsageError(f"Address {address!r} has no port; write it as host:port, such as localhost:2222.")
    if not _is_host(host):
        raise UsageError(
            f"Address {address!r} has no valid host; write host:port without a scheme, IPv6 as [::1]:port."
        )
    if not _PORT.fullmatch(port) or not 1 <= int(port) <= 65535:
        raise UsageError(f"Address {address!r} has port {port!r}; a port is a number from 1 to 65535.")
    return host.strip("[]"), int(port)


def _is_host(host: str) -> bool:
    if not (host.startswith("[") and host.endswith("]")):
        return _HOST_NAME.fullmatch(host) is not None
    try:
        ipaddress.IPv6Address(host[1:-1])
    except ValueError:
        return False
    return True


def _job_name(job: object) -> str:
    if not isinstance(job, str) or not _JOB_NAME.fullmatch(job):
        raise UsageError(f"{job!r} is no job name; use letters, digits and underscores, such as 'worker'.")
    return job


def _addresses(job: str, given: object) -> tuple[str, ...]:
    if isinstance(given, Mapping):
        given = _by_index(job, given)
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UsageError(f'Job {job!r} needs a list of addresses such as ["host:2222"], not {given!r}.')
    if not given:
        raise UsageError(f"Job {job!r} has no tasks; give it at least one host:port, or leave the job out.")
    for address in given:
        split_address(address)
    return tuple(given)


def _by_index(job: str, given: Mapping[object, object]) -> list[object]:
    indices = {str(index): address for index, address in given.items()}
    wanted = [str(index) for index in range(len(given))]
    if set(indices) != set(wanted):
        raise UsageError(f"Job {job!r} has task indices {', '.join(indices)}; they must be 0, 1, … without a gap.")
    return [indices[index] for index in wanted]
