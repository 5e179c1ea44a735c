"""WHICH Ray is meant, and what is said when none answers? Without a Ray: sockets that are none."""

import re
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from paceline.cli.main import main
from paceline.errors import EXIT_USAGE, ClusterError, UsageError
from paceline.launchers.entry import Program
from paceline.launchers.ray import ray_cluster
from paceline.launchers.ray.bundles import Wish, bundles
from paceline.launchers.ray.growing import Growth, Kind
from paceline.launchers.ray.on_ray import JOB, OnRay, check_can_fit, check_memory, packed, travelling
from paceline.launchers.ray.ray_cluster import find, parse, silence
from paceline.version import VERSION


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("on", "address"),
    [
        ("ray://head", "ray://head:10001"),
        ("ray://head:10002/", "ray://head:10002"),
        ("ray://head:6379", "head:6379"),
        ("head:6380", "head:6380"),
        ("ray://[::1]:10001", "ray://[::1]:10001"),
    ],
)
def test_addresses(on: str, address: str) -> None:
    where = parse(on)
    assert where is not None and where.address == address


@pytest.mark.parametrize("on", ["rye", "ray://", "ray://head:x", "ray://head:99999", "", "slurm"])
def test_what_is_no_address_is_refused_with_what_is_one(on: str) -> None:
    with pytest.raises(UsageError, match=r"write --on ray, --on ray://HOST:10001"):
        parse(on)


def test_without_the_extra_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'paceline\[ray\]'"):
        find("ray", {})


def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ClusterError, match=rf"No Ray answers at {address} \(RAY_ADDRESS\): Connection refused"):
            find("ray", {"RAY_ADDRESS": address})


def test_somebody_else_there() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        threading.Thread(target=lambda: server.accept()[0].sendall(b"HTTP/1.0 400 Bad\r\n"), daemon=True).start()
        assert silence(f"127.0.0.1:{server.getsockname()[1]}") == "something else listens there"


def test_somebody_silent_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "KNOCK_S", 0.1)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        assert "silent" in silence(f"ray://127.0.0.1:{server.getsockname()[1]}")


def test_a_ray_that_ran_here_and_is_gone_is_none(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    assert find("ray", {"RAY_TMPDIR": str(tmp_path)}).address == ""


def test_connecting_has_a_deadline() -> None:
    assert ray_cluster.KNOCK_S + ray_cluster.CONNECT_S <= 12  # with the start of Python and Ray still below 15
    with pytest.raises(ClusterError, match=r"did not let us in within 0\.05 s; is it the right one\?"):
        ray_cluster.within(0.05, threading.Event().wait, "It did not let us in", "is it the right one?")

    def refused() -> None:
        raise ConnectionError("version 2.1 is not 2.2\nand more")

    with pytest.raises(ClusterError, match=r"The Ray at head:6379 did not let us in: version 2\.1 is not 2\.2$"):
        ray_cluster.within(5.0, refused, "The Ray at head:6379 did not let us in", "")


@pytest.mark.parametrize(
    ("line", "lacking"),
    [
        ("ModuleNotFoundError: No module named 'paceline.launchers.ray'", "'paceline.launchers.ray'"),
        ("ImportError: cannot import name 'Place' from 'paceline.launchers.ray.actors' (/x/actors.py)", "'Place'"),
        (
            "AttributeError: Can't get attribute 'TaskActor' on <module 'paceline.launchers.ray.actors' from",
            "'TaskActor'",
        ),
    ],
)
def test_another_paceline_is_not_told_as_none(line: str, lacking: str) -> None:
    said = ray_cluster.why(RuntimeError(f"The actor failed to import\n{line}\nmore"))
    assert said.startswith(f"that machine has another paceline than this one, without {lacking}; install the same")
    assert said.endswith(f"this is {VERSION}.")


class Machines:
    """Stands for a Ray whose machines say which paceline they have: one as here, one older, one none, one nothing."""

    exceptions = SimpleNamespace(RayError=LookupError)

    def __init__(self) -> None:
        self.said = {"same": VERSION, "older": "0.0.1", "none": None, "silent": "0.0.2"}

    def nodes(self) -> list[dict[str, object]]:
        gone = {"Alive": False, "NodeID": "gone", "NodeManagerHostname": "gone"}
        return [gone, *({"Alive": True, "NodeID": name, "NodeManagerHostname": name} for name in self.said)]

    def remote(self, function: Callable[[str], str]) -> SimpleNamespace:
        assert not function.__module__.startswith("paceline")  # which Ray would have to import there
        return SimpleNamespace(options=self.options)

    def options(self, scheduling_strategy: str, num_cpus: int, max_retries: int) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda package: scheduling_strategy)

    def wait(self, asked: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        assert 0 < timeout < 10
        return [name for name in asked if name != "silent"], ["silent"]

    def get(self, name: str) -> str:
        if self.said[name] is None:
            raise LookupError
        return str(self.said[name])


def test_another_paceline_is_told_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
    for name, module in (("ray", Machines()), ("ray.util", object()), ("ray.util.scheduling_strategies", strategies)):
        monkeypatch.setitem(sys.modules, name, module)
    said = ray_cluster.why(RuntimeError("No module named 'paceline.launchers.ray'"), Machines())
    assert said.endswith(f"this is {VERSION} (older has 0.0.1).")


class FakeRay:
    """What Ray is called with; the second time it refuses."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def init(self, address: str, runtime_env: dict[str, object] | None = None, **_: object) -> None:
        self.calls.append(f"init {address} {sorted(runtime_env or {})}")
        if runtime_env:
            raise RuntimeError("Package size exceeds the maximum\nand more")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_a_folder_is_copied_only_by_who_was_let_in(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However long it takes, also to look through it: a wrong token is told at once, and then what is going on."""
    fake, where = FakeRay(), ray_cluster.Where("head:6379")
    monkeypatch.setitem(sys.modules, "ray", fake)

    def looked_through(folder: Path) -> dict[str, object]:
        fake.calls.append(capsys.readouterr().out)
        return {"working_dir": str(folder)}

    with ray_cluster.connected(where, 1, None, looked_through) as ray:
        assert ray is fake
    assert fake.calls == ["init head:6379 []", "shutdown"]
    says = r"The Ray at head:6379 did not take a copy of /code: Package size exceeds the maximum$"
    with pytest.raises(ClusterError, match=says), ray_cluster.connected(where, 1, Path("/code"), looked_through):
        pass
    told = "/code is copied to the machines of the Ray at head:6379\n"
    assert fake.calls[2:] == ["init head:6379 []", "shutdown", told, "init head:6379 ['working_dir']"]


@pytest.mark.parametrize("folder", [Path.home(), Path("/")])
def test_nobody_copies_all_that_he_has(folder: Path) -> None:
    with pytest.raises(UsageError, match="put the script into a folder of its own"):
        travelling(folder, {})


def test_the_folder_that_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    program, folder = packed(Program(script="sub/train.py"))
    assert (program.script, folder) == ("sub/train.py", tmp_path / "here")
    program, folder = packed(Program(script=str(tmp_path / "there" / "train.py")))
    assert (program.script, folder) == ("train.py", tmp_path / "there")


def test_a_submitted_job_has_brought_its_folder() -> None:
    assert travelling(Path("/code"), {}) == Path("/code")
    assert travelling(Path("/code"), {JOB: '{"runtime_env": {"working_dir": "gcs://x"}}'}) is None
    assert travelling(Path("/code"), {JOB: '{"runtime_env": {}}'}) == Path("/code")


def test_the_command_that_goes_on_names_the_same_ray() -> None:
    how = OnRay(on="ray://head", worker_cpus=2, worker_gpus=0.5, is_colocated=True)
    assert " ".join(how.flags) == "--on ray://head --worker-cpus 2 --worker-gpus 0.5 --colocate"


class RayError(Exception): ...


class GetTimeoutError(RayError): ...


def small_ray(get: Callable[..., object]) -> SimpleNamespace:
    """A Ray with one CPU that answers so."""
    return SimpleNamespace(
        nodes=lambda: [{"Alive": True, "Resources": {"CPU": 1.0}}],
        remote=lambda **_: lambda function: SimpleNamespace(remote=lambda: function),
        get=get,
        exceptions=SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError),
    )


