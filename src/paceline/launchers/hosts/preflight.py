"""CAN these hosts form a cluster? All of them are asked at once, before anything starts, in a few seconds.

Called by hosts/many, and by `paceline doctor`. Must never start a task, leave a process on a
host, nor let one host that does not answer hide what is wrong with the others.

    1. every host: ssh, its python, its paceline, `hosts/probe` (versions, cores, cards, free ports)
    2. its clock, beside this machine's; its address, where it is called localhost here and not by the others
    3. between the hosts: latency and bytes a second, disjoint pairs at the same time
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import msgspec

from paceline.cluster.hosts import Host, joined, tasks_on
from paceline.cluster.secret import is_loopback
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import ClusterError
from paceline.launchers.hosts import diagnosis, machine, ssh
from paceline.launchers.hosts.diagnosis import Problem, Seen
from paceline.launchers.hosts.links import Link
from paceline.launchers.hosts.probe import AskAddress, AskClock, AskLink, AskLook
from paceline.launchers.hosts.ssh import at_once
from paceline.launchers.hosts.talk import Talk

LOOK_S, CLOCK_S, LINK_S = 12.0, 3.0, 9.0  # how long an answer may take
LINKS_S = 3.0  # for all pairs together
PAIR_S = 0.3
ONLY_REACHED_S = 0.01  # where the speed is known already
LIMIT_S = 10.0  # then no further pair is measured
CLOCKS = 3


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of all hosts, by their names, and what is wrong."""

    seen: dict[str, Seen] = {}
    links: dict[tuple[str, str], Link | str] = {}  # a text: why there is none
    unmeasured: tuple[tuple[str, str], ...] = ()  # for want of time
    problems: tuple[Problem, ...] = ()
    seconds: float = 0.0

    def check(self) -> None:
        """Raise ClusterError with a sentence for each problem with which no run should start."""
        if found := diagnosis.fatal(self.problems):
            raise ClusterError(" ".join(problem.sentence for problem in found))

    def cluster(self, placed: Mapping[Task, Host]) -> ClusterSpec:
        """Every task at its host's address and at a port that is free there; `check` comes first."""
        jobs: dict[str, list[str]] = {}
        left = {name: iter(seen.ports) for name, seen in self.seen.items()}
        for task, host in placed.items():
            jobs.setdefault(task.job, []).append(joined(self.seen[host.name].address, next(left[host.name])))
        return ClusterSpec(jobs)


def of_run(placed: Mapping[Task, Host]) -> Report:
    """The hosts of a run: a port for every task, and the ways between a ps and everybody else."""
    hosts = list({host.name: host for host in placed.values()}.values())
    holders = [host.name for task, host in placed.items() if task.job == "ps"]
    pairs = [(host.name, holder) for holder in dict.fromkeys(holders) for host in hosts if host.name != holder]
    return look(hosts, {host.name: len(tasks_on(dict(placed), host)) for host in hosts}, pairs)


def look(
    hosts: Sequence[Host],
    num_ports: Mapping[str, int] | None = None,
    pairs: Iterable[tuple[str, str]] | None = None,
) -> Report:
    """Ask all hosts; of `pairs` the first connects to the second, as workers do to a ps: every_pair where nothing is
    said."""
    begun_s = time.monotonic()
    talks: dict[str, Talk] = {}
    try:
        for host in hosts:
            talks[host.name] = Talk(host)
        addresses, here = ssh.addresses(hosts), machine.look()  # while those start
        found = at_once(
            lambda host: _seen(
                talks[host.name],
                addresses[host.name],
                (num_ports or {}).get(host.name, 0),
            ),
            hosts,
        )
        seen = {each.host.name: each for each in found if isinstance(each, Seen)}
        problems = [each for each in found if isinstance(each, Problem)]
        seen = _with_addresses(talks, seen)
        for each in seen.values():
            problems += diagnosis.of_host(each, here, ssh.pip_line(each.host))
        every = every_pair([each.host for each in seen.values()]) if pairs is None else pairs
        known = [(a, b) for a, b in every if a in seen and b in seen and seen[b].sink_port]
        links = _links(talks, seen, known, until_s=begun_s + LIMIT_S)
    finally:
        at_once(Talk.close, list(talks.values()))
    unmeasured = tuple(pair for pair in known if pair not in links and pair[::-1] not in links)
    problems += [*diagnosis.of_links(seen, links), *diagnosis.of_unmeasured(unmeasured, LIMIT_S)]
    seconds = time.monotonic() - begun_s
    return Report(seen=seen, links=links, unmeasured=unmeasured, problems=tuple(problems), seconds=seconds)


