"""HOW BUSY were tasks and cables, second by second? What lab/scripts/hosts_script saw of a run, and its means.

Read by lab/matrices/watch and lab/results/task_series. Pure: no clock, no file; what /proc/net/dev says comes in as
text.
"""

import msgspec

from paceline.telemetry.usage import Net

LOOPBACK = "lo"


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One look: cores of each task since the one before, and what went through each host's interfaces so far."""

    at_s: float
    cores: dict[str, float]
    hosts: list[Net]


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """A run, from its first process to its last."""

    looks: list[Look] = []
    wall_s: float = 0.0
    cpu_s: dict[str, float] = {}  # of every task
    is_alone: bool = True  # nobody else's bytes are in it: the hosts were namespaces of its own

    def net(self, host: int) -> Net:
        """All that went through a host's interfaces."""
        return self.looks[-1].hosts[host].since(self.looks[0].hosts[host]) if self.looks else Net()

    @property
    def loopback_bytes(self) -> int:
        return sum(self.net(host).loopback_bytes for host in range(self.num_hosts))

    @property
    def outer_bytes(self) -> int:
        """From host to host: what one of them has sent and the other received is counted once."""
        return sum(self.net(host).outer_sent_bytes for host in range(self.num_hosts))

    @property
    def num_hosts(self) -> int:
        return len(self.looks[0].hosts) if self.looks else 0

    def mb_per_s(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """When, and how much went through all interfaces in every second since the look before.

        >>> looks = [Look(at_s=at, cores={}, hosts=[Net(loopback_bytes=int(at * 3e6))]) for at in (0.0, 1.0, 3.0)]
        >>> Watched(looks=looks).mb_per_s()
        ((1.0, 3.0), (3.0, 3.0))
        """
        pairs = [(a, b) for a, b in zip(self.looks, self.looks[1:], strict=False) if b.at_s > a.at_s]
        rates = (
            sum(_crossed(now.since(then)) for now, then in zip(b.hosts, a.hosts, strict=True)) / 1e6 / (b.at_s - a.at_s)
            for a, b in pairs
        )
        return tuple(b.at_s for _, b in pairs), tuple(rates)

    def cores(self, task: str, last_s: float = 0.0) -> float:
        """Processor seconds of a task a second: at the end, for so long; over the whole run, if no two looks are in it.

        >>> looks = [Look(at_s=at, cores={"ps:0": at}, hosts=[]) for at in (1.0, 2.0, 3.0)]
        >>> Watched(looks=looks, wall_s=3.0, cpu_s={"ps:0": 3.0}).cores("ps:0", last_s=1.5)
        2.5
        """
        seen = [look.cores[task] for look in self.looks if look.at_s >= self.wall_s - last_s and task in look.cores]
        if len(seen) > 1:
            return sum(seen) / len(seen)
        return self.cpu_s.get(task, 0.0) / self.wall_s if self.wall_s > 0 else 0.0


def _crossed(net: Net) -> int:
    return net.loopback_bytes + net.outer_sent_bytes


def net_of(text: str) -> Net:
    """What /proc/net/dev says of a host; on loopback every byte is counted once, as received.

    >>> head = "Inter-|   Receive\\n face |bytes packets\\n"
    >>> net_of(head + "    lo:  70 1 0 0 0 0 0 0  70 1 0 0 0 0 0 0\\n outer: 10 1 0 0 0 0 0 0  25 1 0 0 0 0 0 0\\n")
    Net(outer_sent_bytes=25, outer_received_bytes=10, loopback_bytes=70)
    """
    loopback = received = sent = 0
    for line in text.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        values = numbers.split()
        if name.strip() == LOOPBACK:
            loopback += int(values[0])
        else:
            received, sent = received + int(values[0]), sent + int(values[8])
    return Net(outer_sent_bytes=sent, outer_received_bytes=received, loopback_bytes=loopback)