def test_a_ray_that_cannot_say_how_far_it_grows() -> None:
    def get(ref: object, timeout: float) -> object:
        raise RayError("The task failed.")

    with pytest.raises(
        ClusterError, match=r"asks for 3 x \(1 CPU\), .* whether it may grow could not be asked: The task failed"
    ):
        check_can_fit(small_ray(get), bundles(Wish(ps=1, workers=2)), 300.0)


def test_one_that_does_not_answer_in_time_may_grow(capsys: pytest.CaptureFixture[str]) -> None:
    def get(ref: object, timeout: float) -> object:
        raise GetTimeoutError("Get timed out: some objects are not ready.")

    check_can_fit(small_ray(get), bundles(Wish(ps=1, workers=2)), 300.0)
    said = "; whether machines may be added was not said within 20 s: waiting for them, up to 300 s (--wait-s)"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("growth", "says"),
    [
        (None, "can never fit: it asks for 3 x (1 CPU), and Ray has 1 machine: 1 x (1 CPU); ask for less"),
        (Growth([Kind({"CPU": 1.0}, 1)]), "1 x (1 CPU), to which its autoscaler adds at most 1 x (1 CPU); ask for"),
        (Growth([]), "1 x (1 CPU), to which its autoscaler adds at most nothing; ask for less"),
        (
            Growth([Kind({"CPU": 0.5}, None)]),
            "1 x (1 CPU), to which its autoscaler adds at most any number of (0.5 CPU); ask",
        ),
    ],
)
def test_what_no_autoscaler_can_make_room_for_is_refused(growth: Growth | None, says: str) -> None:
    ray = small_ray(lambda *_, timeout: msgspec.json.encode(growth))
    with pytest.raises(UsageError, match=re.escape(says)):
        check_can_fit(ray, bundles(Wish(ps=1, workers=2)), 300.0)


@pytest.mark.parametrize(
    ("growth", "says"),
    [
        (Growth(), "; its autoscaler may add machines: waiting"),
        (Growth([Kind({"CPU": 2.0}, 1)]), ", to which its autoscaler adds at most 1 x (2 CPU): waiting"),
    ],
)
def test_what_an_autoscaler_may_make_room_for_is_waited_for(
    growth: Growth, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ray = small_ray(lambda *_, timeout: msgspec.json.encode(growth))
    check_can_fit(ray, bundles(Wish(ps=1, workers=2)), 300.0)
    told = f"This run asks for 3 x (1 CPU), and Ray has 1 machine: 1 x (1 CPU){says} for them, up to 300 s (--wait-s)"
    assert capsys.readouterr().out == f"{told}\n"


def test_what_is_no_address_is_refused_before_anything_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["run", "--on", "k8s", "--dry-run", str(script)])
    assert ended.value.code == EXIT_USAGE


def test_a_ray_of_ones_own_is_as_large_as_this_machine() -> None:
    with pytest.raises(UsageError, match="would get 201 tasks of at least 200 MB each, and has 24000 MB"):
        check_memory(Wish(ps=1, workers=200), 24_000.0)
    check_memory(Wish(ps=1, workers=100), 24_000.0)
