"""WHICH hosts are meant, and what goes where? Every spelling that people have; a mistake is told with its line."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster import hosts
from paceline.cluster.host_files import from_flag, from_hostfile, from_toml, named
from paceline.cluster.hosts import Host, parse, placed
from paceline.cluster.spec import Task
from paceline.errors import UsageError

NAMES = st.from_regex(r"[a-z][a-z0-9]{0,8}(-[a-z0-9]{1,4})?(\.[a-z]{2,5})?", fullmatch=True)
SLOTS = st.integers(0, 64)


def refusal(call: object, *args: object) -> str:
    with pytest.raises(UsageError) as found:
        call(*args)  # type: ignore[operator]
    said = str(found.value)
    assert said.endswith(".") and "\n" not in said
    return said


def slots(found: list[Host]) -> dict[str, int]:
    return {host.name: host.slots for host in found}


# --- --hosts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, target, name, count",
    [
        ("server1", "server1", "server1", 1),
        ("server1:2", "server1", "server1", 2),
        ("me@server1:2", "me@server1", "server1", 2),
        ("me.too@10.0.0.1", "me.too@10.0.0.1", "10.0.0.1", 1),
        ("[fe80::1]:3", "fe80::1", "fe80::1", 3),
        ("me@[::1]", "me@::1", "::1", 1),
        ("gpu-1.example.com:0", "gpu-1.example.com", "gpu-1.example.com", 0),
        ("under_score", "under_score", "under_score", 1),
    ],
)
def test_a_host_as_it_is_written(text: str, target: str, name: str, count: int) -> None:
    host = parse(text)
    assert (host.target, host.name, host.slots, host.roles) == (target, name, count, ("ps", "worker"))


@pytest.mark.parametrize(
    "text, told",
    [
        ("server1:two", "'two' slots"),
        ("server1:", "'' slots"),
        ("server1:-1", "'-1' slots"),
        ("server1:2222", "~/.ssh/config (Port)"),
        ("fe80::1", "write [fe80::1]:1"),
        ("[fe80::1", "is no host"),
        ("[nothing]:1", "is no host"),
        ("-oProxyCommand=touch", "is no host"),
        ("me@-oProxyCommand=x", "is no host"),
        ("-oX@server", "is no host"),
        ("@server", "is no host"),
        ("a b", "is no host"),
        ("a;rm", "is no host"),
        ("$(x)", "is no host"),
        ("", "is no host"),
    ],
)
def test_what_is_no_host(text: str, told: str) -> None:
    assert told in refusal(parse, text)


def test_hosts_by_commas() -> None:
    assert slots(from_flag("a:2, b ,a")) == {"a": 3, "b": 1}
    assert "--hosts is empty" in refusal(from_flag, " , ")
    assert "with one user only" in refusal(from_flag, "me@a,you@a")


@given(st.lists(st.tuples(NAMES, SLOTS), min_size=1, max_size=8))
def test_every_spelling_says_the_same(pairs: list[tuple[str, int]]) -> None:
    wanted: dict[str, int] = {}
    for name, count in pairs:
        wanted[name] = wanted.get(name, 0) + count
    assert slots(from_flag(",".join(f"{name}:{count}" for name, count in pairs))) == wanted
    for line in (
        "{} slots={}",
        "{}:{}",
        "  {}\tslots={}  # mine",
        "{} slots={} max-slots=64",
        "{} max_slots=64 slots={}",
    ):
        text = "# a hostfile\n\n" + "\n".join(line.format(name, count) for name, count in pairs) + "\n"
        assert slots(from_hostfile(text, "F")) == wanted
    repeated = "\n".join(name for name, count in pairs for _ in range(count))
    if repeated:
        assert slots(from_hostfile(repeated, "F")) == {name: count for name, count in wanted.items() if count}
    tables = "\n".join(f'[hosts."{name}"]\nslots = {count}' for name, count in wanted.items())
    assert slots(from_toml(tables, "F")) == wanted


# --- hostfiles --------------------------------------------------------------------------------------------------------


def test_a_hostfile_of_each_kind() -> None:
    deepspeed = "worker-1 slots=4\nworker-2 slots=4\n"
    open_mpi = "# comment\naa slots=2 max-slots=4\nbb slots=2\r\ncc\ncc\n"
    horovod = "host1 slots=2\nhost2:3\n"
    plain = "\n10.0.0.1\n\nme@10.0.0.2 # the other one\n"
    assert slots(from_hostfile(deepspeed, "F")) == {"worker-1": 4, "worker-2": 4}
    assert slots(from_hostfile(open_mpi, "F")) == {"aa": 2, "bb": 2, "cc": 2}
    assert slots(from_hostfile(horovod, "F")) == {"host1": 2, "host2": 3}
    assert slots(from_hostfile(plain, "F")) == {"10.0.0.1": 1, "10.0.0.2": 1}


@pytest.mark.parametrize(
    "text, told",
    [
        ("a\nb slots=x", "F, line 2: 'slots=x' has 'x' slots"),
        ("a slotz=2", "F, line 1: 'slotz=2' says nothing known of host a; did you mean 'slots'?"),
        ("# one\n\na b", "F, line 3: 'b' stands behind host a; write one host a line"),
        ("a:2 slots=3", "F, line 1: host a has its slots twice"),
        ("a slots=2 slots=3", "F, line 1: host a has slots twice"),
        ("a slots=4 max-slots=2", "F, line 1: host a has 4 slots and max-slots=2"),
        ("a:b:c", "F, line 1: 'a:b:c' has 'b:c' slots"),
        ("-F/etc/x", "F, line 1: '-F/etc/x' is no host"),
        ("# nothing", "F names no host"),
        ("", "F names no host"),
    ],
)
def test_a_bad_line_has_its_number(text: str, told: str) -> None:
    assert told in refusal(from_hostfile, text, "F")


# --- cluster.toml -----------------------------------------------------------------------------------------------------

WHOLE = """
python = "/opt/venv/bin/python"
ports = "29500-29600"

