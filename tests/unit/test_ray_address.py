"""WHICH Ray is meant, and what is said when none answers? Without a Ray: sockets that are none."""

import socket
import sys
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.cli.main import main
from paceline.errors import EXIT_USAGE, ClusterError, UsageError
from paceline.launchers import ray_cluster
from paceline.launchers.bundles import Wish, bundles
from paceline.launchers.entry import Program
from paceline.launchers.on_ray import JOB, OnRay, check_can_fit, packed, runtime_env
from paceline.launchers.ray_cluster import find, parse, silence


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
    """However long it takes, a wrong token is told at once."""
    fake, where = FakeRay(), ray_cluster.Where("head:6379")
    monkeypatch.setitem(sys.modules, "ray", fake)
    with ray_cluster.connected(where, 1, {}) as ray:
        assert ray is fake
    assert fake.calls == ["init head:6379 []", "shutdown"]
    says = r"The Ray at head:6379 did not take a copy of /code: Package size exceeds the maximum$"
    with pytest.raises(ClusterError, match=says), ray_cluster.connected(where, 1, {"working_dir": "/code"}):
        pass
    assert fake.calls[2:] == ["init head:6379 []", "shutdown", "init head:6379 ['working_dir']"]
    assert "/code is copied to the machines of the Ray at head:6379" in capsys.readouterr().out


@pytest.mark.parametrize("folder", [Path.home(), Path("/")])
def test_nobody_copies_all_that_he_has(folder: Path) -> None:
    with pytest.raises(UsageError, match="put the script into a folder of its own"):
        runtime_env(folder, {})


def test_the_folder_that_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    program, folder = packed(Program(script="sub/train.py"))
    assert (program.script, folder) == ("sub/train.py", tmp_path / "here")
    program, folder = packed(Program(script=str(tmp_path / "there" / "train.py")))
    assert (program.script, folder) == ("train.py", tmp_path / "there")


def test_a_submitted_job_has_brought_its_folder() -> None:
    assert runtime_env(Path("/code"), {})["working_dir"] == "/code"
    assert runtime_env(Path("/code"), {JOB: '{"runtime_env": {"working_dir": "gcs://x"}}'}) == {}
    assert "working_dir" in runtime_env(Path("/code"), {JOB: '{"runtime_env": {}}'})


def test_the_command_that_goes_on_names_the_same_ray() -> None:
    how = OnRay(on="ray://head", worker_cpus=2, worker_gpus=0.5, is_colocated=True)
    assert " ".join(how.flags) == "--on ray://head --worker-cpus 2 --worker-gpus 0.5 --colocate"


def test_a_ray_that_does_not_say_how_far_it_grows() -> None:
    class GetTimeoutError(Exception): ...

    def get(ref: object, timeout: float) -> object:
        raise GetTimeoutError("Get timed out: some objects are not ready.")

    ray = SimpleNamespace(
        nodes=lambda: [{"Alive": True, "Resources": {"CPU": 1.0}}],
        remote=lambda **_: lambda function: SimpleNamespace(remote=lambda: function),
        get=get,
        exceptions=SimpleNamespace(RayError=GetTimeoutError),
    )
    asked = bundles(Wish(ps=1, workers=2, started=None))
    with pytest.raises(
        ClusterError, match=r"asks for 3 x \(1 CPU\), .* whether it may grow could not be asked: Get timed"
    ):
        check_can_fit(ray, asked)


def test_what_is_no_address_is_refused_before_anything_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["run", "--on", "k8s", "--dry-run", str(script)])
    assert ended.value.code == EXIT_USAGE
