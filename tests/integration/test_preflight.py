"""IS what is wrong with a host told before anything starts? Real ssh servers on loopback, asked all at once."""

import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from processes import Processes
from sshd import Servers, need_sshd

from paceline.cluster.hosts import Host, parse, placed
from paceline.cluster.secret import is_loopback
from paceline.errors import ClusterError, UsageError
from paceline.launchers.hosts import preflight, ssh, talk
from paceline.launchers.hosts.links import Link
from paceline.launchers.ports import Reserved
from paceline.version import VERSION

LIMIT_S = 15.0  # all of it is told within
OLD = "0.0.9"


@pytest.fixture
def servers(
    processes: Processes, ports: Reserved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Servers]:
    need_sshd()
    made = Servers(processes, ports, tmp_path / "ssh")
    monkeypatch.setenv(ssh.SSH, made.environ[ssh.SSH])
    monkeypatch.setattr(preflight, "PAIR_S", 0.05)
    yield made
    made.close()


def host(name: str, **more: object) -> Host:
    return msgspec.convert({"name": name, "target": name, "python": sys.executable, **more}, Host)


def refusal(*hosts: Host, **more: object) -> str:
    """What is said of these hosts, within the limit."""
    begun_s = time.monotonic()
    with pytest.raises(ClusterError) as found:
        preflight.look(hosts, **more).check()  # type: ignore[arg-type]
    assert time.monotonic() - begun_s < LIMIT_S
    return str(found.value)


def left_on(servers: Servers) -> list[str]:
    """Processes that a session has left behind."""
    sessions = [each for server in servers.started for each in psutil.Process(server.pid).children(recursive=True)]
    _, left = psutil.wait_procs(sessions, timeout=5)
    return [str(each) for each in left]


# --- as it should be --------------------------------------------------------------------------------------------------


def test_two_hosts_are_seen_and_measured_and_nothing_is_left_there(servers: Servers) -> None:
    servers.start("server1", "server2")
    tasks = placed([host("server1", slots=2), host("server2")], num_ps=1)
    begun_s = time.monotonic()
    report = preflight.of_run(tasks)
    assert time.monotonic() - begun_s < LIMIT_S
    report.check()
    cluster = report.cluster(tasks)
    assert cluster.num_tasks("ps") == 1 and cluster.num_tasks("worker") == 3
    addresses = [cluster.address(task) for task in tasks]
    assert len(set(addresses)) == 4 and all(each.startswith("127.0.0.1:") for each in addresses)
    [(pair, link)] = report.links.items()
    assert pair == ("server2", "server1") and isinstance(link, Link)
    assert 0 < link.latency_ms < 1000
    for seen in report.seen.values():
        assert seen.machine.paceline == VERSION and seen.machine.torch
        assert abs(seen.clock_s) <= seen.clock_within_s + 0.1
    assert left_on(servers) == []


def test_this_machine_needs_no_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ssh.SSH, "/no/such/ssh")
    report = preflight.look([parse("localhost:2")], {"localhost": 2})
    report.check()
    assert len(report.seen["localhost"].ports) == 2


def test_modules_of_the_users_folder_do_no_harm(tmp_path: Path) -> None:
    for name in ("queue.py", "platform.py", "paceline.py"):
        (tmp_path / name).write_text("raise SystemExit('not this one')")
    report = preflight.look([msgspec.structs.replace(parse("localhost"), folder=str(tmp_path))])
    assert list(report.seen) == ["localhost"]
    assert talk.of_versions(report.seen["localhost"].host) == ""