def every_pair(hosts: Sequence[Host]) -> list[tuple[str, str]]:
    """Who connects to whom, so that all ways are known: first to whoever may hold a ps, as a run does; then between
    those of whom neither may.

    >>> from paceline.cluster.hosts import parse
    >>> one, two = (msgspec.structs.replace(parse(name), roles=("worker",)) for name in ("b", "c"))
    >>> every_pair([parse("a"), one, two])
    [('b', 'a'), ('c', 'a'), ('b', 'c'), ('c', 'b')]
    """
    holders = [host for host in hosts if host.has("ps")]
    others = [host for host in hosts if not host.has("ps")]
    ways = [(a, b) for b in holders for a in hosts] + [(a, b) for a in others for b in others]
    return [(a.name, b.name) for a, b in ways if a is not b]


def _seen(talk: Talk, address: str, num_ports: int) -> Seen | Problem:
    host = talk.host
    question = AskLook(token=talk.token, address=address, num_ports=num_ports, between=host.ports)
    try:
        told = talk.ask(question, LOOK_S)
        clock_s, within_s = min((_clock(talk) for _ in range(CLOCKS)), key=lambda each: each[1])
    except ClusterError as error:
        return Problem(where=host.name, sentence=str(error), is_fatal=True)
    if told.machine is None:
        why = told.error or "it says nothing about itself"
        return Problem(where=host.name, sentence=f"{host.name} cannot be looked at: {why}.", is_fatal=True)
    return Seen(
        host=host,
        machine=told.machine,
        address=address,
        ports=told.ports,
        taken=told.taken,
        num_ports=num_ports,
        clock_s=clock_s,
        clock_within_s=within_s,
        sink_port=told.sink_port,
        own_address=told.address,
    )


def _clock(talk: Talk) -> tuple[float, float]:
    """How far its clock is ahead of ours, and how well that is known: the answer left in the middle, more or less."""
    begun_s, begun = time.time(), time.monotonic()
    at_s = talk.ask(AskClock(), CLOCK_S).at_s
    half_s = (time.monotonic() - begun) / 2
    return at_s - (begun_s + half_s), half_s


def _with_addresses(talks: Mapping[str, Talk], seen: dict[str, Seen]) -> dict[str, Seen]:
    """Where a host takes its own address for loopback, which Debian's /etc/hosts does with a host's name, nobody else
    would reach what listens there: it is the address from which it reaches another host."""
    found = dict(seen)
    for name, each in seen.items():
        outside = [other.address for other in seen.values() if other is not each and not is_loopback(other.address)]
        if outside and is_loopback(each.own_address or each.address):
            with suppress(ClusterError):  # then its address stays, and the others say that they do not reach it
                told = talks[name].ask(AskAddress(outside[0]), CLOCK_S)
                found[name] = msgspec.structs.replace(each, address=told.address or each.address)
    return found


def _links(
    talks: Mapping[str, Talk], seen: Mapping[str, Seen], pairs: Sequence[tuple[str, str]], until_s: float
) -> dict[tuple[str, str], Link | str]:
    turns = disjoint(pairs)
    links: dict[tuple[str, str], Link | str] = {}
    seconds = min(PAIR_S, LINKS_S / 2 / max(1, len(turns)))

    def measured(pair: tuple[str, str]) -> Link | str:
        there, token = seen[pair[1]], talks[pair[1]].token
        back = links.get((pair[1], pair[0]))
        asked_s = ONLY_REACHED_S if isinstance(back, Link) else seconds  # a firewall may close one direction
        try:
            told = talks[pair[0]].ask(
                AskLink(host=there.address, port=there.sink_port, token=token, seconds=asked_s), LINK_S
            )
        except ClusterError as error:
            return str(error)
        return back.reversed if isinstance(back, Link) and told.link else told.link or told.error

    for turn in turns:
        if time.monotonic() < until_s:
            links.update(zip(turn, at_once(measured, turn), strict=True))
    return links


def disjoint(pairs: Iterable[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """The pairs in turns: in each, no host takes part twice.

    >>> disjoint([("a", "b"), ("a", "c"), ("b", "c"), ("c", "d")])
    [[('a', 'b'), ('c', 'd')], [('a', 'c')], [('b', 'c')]]
    """
    turns: list[list[tuple[str, str]]] = []
    for pair in pairs:
        for turn in turns:
            if not any(host in each for each in turn for host in pair):
                turn.append(pair)
                break
        else:
            turns.append([pair])
    return turns
