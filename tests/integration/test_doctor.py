"""DOES `paceline doctor` say what is wrong? This machine, and hosts behind real ssh servers; the probe by itself."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from processes import Gate, Processes
from sshd import Servers, need_sshd

from paceline.lab.measuring.hosts import hosts, lacking
from paceline.lab.measuring.processes import output_of
from paceline.launchers.hosts.diagnosis import Seen
from paceline.launchers.hosts.links import LONGEST_S, Link, Sink, bound, loopback, measure
from paceline.launchers.hosts.machine import Machine
from paceline.launchers.hosts.probe import MARK, Answer, Ask, AskAddress, AskClock, AskLink, AskLook, Probe
from paceline.launchers.ports import Reserved
from paceline.version import VERSION

TOKEN = bytes(range(16))
SHORT_S = 0.05


@pytest.fixture
def servers(processes: Processes, ports: Reserved, tmp_path: Path) -> Iterator[Servers]:
    need_sshd()
    made = Servers(processes, ports, tmp_path / "ssh")
    yield made
    made.close()


# --- the probe --------------------------------------------------------------------------------------------------------


def test_the_probe_answers_as_a_process_and_ends_with_its_stdin() -> None:
    asks: list[Ask] = [AskLook(token=TOKEN, num_ports=3), AskClock(), AskAddress("127.0.0.1")]
    begun_s = time.time()
    done = subprocess.run(
        [sys.executable, "-m", "paceline.launchers.hosts.probe"],
        input=b"".join(msgspec.json.encode(ask) + b"\n" for ask in asks),
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    look, clock, address = (msgspec.json.decode(line.removeprefix(MARK), type=Answer) for line in lines)
    assert look.machine is not None and look.machine.paceline == VERSION and look.machine.torch
    assert look.machine.cores >= 1 and look.machine.memory_mb > 100 and len(set(look.ports)) == 3
    assert begun_s <= look.at_s <= clock.at_s <= time.time()
    assert address.address == "127.0.0.1"
    for port in look.ports:
        bound([port]).close()  # let go of


def test_the_probe_imports_no_torch() -> None:
    ask = "import sys, paceline.launchers.hosts.probe as probe; probe.Probe().answer(probe.AskLook(token=b''))"
    code = f"{ask}; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, timeout=60).stdout
        == b"False\n"
    )


def test_ports_in_a_range_are_all_different_and_too_few_are_none() -> None:
    first = free_run(4)
    probe = Probe()
    try:
        answer = probe.answer(AskLook(token=TOKEN, num_ports=3, between=(first, first + 3)))
        assert sorted([*answer.ports, answer.sink_port]) == list(range(first, first + 4))
        again = Probe()
        assert again.answer(AskLook(token=TOKEN, num_ports=1, between=(answer.sink_port,) * 2)).ports == ()
        again.close()
    finally:
        probe.close()


def free_run(count: int) -> int:
    """The first of so many ports in a row that are free."""
    for first in range(21000, 60000, count):
        held = []
        try:
            held = [bound([first + number]) for number in range(count)]
            return first
        except OSError:
            continue
        finally:
            for each in held:
                each.close()
    raise AssertionError("no ports are free")


# --- links ------------------------------------------------------------------------------------------------------------


def test_loopback_is_measured_in_both_directions() -> None:
    link = loopback()
    assert link.sent_bytes_per_s > 1e7 and link.received_bytes_per_s > 1e7 and 0 < link.latency_ms < 1000


def test_a_sink_talks_to_nobody_who_does_not_know_its_token() -> None:
    sink = Sink(TOKEN)
    try:
        with pytest.raises(ConnectionError):
            measure("127.0.0.1", sink.port, bytes(16), SHORT_S)
        with pytest.raises(ConnectionError):
            measure("127.0.0.1", sink.port, TOKEN, LONGEST_S * 2)
        with socket.create_connection(("127.0.0.1", sink.port), timeout=10) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: somebody else\r\n\r\n")
            assert ended(stranger)
        assert isinstance(measure("127.0.0.1", sink.port, TOKEN, SHORT_S), Link)  # and still serves
    finally:
        sink.close()
    with pytest.raises(OSError):
        measure("127.0.0.1", sink.port, TOKEN, SHORT_S)


def ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_why_a_host_is_not_reached_is_an_answer() -> None:
    probe, port = Probe(), free_run(1)
    refused = probe.answer(AskLink(host="127.0.0.1", port=port, token=TOKEN, seconds=SHORT_S))
    unknown = probe.answer(AskLink(host="no-such-host.invalid", port=port, token=TOKEN, seconds=SHORT_S))
    assert refused.error == "connection refused" and refused.link is None
    assert "known" in unknown.error or "resolution" in unknown.error


SINK = """
import sys
from paceline.launchers.hosts.links import Sink
print(Sink(bytes(16)).port, flush=True)
sys.stdin.read()
"""
MEASURE = """
import sys
import msgspec
from paceline.launchers.hosts.links import measure
print(msgspec.json.encode(measure(sys.argv[1], int(sys.argv[2]), bytes(16))).decode())
"""


@pytest.mark.slow
@pytest.mark.hosts
def test_a_slow_link_is_measured_as_slow_as_it_is(processes: Processes) -> None:
    if why := lacking():
        pytest.skip(f"NOT TESTED: {why}")
    with hosts(2) as (first, second):
        for host in (first, second):
            limit = [*host.enter, "tc", "qdisc", "add", "dev", "outer", "root", "tbf", "rate", "10mbit"]
            if output_of([*limit, "burst", "64kb", "latency", "50ms"]) is None:
                pytest.skip("NOT TESTED: tc cannot limit a link here")
        sink = subprocess.Popen(
            [*second.enter, sys.executable, "-c", SINK], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert sink.stdout is not None
            port = int(sink.stdout.readline())
            run = processes.start(*first.enter, sys.executable, "-c", MEASURE, second.address, port).ends_with(0)
        finally:
            sink.communicate(timeout=120)
    link = msgspec.json.decode(run.text, type=Link)
    assert 4 < link.sent_bytes_per_s * 8e-6 < 12 and 4 < link.received_bytes_per_s * 8e-6 < 12


# --- the verb ---------------------------------------------------------------------------------------------------------


def test_doctor_looks_at_this_machine(processes: Processes) -> None:
    run = processes.paceline("doctor").ends_with(0)
    told = dict(line.split("\t", 1) for line in run.lines if "\t" in line)
    assert told["paceline"] == VERSION and int(told["cores"]) >= 1 and told["free ports"] == "16 of 16 asked for"
    assert "MB/s" in told["loopback"] and "No problems found." in run.lines


class Told(msgspec.Struct):
    """What --json prints."""

    ok: bool
    machine: Machine
    loopback: Link
    hosts: list[Seen]
    links: list[dict[str, object]]
    unmeasured: list[dict[str, object]]
    problems: list[dict[str, object]]
    seconds: float


@pytest.mark.slow
def test_doctor_tells_the_same_as_json(processes: Processes, servers: Servers, tmp_path: Path) -> None:
    servers.start("server1", "server2")
    path = tmp_path / "cluster.toml"
    path.write_text(f'python = "{sys.executable}"\n[hosts.server1]\nslots = 2\n[hosts.server2]\nroles = ["worker"]\n')
    run = processes.paceline("doctor", "--cluster", path, "--json", **servers.environ).ends_with(0)
    told = msgspec.json.decode(run.text, type=Told)
    assert told.ok and [each.host.name for each in told.hosts] == ["server1", "server2"]
    assert [(each["from"], each["to"]) for each in told.links] == [("server2", "server1")] and not told.unmeasured
    assert told.seconds < 15


def test_doctor_shows_hosts_and_the_ways_between(processes: Processes, servers: Servers, tmp_path: Path) -> None:
    servers.start("server1", "server2", "server3")
    path = tmp_path / "hostfile"
    path.write_text("server1 slots=1\nserver2\nserver3\n")
    run = processes.paceline("doctor", "--hostfile", path, **servers.environ).ends_with(0)
    assert "host\tserver1\tserver2\tserver3" in run.lines
    at = run.lines.index("from \\ to\tserver1\tserver2\tserver3")
    for number, line in enumerate(run.lines[at + 1 : at + 4]):
        cells = line.split("\t")
        assert cells[0] == f"server{number + 1}" and cells[number + 1] == "-"
        assert sum("MB/s" in cell for cell in cells) == 2


@pytest.mark.parametrize("in_terminal", [False, True])
def test_a_host_that_no_cluster_could_use_is_exit_code_3(
    processes: Processes, servers: Servers, in_terminal: bool
) -> None:
    servers.start("server1")
    begun_s = time.monotonic()
    run = processes.paceline(
        "doctor", "--hosts", "server1,no-such-host.invalid", in_terminal=in_terminal, **servers.environ
    )
    run.ends_with(3)
    assert time.monotonic() - begun_s < 15
    assert "Problem: no-such-host.invalid is not known" in " ".join(run.text.split())


def test_flags_that_name_no_hosts_are_exit_code_2(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text("[hosts.a]\nslotz = 2\n")
    run = processes.paceline("doctor", "--cluster", "cluster.toml").ends_with(2)
    assert run.lines == [
        "paceline: cluster.toml, line 2: there is no key 'slotz'; did you mean 'slots'? "
        "(valid: ssh, address, python, folder, slots, gpus, ports, roles)."
    ]
    processes.paceline("doctor", "--hosts", "a", "--hostfile", "b").ends_with(2)


def test_a_machine_without_loopback_is_exit_code_1(processes: Processes) -> None:
    if subprocess.run(["unshare", "--net", "true"], stderr=subprocess.DEVNULL, timeout=60).returncode:
        pytest.skip("NOT TESTED: no network namespaces here")
    run = processes.start("unshare", "--net", processes_bin("paceline"), "doctor", "--json").ends_with(1)
    told = json.loads(run.lines[0])  # stderr comes after it
    assert not told["ok"] and "cannot reach itself at 127.0.0.1" in told["problems"][0]["sentence"]


def processes_bin(name: str) -> Path:
    return Path(sys.executable).with_name(name)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_whoever_asks_may_end_in_the_middle_and_nothing_is_left(
    processes: Processes, servers: Servers, gate: Gate, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """The host's python stands still at the gate; it is there by name, and gone when its stdin has ended."""
    stands = tmp_path / "python"
    path = f"import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect({str(gate.path)!r}); import os"
    stands.write_text(f"#!{sys.executable}\n{path}\ns.sendall(b'server1 pid %d\\n' % os.getpid())\nsys.stdin.read()\n")
    stands.chmod(0o755)
    servers.start("server1")
    (tmp_path / "cluster.toml").write_text(f'[hosts.server1]\npython = "{stands}"\n')
    run = processes.paceline("doctor", "--cluster", tmp_path / "cluster.toml", **servers.environ)
    there = psutil.Process(gate.arrival().pid)
    run.signal(number)
    assert run.end() == code
    there.wait(10)