def test_this_machine_is_told_to_others_by_an_address_that_they_see(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = own_address()
    servers.start("server2")
    report = preflight.look([parse("localhost"), host("server2", address=own)])
    assert not is_loopback(report.seen["localhost"].address)


def own_address() -> str:
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family == socket.AF_INET and not is_loopback(each.address):
                return each.address
    pytest.skip("NOT TESTED: this machine has no address besides loopback")


def test_what_a_login_shell_prints_does_no_harm(servers: Servers, tmp_path: Path) -> None:
    shouting = tmp_path / "python"
    shouting.write_text(f'#!/bin/sh\necho "Welcome! {{}}"\nexec {sys.executable} "$@"\n')
    shouting.chmod(0o755)
    servers.start("server1")
    preflight.look([host("server1", python=str(shouting))]).check()


# --- bad input --------------------------------------------------------------------------------------------------------


def test_an_unknown_host(servers: Servers) -> None:
    with (servers.folder / "ssh_config").open("a") as config:
        config.write("Host *.invalid\n  User me\n")
    said = refusal(parse("no-such-host.invalid"))
    assert said.startswith("no-such-host.invalid is not known") and "spelling" in said


def test_nobody_listens(servers: Servers, ports: Reserved) -> None:
    servers.alias("server1", port=int(ports.addresses(1)[0].rpartition(":")[2]))
    assert "no ssh server listens (connection refused)" in refusal(host("server1"))


def test_no_key(servers: Servers) -> None:
    servers.start("server1")
    (servers.folder / "authorized_keys").write_bytes((servers.folder / "other_key.pub").read_bytes())
    said = refusal(host("server1"))
    assert "takes none of your keys (Permission denied (publickey))" in said and "ssh-copy-id server1" in said


def test_a_key_of_the_host_that_is_not_known_or_has_changed(servers: Servers) -> None:
    servers.start("server1")
    known = (servers.folder / "known_hosts").read_text()
    (servers.folder / "known_hosts").write_text("")
    assert "not known yet; connect once by hand" in refusal(host("server1"))
    other = (servers.folder / "other_key.pub").read_text().split()
    (servers.folder / "known_hosts").write_text(f"{known.split()[0]} {other[0]} {other[1]}\n")
    assert "has changed since you last connected" in refusal(host("server1"))


def test_a_wrong_python_and_a_wrong_folder(servers: Servers, tmp_path: Path) -> None:
    servers.start("server1", "server2")
    said = refusal(host("server1", python="/no/such/python"), host("server2", folder=str(tmp_path / "none")))
    assert "server1 has no python at /no/such/python" in said
    assert f"server2 has no folder '{tmp_path / 'none'}'" in said


def test_a_python_without_paceline(servers: Servers, tmp_path: Path) -> None:
    servers.start("server1")
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    said = refusal(host("server1", python=str(bare)))
    assert said.startswith(f"server1 has no paceline in {bare}") and f"pip install paceline=={VERSION}" in said


def test_a_python_that_is_too_old(servers: Servers, tmp_path: Path) -> None:
    servers.start("server1")
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = -c ] && { echo 3.9.2; echo none; exit; }\necho "SyntaxError" >&2; exit 1\n')
    old.chmod(0o755)
    said = refusal(host("server1", python=str(old)))
    assert said.startswith(f"server1 has python 3.9.2 at {old}, and paceline needs 3.11 or newer")
    needed = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["requires-python"]
    assert needed == f">={'.'.join(map(str, talk.OLDEST))}"


def test_another_version_says_which(servers: Servers, tmp_path: Path) -> None:
    old = tmp_path / "old" / "paceline"
    old.mkdir(parents=True)
    (old / "__init__.py").write_text("")
    (old / "version.py").write_text(f'VERSION = "{OLD}"\n')
    servers.start("server1")
    servers.start("server2", PYTHONPATH=old.parent)
    said = refusal(host("server1"), host("server2"))
    assert said.startswith(f"server2 has paceline {OLD}, here is {VERSION}; install the same: `ssh ")
    assert "server1" not in said


