"""WHAT does the scheduler that started this process say? JobSet, torchrun, MPI and Slurm, by the variables they set.

Called by cluster/discovery with the environment; pure. A scheduler counts only where it has started several processes
together and tells each its number: a shell inside an allocation, or a single process, is no cluster. JobSet names the
jobs; elsewhere the first PACELINE_PS processes are ps (1 by default; in a heterogeneous Slurm job its first part).
PACELINE_PS=0 says that they are none of ours. Must never look up a host: every process must come to the same addresses.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from paceline.cluster.hostlist import counts, expand
from paceline.cluster.hosts import joined
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import UsageError

Environ = Mapping[str, str]

PS, WORKERS, PORT = "PACELINE_PS", "PACELINE_WORKERS", "PACELINE_PORT"
FIRST_PORT = 2222
BLOCKS, BLOCK, LOWEST = 180, 64, 20000  # ports 20000 to 31519: below those that systems give to outgoing connections
_WHOLE = re.compile(r"[0-9]{1,9}")


class Look(msgspec.Struct, frozen=True):
    """What looking at one source gave, and why."""

    source: str
    why: str
    cluster: ClusterSpec | None = None
    task: Task | None = None
    is_refused: bool = False  # it is meant, and cannot be: then nothing after it counts


def look(environ: Environ) -> list[Look]:
    """Ask each scheduler in turn, up to the first that has started this process as one of several.

    What runs inside another comes first: torchrun and mpirun start processes within Slurm's tasks.

    >>> look({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"})[-1].task
    Task(job='worker', index=0)
    """
    found: list[Look] = []
    for source in SCHEDULERS:
        found.append(ask(source, environ))
        if found[-1].task is not None:
            break
    return found


def ask(source: str, environ: Environ) -> Look:
    """What one scheduler says."""
    if _own(environ, PS) == 0:
        return Look(source, f"{PS}=0 says that what a scheduler starts is no cluster of ours")
    return SCHEDULERS[source](environ)


def jobset(environ: Environ) -> Look:
    """A pod of a JobSet, by the variables that its file takes from JobSet's annotations."""
    name, job = environ.get("JOBSET_NAME", ""), environ.get("REPLICATED_JOB_NAME", "")
    index = _whole(environ, "JOB_COMPLETION_INDEX")
    if index is None or not name or not job:
        alone = "an indexed Job, but " if index is not None else ""
        return Look("JobSet", f"{alone}JOBSET_NAME, REPLICATED_JOB_NAME and JOB_COMPLETION_INDEX are not all set")
    if job not in ("ps", "worker"):
        return Look("JobSet", f"the replicated job is {job!r}, neither ps nor worker")
    if _whole(environ, "JOB_INDEX"):
        raise UsageError(f"JOB_INDEX is {environ['JOB_INDEX']}: give job {job} one replica, and completions instead.")
    num_ps, num_workers = _own(environ, PS), _own(environ, WORKERS)
    if not num_ps or not num_workers:
        raise UsageError(
            f"JobSet does not tell how many tasks there are; set {PS} and {WORKERS}, or TF_CONFIG. {PS}=0: no cluster."
        )
    subdomain, port = environ.get("JOBSET_SUBDOMAIN") or name, _port(environ, FIRST_PORT)
    cluster = jobset_cluster(name, subdomain, {"ps": num_ps, "worker": num_workers}, port)
    return Look("JobSet", f"pod {index} of job {job} of {name}", cluster, Task(job, index))


def jobset_cluster(name: str, subdomain: str, sizes: Mapping[str, int], port: int) -> ClusterSpec:
    """The names of all pods, which are known before there is any: <jobset>-<job>-0-<index>.<subdomain>."""
    return ClusterSpec(
        {job: [f"{name}-{job}-0-{index}.{subdomain}:{port}" for index in range(size)] for job, size in sizes.items()}
    )


def torchrun(environ: Environ) -> Look:
    """A process of torchrun, or of anything else that sets torch's four variables."""
    number, size, master = _whole(environ, "RANK"), _whole(environ, "WORLD_SIZE"), environ.get("MASTER_ADDR", "")
    master_port = _whole(environ, "MASTER_PORT")
    if number is None or size is None or master_port is None or not master:
        return Look("torchrun", _lacking(environ, ("RANK", "WORLD_SIZE", "MASTER_PORT"), ("MASTER_ADDR",)))
    hosts = _blocks("torchrun", size, _whole(environ, "LOCAL_WORLD_SIZE") or 1, master)
    what = f"process {number} of {size} (RANK, WORLD_SIZE)"
    return _numbered("torchrun", what, environ, number, hosts, _port(environ, port_block(master_port)))


def mpi(environ: Environ) -> Look:
    """A process of mpirun: Open MPI's variables, or PMI's, which MPICH and Intel's MPI set."""
    number, size = _whole(environ, "OMPI_COMM_WORLD_RANK"), _whole(environ, "OMPI_COMM_WORLD_SIZE")
    local, by = _whole(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"), "OMPI_COMM_WORLD_RANK"
    if number is None or size is None:
        number, size = _whole(environ, "PMI_RANK"), _whole(environ, "PMI_SIZE")
        local, by = _whole(environ, "MPI_LOCALNRANKS"), "PMI_RANK"
    if number is None or size is None:
        return Look("MPI", "neither OMPI_COMM_WORLD_RANK and _SIZE nor PMI_RANK and PMI_SIZE are set")
    if (number, size) == (_whole(environ, "SLURM_PROCID"), _whole(environ, "SLURM_STEP_NUM_TASKS")):
        return Look("MPI", "Slurm says the same, and where the others are")
    master = environ.get("MASTER_ADDR", "") or ("127.0.0.1" if local == size else "")
    if size > 1 and not master:
        raise UsageError(
            "mpirun does not tell where process 0 is; add -x MASTER_ADDR=HOST (MPICH: -genv MASTER_ADDR HOST), or "
            f"{PS}=0 if these processes are no cluster of ours."
        )
    hosts = _blocks("mpirun", size, local or 1, master)
    return _numbered("MPI", f"process {number} of {size} ({by})", environ, number, hosts, _port(environ, FIRST_PORT))


def slurm(environ: Environ) -> Look:
    """A task of a Slurm step; the script of a job, and a shell inside an allocation, are none."""
    number, size = _whole(environ, "SLURM_PROCID"), _whole(environ, "SLURM_STEP_NUM_TASKS")
    if not environ.get("SLURM_STEP_ID") or number is None or size is None:
        if not environ.get("SLURM_JOB_ID"):
            return Look("Slurm", "SLURM_JOB_ID is not set")
        return Look("Slurm", "inside a job, but no task of a step: srun starts those")
    step = f"{environ.get('SLURM_JOB_ID', '?')}.{environ['SLURM_STEP_ID']}"
    groups = _het_groups(environ)
    if groups and sum(map(len, groups)) == size:
        hosts, default_ps = [host for group in groups for host in group], len(groups[0])
    else:
        hosts, default_ps = _spread(environ, "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"), 1
    if len(hosts) != size:
        raise UsageError(f"Slurm's step has {size} tasks, but its hosts have {len(hosts)}; give TF_CONFIG instead.")
    port = _port(environ, port_block(_whole(environ, "SLURM_JOB_ID") or 0))
    return _numbered("Slurm", f"task {number} of {size} of step {step}", environ, number, hosts, port, default_ps)


SCHEDULERS: dict[str, Callable[[Environ], Look]] = {
    "JobSet": jobset,
    "torchrun": torchrun,
    "MPI": mpi,
    "Slurm": slurm,
}


def port_block(number: int) -> int:
    """The first port for a launch with this number, so that two on one host seldom meet; PACELINE_PORT says otherwise.

    >>> port_block(4), port_block(184)
    (20256, 20256)
    """
    return LOWEST + BLOCK * (number % BLOCKS)


def addresses(hosts: Sequence[str], first_port: int) -> list[str]:
    """One for each process: the ports of a host go up from the first.

    >>> addresses(["a", "a", "b"], 2222)
    ['a:2222', 'a:2223', 'b:2222']
    """
    taken: dict[str, int] = {}
    made = []
    for host in hosts:
        made.append(joined(host, first_port + taken.get(host, 0)))
        taken[host] = taken.get(host, 0) + 1
    return made


def _numbered(
    source: str, what: str, environ: Environ, number: int, hosts: Sequence[str], port: int, default_ps: int = 1
) -> Look:
    """The place of one of several numbered processes: the first ones are ps."""
    size, asked = len(hosts), _own(environ, PS)
    num_ps = asked or default_ps
    if size < 2:
        return Look(source, f"{what}: alone, so no cluster")
    if number >= size:
        raise UsageError(f"{source} says {what}; numbers go from 0 to {size - 1}.")
    if num_ps >= size:
        raise UsageError(f"{PS} is {num_ps}, but {source} has started {size} processes; leave one for a worker.")
    if unknown := [host for host in hosts[:num_ps] if host.endswith(".invalid")]:
        raise UsageError(
            f"{source} tells only where process 0 is, and {len(unknown)} of the first {num_ps} are elsewhere; "
            f"use a smaller {PS}, or TF_CONFIG."
        )
    each = addresses(hosts, port)
    cluster = ClusterSpec({"ps": each[:num_ps], "worker": each[num_ps:]})
    task = Task("ps", number) if number < num_ps else Task("worker", number - num_ps)
    ps = "the first is ps" if num_ps == 1 else f"the first {num_ps} are ps"
    return Look(source, f"{what}; {ps}{'' if asked is None else f' ({PS})'}", cluster, task)


def _blocks(what: str, size: int, local: int, master: str) -> list[str]:
    """Which host has which process, where only the first host's name is known; nobody needs to reach the others."""
    if size % local:
        raise UsageError(
            f"{what} started {size} processes, {local} of them here: hosts with unequal numbers need TF_CONFIG, or "
            f"{PS}=0 if they are no cluster of ours."
        )
    names = [master if block == 0 else f"host{block}.invalid" for block in range(size // local)]
    return [name for name in names for _ in range(local)]


def _het_groups(environ: Environ) -> list[list[str]]:
    """The hosts of each part of a heterogeneous job, task by task; empty where it has no parts."""
    size = _whole(environ, "SLURM_HET_SIZE") or 0
    names = [(f"SLURM_JOB_NODELIST_HET_GROUP_{i}", f"SLURM_TASKS_PER_NODE_HET_GROUP_{i}") for i in range(size)]
    if size < 2 or any(name not in environ for pair in names for name in pair):
        return []
    return [_spread(environ, *pair) for pair in names]


def _spread(environ: Environ, hosts_name: str, counts_name: str) -> list[str]:
    """The host of each task, in the order of Slurm's distribution."""
    hosts, each = expand(environ.get(hosts_name, "")), counts(environ.get(counts_name, ""))
    if len(hosts) != len(each):
        raise UsageError(f"{hosts_name} has {len(hosts)} hosts, but {counts_name} has {len(each)}.")
    how = environ.get("SLURM_DISTRIBUTION", "block").split(":")[0].split(",")[0]
    if len(hosts) == 1 or max(each) == 1 or how == "block":
        return [host for host, count in zip(hosts, each, strict=True) for _ in range(count)]
    if how == "cyclic":
        turns = range(max(each))
        return [host for turn in turns for host, count in zip(hosts, each, strict=True) if turn < count]
    raise UsageError(f"Slurm distributes tasks by {how!r}, which does not say who is where; use --distribution=block.")


def _whole(environ: Environ, name: str) -> int | None:
    """A scheduler's number; None where it is not set, or where something else bears its name."""
    value = environ.get(name, "").strip()
    return int(value) if _WHOLE.fullmatch(value) else None


def _lacking(environ: Environ, numbers: Sequence[str], texts: Sequence[str]) -> str:
    """Why variables do not tell of a process: which is not set, or is no number.

    >>> _lacking({}, ["RANK"], ["MASTER_ADDR"]), _lacking({"RANK": "x", "MASTER_ADDR": "a"}, ["RANK"], ["MASTER_ADDR"])
    ('RANK and MASTER_ADDR are not set', "RANK is 'x', no number")
    """
    wrong = [
        f"{name} is {environ[name][:40]!r}, no number"
        for name in numbers
        if environ.get(name) and _whole(environ, name) is None
    ]
    unset = [name for name in (*numbers, *texts) if not environ.get(name)]
    told = f"{', '.join(unset[:-1])} and {unset[-1]}" if len(unset) > 1 else "".join(unset)
    return "; ".join([*wrong, *([f"{told} {'are' if len(unset) > 1 else 'is'} not set"] if unset else [])])


def _own(environ: Environ, name: str) -> int | None:
    """A number that the user has set for us."""
    if name in environ and _whole(environ, name) is None:
        raise UsageError(f"{name} is {environ[name][:40]!r}; it must be a whole number, or not be set.")
    return _whole(environ, name)


def _port(environ: Environ, default: int) -> int:
    return _own(environ, PORT) or default