[hosts.server1]
ssh = "me@server1.example.com"
address = "10.0.0.1"
folder = "~/project"
slots = 2
gpus = 1
roles = ["worker", "ps"]

[hosts."server2.example.com"]
python = "python3.12"
roles = ["worker"]
"""


def test_a_whole_cluster_file() -> None:
    first, second = from_toml(WHOLE, "F")
    assert first == Host(
        name="server1",
        target="me@server1.example.com",
        address="10.0.0.1",
        python="/opt/venv/bin/python",
        folder="~/project",
        slots=2,
        gpus=1,
        ports=(29500, 29600),
        roles=("ps", "worker"),
    )
    assert (second.target, second.python, second.roles, second.gpus) == (
        "server2.example.com",
        "python3.12",
        ("worker",),
        None,
    )


@pytest.mark.parametrize(
    "text, told",
    [
        ("[hosts.a]\nslot = 2", "F, line 2: there is no key 'slot'; did you mean 'slots'?"),
        ("pyton = 'x'\n[hosts.a]", "F, line 1: there is no key 'pyton'; did you mean 'python'?"),
        ("[hosts.a]\nslots = '2'", "F, line 2: slots is '2'"),
        ("[hosts.a]\nslots = true", "F, line 2: slots is True"),
        ("slots = -1\n[hosts.a]", "F, line 1: slots is -1"),
        ("[hosts.a]\n\nroles = ['pss']", "F, line 3: there is no role 'pss'; did you mean 'ps'?"),
        ("[hosts.a]\nroles = []", "F, line 2: roles is []"),
        ("[hosts.a]\nroles = 'ps'", "F, line 2: roles is 'ps'"),
        ("[hosts.a]\nssh = '-oProxyCommand=x'", "F, line 2: ssh is '-oProxyCommand=x'"),
        ("[hosts.a]\nssh = 'a b'", "F, line 2: ssh is 'a b'"),
        ("[hosts.a]\naddress = '10.0.0.1:22'", "F, line 2: address is '10.0.0.1:22'"),
        ("[hosts.a]\nports = '9-1'", "F, line 2: ports is '9-1'"),
        ("[hosts.a]\nports = 9", "F, line 2: ports is 9"),
        ("[hosts.a]\npython = ''", "F, line 2: python is ''"),
        ("[hosts.a]\npython = 3", "F, line 2: python is 3"),
        (
            "[hosts.a.example]\nslots = 1",
            """F, line 1: a host's name with dots stands in quotes, such as [hosts."a.exa""",
        ),
        ("[hosts.'a;b']\nslots = 1", "F, line 1: 'a;b' is no host's name"),
        ("[hosts]\na = 2", "F, line 2: host a is 2; give it a table: [hosts.a]"),
        ("hosts = 3", "F has no hosts"),
        ("", "F has no hosts"),
        ("[hosts.a\n", "F, line 1: '[hosts.a' is no TOML"),
    ],
)
def test_a_bad_key_has_its_line(text: str, told: str) -> None:
    assert told in refusal(from_toml, text, "F")


