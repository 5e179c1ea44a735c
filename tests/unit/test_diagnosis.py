"""WHAT is called a problem, and what a note? Machines and links that were seen; and which address a host is told by."""

from typing import cast

import msgspec
import pytest

from paceline.cluster.hosts import Host, placed
from paceline.errors import ClusterError
from paceline.launchers.hosts import diagnosis, machine, preflight, ssh, table
from paceline.launchers.hosts.diagnosis import Problem, Seen
from paceline.launchers.hosts.links import Link
from paceline.launchers.hosts.machine import Gpu, Machine
from paceline.launchers.hosts.preflight import Report
from paceline.launchers.hosts.probe import Answer, Ask, AskAddress, AskLink, AskLook
from paceline.launchers.hosts.talk import Talk

HERE = Machine(
    name="a", system="Linux", python="3.11.7", executable="/python", paceline="0.2.0", sources="s", torch="2.13.0+cpu",
    cores=4, memory_mb=8e3, free_memory_mb=6e3, shm_mb=4e3, descriptors=20000,
)  # fmt: skip
FAST = Link(latency_ms=0.2, sent_bytes_per_s=118e6, received_bytes_per_s=117e6)
CARD = Gpu(name="NVIDIA H200", memory_mb=141e3, free_mb=140e3)


def changed(**facts: object) -> Machine:
    return msgspec.structs.replace(HERE, **facts)


def seen(name: str = "b", host: dict[str, object] | None = None, machine: Machine = HERE, **more: object) -> Seen:
    made = msgspec.convert({"name": name, "target": name, **(host or {})}, Host)
    facts = {"address": f"10.0.0.{ord(name[0])}", "sink_port": 9000, **more}
    return Seen(host=made, machine=machine, **facts)  # type: ignore[arg-type]


def only(problems: list[Problem]) -> Problem:
    [problem] = problems
    assert problem.sentence.endswith(".") and "\n" not in problem.sentence and "; " in problem.sentence  # what to do
    return problem


def test_nothing_is_wrong_with_a_machine_as_it_should_be() -> None:
    assert diagnosis.of_machine(HERE, "a") == [] and diagnosis.of_host(seen(), HERE, "`pip`") == []
    assert diagnosis.of_link(seen("a"), seen("b"), FAST) == [] and diagnosis.of_loopback("a", FAST, 16, 16) == []


@pytest.mark.parametrize(
    "facts, told, is_fatal",
    [
        ({"torch": ""}, "a has no torch in /python", True),
        ({"gpus": (CARD, CARD)}, "a has 2 NVIDIA H200, which its torch 2.13.0+cpu cannot use", False),
        ({"shm_mb": 64.0}, "--shm-size 1g", False),
        ({"free_memory_mb": 300.0}, "; end what else runs there, or give it fewer tasks", False),
        ({"descriptors": 256}, "ulimit -n 4096", False),
    ],
)
def test_what_is_wrong_with_a_machine(facts: dict[str, object], told: str, is_fatal: bool) -> None:
    problem = only(diagnosis.of_machine(changed(**facts), "a"))
    assert told in problem.sentence and problem.is_fatal == is_fatal


@pytest.mark.parametrize(
    "host, told, is_fatal",
    [
        (seen(machine=changed(paceline="0.1.0")), "b has paceline 0.1.0, here is 0.2.0; install the same: `pip`", True),
        (seen(machine=changed(sources="other")), "but other files of it", False),
        (seen(machine=changed(torch="2.6.0+cpu")), "; if that matters, install torch 2.13.0+cpu there", False),
        (seen(num_ports=1, taken={2222: " by nginx (pid 1)"}), "(2222 is in use by nginx (pid 1)); give it more", True),
        (seen(num_ports=3, ports=()), "b has no 4 free ports at all", True),
        (seen(host={"gpus": 2}), "b is to have 2 GPUs, and no GPU is there", True),
        (
            seen(host={"slots": 8}),
            "b has 8 slots and 4 cores, so its workers will wait for each other; give it 4 (slots = 4",
            False,
        ),
        (seen(clock_s=2.5), "The clock of b is 2.5 s ahead of this machine's", False),
        (seen(clock_s=-9.0, clock_within_s=1.0), "9.0 s behind", False),
    ],
)
def test_what_is_wrong_with_a_host(host: Seen, told: str, is_fatal: bool) -> None:
    problem = only(diagnosis.of_host(host, HERE, "`pip`"))
    assert told in problem.sentence and problem.is_fatal == is_fatal and problem.where == "b"


def test_a_clock_that_is_not_known_well_is_no_problem() -> None:
    assert diagnosis.of_host(seen(clock_s=2.5, clock_within_s=2.0), HERE, "") == []


@pytest.mark.parametrize(
    "link, told, is_fatal",
    [
        (
            Link(latency_ms=1, sent_bytes_per_s=1.2e6, received_bytes_per_s=9e9),
            "are 9.6 Mbit/s; consider --wire",
            False,
        ),
        (Link(latency_ms=1, sent_bytes_per_s=0.0, received_bytes_per_s=0.0), "are 0.0 Mbit/s; consider --wire", False),
        (Link(latency_ms=80, sent_bytes_per_s=1e9, received_bytes_per_s=1e9), "a round trip takes 80 ms", False),
        ("timed out", "a cannot reach b at 10.0.0.98:9000 (timed out); open the ports of b for a", True),
        ("name or service not known", "a does not know the name 10.0.0.98 of b", True),
        ("another machine answers there", "a reaches another machine than b", True),
    ],
)
def test_what_is_wrong_between_two_hosts(link: Link | str, told: str, is_fatal: bool) -> None:
    problem = only(diagnosis.of_link(seen("a"), seen("b"), link))
    assert told in problem.sentence and problem.is_fatal == is_fatal