def test_another_version_with_a_probe_of_its_own(servers: Servers, tmp_path: Path) -> None:
    import shutil

    import paceline

    old = tmp_path / "old" / "paceline"
    shutil.copytree(Path(paceline.__file__).parent, old, ignore=shutil.ignore_patterns("__pycache__", "*.gz"))
    (old / "version.py").write_text(f'VERSION = "{OLD}"\n')
    servers.start("server2", PYTHONPATH=old.parent)
    assert refusal(host("server2")).startswith(f"server2 has paceline {OLD}, here is {VERSION}")
    (old / "version.py").write_text(f'"""Edited."""\nVERSION = "{VERSION}"\n')
    [problem] = preflight.look([host("server2")]).problems
    assert not problem.is_fatal and "other files of it" in problem.sentence


def test_a_port_that_is_taken(servers: Servers) -> None:
    servers.start("server1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refusal(host("server1", ports=(port, port)), num_ports={"server1": 1})
        assert f"server1 has no 2 free ports from {port} to {port}" in said and f"({port} is in use by " in said


def test_more_cards_than_there_are(servers: Servers) -> None:
    servers.start("server1")
    assert "server1 is to have 99 GPUs" in refusal(host("server1", gpus=99))


def test_one_host_that_fails_does_not_hide_the_others(servers: Servers) -> None:
    servers.start("server1", "server2", "server3")
    report = preflight.look([host("server1"), host("server2", python="/no/such/python"), host("server3")])
    assert list(report.seen) == ["server1", "server3"] and list(report.links) == [
        ("server3", "server1"),
        ("server1", "server3"),
    ]
    assert [problem.where for problem in report.problems if problem.is_fatal] == ["server2"]


def test_an_address_where_nobody_is(servers: Servers) -> None:
    servers.start("server1", "server2")
    said = refusal(host("server1"), host("server2", address="no-such-host.invalid"))
    assert "server1 does not know the name no-such-host.invalid of server2" in said


def test_a_host_that_listens_and_says_nothing(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "OPTIONS", [*ssh.OPTIONS[:2], "-oBatchMode=yes", "-oConnectTimeout=1"])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        servers.alias("server1", port=silent.getsockname()[1])
        assert "server1 did not answer within" in refusal(host("server1"))


def test_a_host_whose_python_hangs(servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "LOOK_S", 1.0)
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec cat >/dev/null\n")
    hanging.chmod(0o755)
    servers.start("server1")
    said = refusal(host("server1", python=str(hanging)))
    assert said.startswith("server1 did not answer within ") and "look with `ssh " in said
    assert left_on(servers) == []


def test_no_ssh_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ssh.SSH, "/no/such/ssh -v")
    with pytest.raises(UsageError, match=r"'/no/such/ssh' cannot be run .*; install OpenSSH, or set PACELINE_SSH"):
        preflight.look([host("server1")])


# --- the line that is sent --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strange", ["it's", "a b", "$(touch x)", "`x`", "a;b", "--flag", "ü", "", "a\nb"])
def test_arguments_and_values_arrive_as_they_are(strange: str) -> None:
    code = "import os, sys; print(repr((sys.argv[1], os.environ['GIVEN'])))"
    line = ssh.python_line(parse("a"), "-c", code, strange, environ={"GIVEN": strange})
    said = subprocess.run(["sh", "-c", line], stdout=subprocess.PIPE, check=True, timeout=60).stdout.decode()
    assert said == repr((strange, strange)) + "\n"


@pytest.mark.parametrize(
    "more, code", [({"folder": "/no/such folder"}, ssh.NO_FOLDER), ({"python": "/no/python"}, ssh.NO_PYTHON)]
)
def test_a_folder_and_a_python_that_are_not_there_have_their_exit_codes(more: dict[str, str], code: int) -> None:
    there = msgspec.structs.replace(parse("b"), **more)
    done = subprocess.run(["sh", "-c", ssh.python_line(there, "-V")], stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == code
    [(kind, given)] = more.items()
    said = ssh.told(there, code, "")
    assert said.startswith(f"b has no {kind}") and given in said
