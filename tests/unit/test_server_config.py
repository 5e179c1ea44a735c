"""WHAT does a server make of its ConfigProto, and of the flags that it was started with? Each option has its effect."""

from collections.abc import Iterator

import pytest
import torch
from op_servers import Serving, double, serving
from torch import nn

import paceline
from paceline.cluster.pinning import GpuUse
from paceline.errors import RemoteOpError, UsageError
from paceline.frameworks.torch import devices as torch_devices
from paceline.ingraph.server import Server

__all__ = ["serving"]  # a fixture


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is configured yet, on a machine without cards, whatever this one has."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for kept in ("_said", "_configured", "_serving"):
        monkeypatch.setattr(torch_devices, kept, type(getattr(torch_devices, kept))())


@pytest.fixture
def flags(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Further flags of the command line."""
    given = ["script.py", "--wait-s=5"]
    monkeypatch.setattr("sys.argv", given)
    yield given


def local(config: paceline.ConfigProto | None = None) -> Server:
    return Server.create_local_server(config)


def on_a_gpu() -> object:
    with paceline.device("/job:local/task:0/gpu:0"):
        return double(1)


def test_log_device_placement(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    graph = paceline.Graph()
    with graph:
        node = double(graph.constant(3))
    for config, is_logged in ((None, False), (paceline.ConfigProto(log_device_placement=True), True)):
        with local(config) as server, paceline.Session(server.target, graph) as session:
            assert session.run(node) == 6
        said = capsys.readouterr().out
        assert ("Device mapping: no known devices." in said) == is_logged
        assert (f"{node.name}: (double): /job:local/replica:0/task:0/device:CPU:0" in said.splitlines()) == is_logged


def test_allow_soft_placement(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with local():
        assert on_a_gpu() == 2
    assert "There is no /gpu:0 here" in capsys.readouterr().out
    with local(paceline.ConfigProto(allow_soft_placement=False)), pytest.raises(UsageError, match="no /gpu:0 here"):
        on_a_gpu()


def test_what_it_does_not_say_the_flags_do(flags: list[str]) -> None:
    flags += ["--no-soft-placement", "--gpu-memory-fraction=0.3"]
    with local(paceline.ConfigProto(log_device_placement=True)), pytest.raises(UsageError, match="no /gpu:0 here"):
        on_a_gpu()
    assert torch_devices.here().use == GpuUse(is_soft=False, memory_fraction=0.3, is_logged=True)
    with local(paceline.ConfigProto(allow_soft_placement=True)):
        assert on_a_gpu() == 2  # what the program says counts


def test_a_session_without_a_target_changes_only_what_it_says(flags: list[str]) -> None:
    torch_devices.configure(GpuUse(virtual=2, memory_fraction=0.3))
    paceline.Session(config=paceline.ConfigProto(allow_soft_placement=False)).close()
    assert torch_devices.here().use == GpuUse(virtual=2, memory_fraction=0.3, is_soft=False)


# --- with a card, as far as that can be seen without one ------------------------------------------------------------


@pytest.fixture
def one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts one card, and keeps what is to happen when CUDA starts, which it never does here."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_queued_calls", [])
    monkeypatch.setattr(torch_devices, "card_text", lambda number: f"name: card {number}")


def taken_at_once(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Start CUDA, or what is kept until then, and write down what of the card's memory is asked for."""
    asked: list[tuple[str, float]] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: asked.append(("limit", share)))
    monkeypatch.setattr(torch_devices, "take", lambda _, share, say: asked.append(("taken", share)))
    for call, _ in torch.cuda._queued_calls:
        call()
    return asked


def test_gpu_options(flags: list[str], one_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = paceline.ConfigProto()
    config.gpu_options.allow_growth = False
    config.gpu_options.per_process_gpu_memory_fraction = 0.4
    with local(config):
        assert taken_at_once(monkeypatch) == [("limit", 0.4), ("taken", 0.4)]


def test_tasks_of_one_host_that_serve_ops_do_not_overbook_its_card(
    flags: list[str], serving: Serving, one_card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags += ["--no-allow-growth"]
    serving.start(0)
    assert taken_at_once(monkeypatch) == [("limit", 0.45), ("taken", 0.45)]
    torch.cuda._queued_calls.clear()
    paceline.Session(config=paceline.ConfigProto(log_device_placement=False)).close()  # says nothing about memory
    assert taken_at_once(monkeypatch) == [("limit", 0.45), ("taken", 0.45)]
    flags += ["--gpu-memory-fraction=0.6"]
    with pytest.raises(UsageError, match=r"2 tasks share one card.*--gpu-memory-fraction 0\.5 or less"):
        serving.start(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it wants to see what torch says where there is no card")
def test_virtual_gpus_are_marked_in_placements_and_far_towers(
    flags: list[str], serving: Serving, one_card: None, capsys: pytest.CaptureFixture[str]
) -> None:
    flags += ["--virtual-gpus=2", "--log-device-placement"]
    serving.client.is_logged = True  # it was there before the flags
    serving.start(0, 1)
    model = nn.Linear(2, 2)
    devices = ["/job:worker/task:1/gpu:1", "/job:worker/task:0/cpu:0", "/job:worker/task:0/gpu:2"]
    with paceline.towers(model, torch.optim.SGD(model.parameters(), lr=0.1), devices) as towers:
        assert towers.devices == [
            "/job:worker/task:1/device:GPU:1 (virtual)",
            "/job:worker/task:0/device:CPU:0",
            "/job:worker/task:0/device:GPU:2 (missing: the CPU)",
        ]
    graph = paceline.Graph()
    with graph, paceline.device("/job:worker/task:1/gpu:1"):
        node = double(graph.constant(torch.ones(1)))
    with paceline.Session(serving.target(0), graph) as session, pytest.raises(RemoteOpError, match="CUDA"):
        session.run(node)  # there is no card
    with paceline.device("/job:worker/task:1/gpu:0"), pytest.raises(RemoteOpError, match="CUDA"):
        double(torch.ones(1))
    lines = capsys.readouterr().out.splitlines()
    where = "/job:worker/replica:0/task:1/device:GPU"
    assert f"{node.name}: (double): {where}:1 (virtual)" in lines
    assert f"double: (double): {where}:0 (virtual)" in lines
    assert "/job:worker/replica:0/task:0/device:GPU:1 -> device: 0, name: card 0 (virtual)" in lines