def test_the_shape_in_the_module_is_read() -> None:
    from paceline.cluster import host_files

    shown = [line[4:] for line in (host_files.__doc__ or "").splitlines() if line.startswith("    ")]
    [host] = from_toml("\n".join(shown), "F")
    assert host.slots == 2 and host.ports == (29500, 29600)


def test_one_flag_names_them(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text("a slots=2\n")
    assert slots(named(None, str(path), None)) == {"a": 2} and named(None, None, None) == []
    assert "--hosts and --hostfile both say" in refusal(named, "a", str(path), None)
    assert "cannot be read: No such file" in refusal(named, None, str(tmp_path / "none"), None)
    path.write_bytes(b"\xff\xfe\x00")
    assert "it is no text" in refusal(named, None, str(path), None)


# --- what goes where --------------------------------------------------------------------------------------------------


ROLES = st.sampled_from([("ps",), ("worker",), ("ps", "worker")])


@given(st.lists(st.tuples(SLOTS, ROLES), min_size=1, max_size=6), st.integers(1, 6), st.integers(1, 80) | st.none())
def test_tasks_are_placed_in_order_and_within_slots(
    shape: list[tuple[int, tuple[str, ...]]], num_ps: int, workers: int | None
) -> None:
    made = [Host(name=f"h{at}", target=f"h{at}", slots=count, roles=roles) for at, (count, roles) in enumerate(shape)]
    room, holders = hosts.num_workers(made), [host for host in made if host.has("ps")]
    if not holders or not room or (workers or 1) > room:
        refusal(placed, made, num_ps, workers)
        return
    found = placed(made, num_ps, workers)
    assert list(found) == [
        *(Task("ps", index) for index in range(num_ps)),
        *(Task("worker", index) for index in range(workers or room)),
    ]
    for host in made:
        on_it = hosts.tasks_on(found, host)
        assert sum(task.job == "worker" for task in on_it) <= (host.slots if host.has("worker") else 0)
        ps = sum(task.job == "ps" for task in on_it)
        assert not ps or host.has("ps")
        assert not host.has("ps") or num_ps // len(holders) <= ps <= -(-num_ps // len(holders))
    order = [made.index(host) for task, host in found.items() if task.job == "worker"]
    assert order == sorted(order)


def test_what_does_not_fit_is_one_sentence() -> None:
    two = from_flag("a:2,b:1")
    assert refusal(placed, two, 1, 4).startswith("4 workers do not fit: the hosts have 3 slots (a 2, b 1); take --work")
    assert "No host has a slot" in refusal(placed, [parse("a:0")], 1, None)
    assert "No host may hold a ps" in refusal(placed, from_toml("[hosts.a]\nroles = ['worker']", "F"), 1, None)
    assert "at least 1 of each" in refusal(placed, two, 0, 1)
    assert "No hosts are named" in refusal(placed, [], 1, None)