@pytest.mark.parametrize("link", ["timed out", Link(latency_ms=80, sent_bytes_per_s=1e3, received_bytes_per_s=1e3)])
def test_no_run_needs_a_way_between_hosts_without_a_ps(link: Link | str) -> None:
    worker = {"roles": ("worker",)}
    assert diagnosis.of_link(seen("a", worker), seen("b", worker), link) == []
    assert diagnosis.of_link(seen("a", worker), seen("b"), link) != []


def test_only_what_is_fatal_stops_a_run() -> None:
    note, worse = Problem(where="a", sentence="A note."), Problem(where="a", sentence="No.", is_fatal=True)
    Report(problems=(note,)).check()
    with pytest.raises(ClusterError) as found:
        Report(problems=(note, worse, worse)).check()
    assert str(found.value) == "No. No." and found.value.exit_code == 3


def test_every_task_has_an_address_of_its_own() -> None:
    first, second = seen("a", {"slots": 2}, ports=(1001, 1002, 1003)), seen("b", ports=(1001,), address="fe80::1")
    report = Report(seen={"a": first, "b": second})
    cluster = report.cluster(placed([first.host, second.host], num_ps=1))
    assert cluster.as_dict() == {
        "ps": ["10.0.0.97:1001"],
        "worker": ["10.0.0.97:1002", "10.0.0.97:1003", "[fe80::1]:1001"],
    }


class Sighted:
    """Stands for a host that knows from which address it reaches others."""

    def ask(self, question: Ask, timeout_s: float) -> Answer:
        assert isinstance(question, AskAddress) and timeout_s > 0
        return Answer(at_s=0.0, address=f"192.168.0.{question.host.rpartition('.')[2]}")


def test_a_name_that_its_own_host_takes_for_loopback_is_replaced() -> None:
    """Debian: `127.0.1.1 server1` in /etc/hosts of server1."""
    debian, plain = seen("a", address="server1", own_address="127.0.1.1"), seen("b", own_address="10.0.0.98")
    talks = {name: cast(Talk, Sighted()) for name in ("a", "b")}
    found = preflight._with_addresses(talks, {"a": debian, "b": plain})
    assert (found["a"].address, found["b"].address) == ("192.168.0.98", "10.0.0.98")
    assert preflight._with_addresses(talks, {"a": debian})["a"].address == "server1"  # nobody else is there


class Dumb:
    """Stands for a host that cannot look at itself."""

    host, token = Host(name="b", target="b"), b""

    def ask(self, question: Ask, timeout_s: float) -> Answer:
        return Answer(at_s=0.0, error="/proc is not there")


def test_a_host_that_cannot_look_at_itself_is_a_problem() -> None:
    found = preflight._seen(cast(Talk, Dumb()), "b", 0)
    assert found == Problem(where="b", sentence="b cannot be looked at: /proc is not there.", is_fatal=True)


def test_the_matrix() -> None:
    report = Report(
        seen={"a": seen("a"), "b": seen("b", machine=changed(gpus=(CARD,), torch="2.13.0"))},
        links={("b", "a"): FAST},
    )
    headers, rows = table.matrix(report)
    assert headers == ["from \\ to", "a", "b"]
    assert rows == [["a", "-", "117 MB/s, 0.20 ms"], ["b", "118 MB/s, 0.20 ms", "-"]]


class Prompt:
    """Stands for a host that answers everything at once."""

    def __init__(self, host: Host) -> None:
        self.host, self.token = host, b""

    def ask(self, question: Ask, timeout_s: float) -> Answer:
        if isinstance(question, AskLook):
            return Answer(at_s=0.0, machine=HERE, sink_port=9000)
        return Answer(at_s=0.0, link=FAST if isinstance(question, AskLink) else None)

    def close(self) -> None:
        """Nothing was started."""


@pytest.fixture
def three_hosts(monkeypatch: pytest.MonkeyPatch) -> list[Host]:
    """One that may hold a ps, and two that may not."""
    monkeypatch.setattr(preflight, "Talk", Prompt)
    monkeypatch.setattr(machine, "look", lambda: HERE)
    monkeypatch.setattr(ssh, "addresses", lambda hosts: {host.name: host.name for host in hosts})
    return [seen("a").host, seen("b", {"roles": ("worker",)}).host, seen("c", {"roles": ("worker",)}).host]


def test_all_ways_are_measured_also_between_workers(three_hosts: list[Host]) -> None:
    report = preflight.look(three_hosts)
    _, rows = table.matrix(report)
    assert [["MB/s" in cell for cell in row[1:]] for row in rows] == [[a != b for b in range(3)] for a in range(3)]
    assert report.unmeasured == () and not [each for each in report.problems if "measured" in each.sentence]


def test_what_time_did_not_allow_is_told(three_hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "LIMIT_S", 0.0)
    report = preflight.look(three_hosts)
    _, rows = table.matrix(report)
    assert rows[1] == ["b", "not measured", "-", "not measured"]
    [note] = [each for each in report.problems if "measured" in each.sentence]
    assert note.sentence.startswith("3 pairs of hosts were not measured: 0 s were up; look at") and not note.is_fatal


def test_ways_to_a_ps_come_first(three_hosts: list[Host]) -> None:
    assert [b for _, b in preflight.every_pair([*three_hosts[1:], three_hosts[0]])][:2] == ["a", "a"]
