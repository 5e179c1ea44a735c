"""WHAT is wrong with a machine, or between two? Problems as sentences, each with what to do about it.

Called by hosts/preflight and `paceline doctor` with what was seen; pure. A problem is fatal where a run would fail
or compute something else; all others are worth knowing. Must never call something a problem that nobody can change.
"""

from collections.abc import Mapping, Sequence

import msgspec

from paceline.cluster.hosts import Host, joined
from paceline.launchers.hosts.links import Link
from paceline.launchers.hosts.machine import Machine

CLOCK_S = 1.0
LEAST_SHM_MB = 128.0  # Docker gives 64 unless it is told otherwise
LEAST_MEMORY_MB = 1000.0
LEAST_DESCRIPTORS = 1024
SLOW_BYTES_PER_S = 12e6  # a link of 100 Mbit/s
SLOW_MS = 10.0


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not as it should be; `where` is a host's name, "" where it is of several."""

    where: str
    sentence: str
    is_fatal: bool = False


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A host that answered."""

    host: Host
    machine: Machine
    address: str  # where tasks of other hosts reach it
    ports: tuple[int, ...] = ()  # free there, one for each task
    taken: dict[int, str] = {}  # where too few ports are free: those that are not -> by whom
    num_ports: int = 0  # asked for
    clock_s: float = 0.0  # ahead of this machine's clock
    clock_within_s: float = 0.0  # so well is that known
    sink_port: int = 0
    own_address: str = ""  # what it takes that address for


def of_machine(machine: Machine, where: str) -> list[Problem]:
    """What is wrong with one machine by itself.

    >>> machine = Machine(name="a", system="", python="3.11.2", executable="", paceline="", sources="", torch="2.13.0")
    >>> [problem.sentence for problem in of_machine(msgspec.structs.replace(machine, shm_mb=64.0), "a")]
    ['a has 64 MB of /dev/shm, too few for data loaders with processes; in Docker take --shm-size 1g.']
    """
    found = []
    if not machine.torch:
        found.append(_fatal(where, f"{where} has no torch in {machine.executable}; run pip install torch there."))
    if machine.gpus and machine.torch.endswith("+cpu"):
        found.append(
            _note(
                where,
                f"{where} has {cards_of(machine)}, which its torch {machine.torch} cannot use; install one with CUDA.",
            )
        )
    if machine.shm_mb is not None and machine.shm_mb < LEAST_SHM_MB:
        found.append(
            _note(
                where,
                f"{where} has {machine.shm_mb:.0f} MB of /dev/shm, too few for data loaders with processes; in Docker "
                "take --shm-size 1g.",
            )
        )
    if 0 < machine.free_memory_mb < LEAST_MEMORY_MB:
        found.append(
            _note(
                where,
                f"{where} has {machine.free_memory_mb:.0f} MB of free memory, and a task with torch takes hundreds; "
                "end what else runs there, or give it fewer tasks.",
            )
        )
    if machine.descriptors is not None and machine.descriptors < LEAST_DESCRIPTORS:
        found.append(
            _note(
                where,
                f"{where} allows a process {machine.descriptors} descriptors, and a ps takes 6 for every worker; "
                f"raise it: ulimit -n {4 * LEAST_DESCRIPTORS}.",
            )
        )
    return found


def of_loopback(where: str, link: Link | str, num_free: int, num_asked: int) -> list[Problem]:
    """What is wrong with the way from a machine to itself.

    >>> of_loopback("a", "connection refused", 16, 16)[0].sentence
    'a cannot reach itself at 127.0.0.1 (connection refused); look whether its interface lo is up (ip link).'
    """
    found = []
    if isinstance(link, str):
        said = f"{where} cannot reach itself at 127.0.0.1 ({link}); look whether its interface lo is up (ip link)."
        found.append(_fatal(where, said))
    if num_free < num_asked:
        found.append(_fatal(where, f"{where} has no {num_asked} free ports; end what listens there (ss -ltn)."))
    return found


def _in_use(taken: Mapping[int, str]) -> str:
    """
    >>> _in_use({2222: " by nginx (pid 1)"}), _in_use({})
    (' (2222 is in use by nginx (pid 1))', '')
    """
    return f" ({', '.join(f'{port} is in use{by}' for port, by in taken.items())})" if taken else ""


def of_host(seen: Seen, here: Machine, pip: str) -> list[Problem]:
    """What is wrong with a host, compared with this machine and with what was asked of it; `pip` installs ours."""
    name, there, host = seen.host.name, seen.machine, seen.host
    found = []
    if there.paceline != here.paceline:
        found.append(
            _fatal(name, f"{name} has paceline {there.paceline}, here is {here.paceline}; install the same: {pip}.")
        )
    elif there.sources != here.sources:
        found.append(
            _note(name, f"{name} has paceline {there.paceline} as here, but other files of it; copy this one's there.")
        )
    if there.torch and here.torch and there.torch != here.torch:
        found.append(
            _note(
                name,
                f"{name} has torch {there.torch}, here is {here.torch}, so results will differ in their last bits; if "
                f"that matters, install torch {here.torch} there.",
            )
        )
    if len(seen.ports) < seen.num_ports:
        where = f"from {host.ports[0]} to {host.ports[1]}" if host.ports else "at all"
        found.append(
            _fatal(
                name,
                f"{name} has no {seen.num_ports + 1} free ports {where}, one for each task and one to measure"
                f"{_in_use(seen.taken)}; give it more (`ports` in the cluster file), or end what listens there.",
            )
        )
    if host.gpus is not None and host.gpus > len(there.gpus):
        found.append(
            _fatal(
                name,
                f"{name} is to have {host.gpus} GPUs, and {cards_of(there)} is there; correct `gpus` in the file.",
            )
        )
    if host.has("worker") and host.slots > there.cores:
        found.append(
            _note(
                name,
                f"{name} has {host.slots} slots and {there.cores} cores, so its workers will wait for each other; give "
                f"it {there.cores} (slots = {there.cores} in a cluster.toml, {name}:{there.cores} in --hosts).",
            )
        )
    if abs(seen.clock_s) - seen.clock_within_s > CLOCK_S:
        way = "ahead of" if seen.clock_s > 0 else "behind"
        found.append(
            _note(
                name,
                f"The clock of {name} is {abs(seen.clock_s):.1f} s {way} this machine's, so times in logs will not "
                "agree; let ntp set it (timedatectl set-ntp true).",
            )
        )
    return [*found, *of_machine(there, name)]


def of_link(first: Seen, second: Seen, link: Link | str) -> list[Problem]:
    """What is wrong between two hosts; a text says why the first did not reach the second. Between hosts of which
    neither may hold a ps nothing is ever sent.

    >>> def seen(name: str) -> Seen:
    ...     machine = Machine(name=name, system="", python="", executable="", paceline="", sources="", torch="")
    ...     return Seen(host=Host(name=name, target=name), machine=machine, address=name, sink_port=9000)
    >>> of_link(seen("a"), seen("b"), "timed out")[0].sentence[:56]
    'a cannot reach b at b:9000 (timed out); open the ports o'
    """
    a, b = first.host.name, second.host.name
    if not first.host.has("ps") and not second.host.has("ps"):
        return []
    if isinstance(link, str):
        return [_fatal(a, _unreached(a, second, link))]
    if link.bytes_per_s < SLOW_BYTES_PER_S:
        return [
            _note(
                a,
                f"Between {a} and {b} are {link.bytes_per_s * 8e-6:.1f} Mbit/s; consider --wire bfloat16, or --mode "
                "local with many --local-steps.",
            )
        ]
    if link.latency_ms > SLOW_MS:
        return [
            _note(
                a,
                f"Between {a} and {b} a round trip takes {link.latency_ms:.0f} ms, and every step waits for one; "
                "consider --mode local with many --local-steps.",
            )
        ]
    return []


def of_links(seen: Mapping[str, Seen], links: Mapping[tuple[str, str], Link | str]) -> list[Problem]:
    """What is wrong between all hosts; what two notice in both directions is said once."""
    found: list[Problem] = []
    noted: set[frozenset[str]] = set()
    for (a, b), link in links.items():
        problems = of_link(seen[a], seen[b], link)
        found += [problem for problem in problems if problem.is_fatal or {a, b} not in noted]
        noted.add(frozenset((a, b)))
    return found


def of_unmeasured(pairs: Sequence[tuple[str, str]], limit_s: float) -> list[Problem]:
    """That time was up before all ways were looked at.

    >>> of_unmeasured([("a", "b"), ("b", "a"), ("b", "c")], 10.0)[0].sentence
    '2 pairs of hosts were not measured: 10 s were up; look at fewer at a time, as in paceline doctor --hosts b,c.'
    """
    different = {frozenset(pair): pair for pair in pairs}
    if not different:
        return []
    count = f"{len(different)} pairs of hosts were" if len(different) > 1 else "1 pair of hosts was"
    advice = f"look at fewer at a time, as in paceline doctor --hosts {','.join(pairs[-1])}"
    return [_note("", f"{count} not measured: {limit_s:g} s were up; {advice}.")]


def _unreached(a: str, second: Seen, why: str) -> str:
    b, at = second.host.name, joined(second.address, second.sink_port)
    if "known" in why or "resolution" in why:
        return f"{a} does not know the name {second.address} of {b}; give {b} an address (`address` in a cluster.toml)."
    if "another machine" in why:
        return f"{a} reaches another machine than {b} at {at}; give {b} an address (`address` in a cluster.toml)."
    return (
        f"{a} cannot reach {b} at {at} ({why}); open the ports of {b} for {a} in its firewall (`ports` in a "
        "cluster.toml limits them), or give its address in that network (`address`)."
    )


def fatal(problems: Sequence[Problem]) -> list[Problem]:
    """Those with which no run should start."""
    return [problem for problem in problems if problem.is_fatal]


def cards_of(machine: Machine) -> str:
    """The cards of a machine, in words.

    >>> cards_of(Machine(name="", system="", python="", executable="", paceline="", sources="", torch=""))
    'no GPU'
    """
    names: Mapping[str, int] = {gpu.name: sum(each.name == gpu.name for each in machine.gpus) for gpu in machine.gpus}
    return ", ".join(f"{count} {name}" if count > 1 else name for name, count in names.items()) or "no GPU"


def _fatal(where: str, sentence: str) -> Problem:
    return Problem(where=where, sentence=sentence, is_fatal=True)


def _note(where: str, sentence: str) -> Problem:
    return Problem(where=where, sentence=sentence)
