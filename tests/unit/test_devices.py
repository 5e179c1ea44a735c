"""WHERE shall it run? Device strings as TensorFlow writes them, and what torch makes of them."""

from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.devices import Device
from paceline.cluster.discovery import Assignment
from paceline.cluster.pinning import GpuUse, Hardware
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import UsageError
from paceline.frameworks.torch import devices as torch_devices
from paceline.frameworks.torch.devices import Pin, mapping_lines, pin, torch_device
from paceline.ingraph.config import ConfigProto, GPUOptions

CLUSTER = ClusterSpec({"ps": ["h:1"], "worker": ["h:2", "h:3"]})
JOBS = st.sampled_from(["ps", "worker", "local", "my_job_2"])
DEVICES = st.builds(
    Device,
    job=st.none() | JOBS,
    replica=st.none() | st.just(0),
    task=st.none() | st.integers(0, 999),
    kind=st.just("GPU"),
    index=st.none() | st.integers(0, 999),
)


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_devices, "_said", set())
    monkeypatch.setattr(torch_devices, "_configured", [])
    monkeypatch.setattr(torch_devices, "_serving", [])


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("/cpu:0", "/device:CPU:0"),
        ("/CPU:0", "/device:CPU:0"),
        ("/gpu:1", "/device:GPU:1"),
        ("/device:GPU:2", "/device:GPU:2"),
        ("/device:gpu:2", "/device:GPU:2"),
        ("/job:ps/task:0", "/job:ps/task:0"),
        ("/job:worker/replica:0/task:1/device:GPU:0", "/job:worker/replica:0/task:1/device:GPU:0"),
        ("/job:worker/task:1/gpu:0", "/job:worker/task:1/device:GPU:0"),
        ("/task:1/job:worker", "/job:worker/task:1"),
        ("/gpu:*", "/device:GPU:*"),
        ("/gpu", "/device:GPU:*"),
        ("", ""),
    ],
)
def test_every_spelling_of_tensorflow_has_one_canonical_form(text: str, canonical: str) -> None:
    assert str(Device.parse(text)) == canonical


@given(DEVICES)
def test_the_canonical_form_is_read_as_what_was_printed(device: Device) -> None:
    assert Device.parse(str(device)) == device


@given(DEVICES, DEVICES, DEVICES)
def test_scopes_merge_in_any_grouping(outer: Device, middle: Device, inner: Device) -> None:
    assert outer.merge(middle).merge(inner) == outer.merge(middle.merge(inner))
    assert outer.merge(Device()) == outer == Device().merge(outer)


def test_an_inner_scope_refines_an_outer_one() -> None:
    outer = Device.parse("/job:worker/task:0/gpu:1")
    assert str(outer.merge(Device.parse("/task:1"))) == "/job:worker/task:1/device:GPU:1"
    assert str(outer.merge(Device.parse("/cpu:0"))) == "/job:worker/task:0/device:CPU:0"
    assert str(outer.merge(Device.parse("/job:ps"))) == "/job:ps/task:0/device:GPU:1"


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("", "/job:worker/replica:0/task:1/device:CPU:0"),
        ("/gpu:3", "/job:worker/replica:0/task:1/device:GPU:3"),
        ("/gpu", "/job:worker/replica:0/task:1/device:GPU:0"),
        ("/job:worker", "/job:worker/replica:0/task:1/device:CPU:0"),
        ("/job:ps", "/job:ps/replica:0/task:0/device:CPU:0"),
        ("/task:0", "/job:worker/replica:0/task:0/device:CPU:0"),
    ],
)
def test_what_is_not_said_is_the_calling_task(text: str, full: str) -> None:
    device = Device.parse(text).filled(Task("worker", 1))
    assert str(device) == full
    assert device.task_of() is not None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cpu:0", "slash"),
        ("/tpu:0", "TPU"),
        ("/device:TPU:0", "CPU and GPU"),
        ("/gpu:-1", "'-1'"),
        ("/gpu:x", "'x'"),
        ("/gpu:", "''"),
        ("/job:ps/job:worker", "job twice"),
        ("/task:1/task:1", "task twice"),
        ("/cpu:0/gpu:0", "kind of device twice"),
        ("/job:", "'job:'"),
        ("/job:a b", "'job:a b'"),
        ("/job:worker/replica:1", "replica"),
        ("/job:worker/tsak:1", "'tsak:1'"),
        ("/device:GPU:0:1", "'device:GPU:0:1'"),
        ("//", "''"),
        ("/task:99999999", "'99999999'"),
    ],
)
def test_what_is_no_device_is_refused_in_one_sentence(text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        Device.parse(text)
    assert said in str(refused.value) and "\n" not in str(refused.value)


@given(st.text(max_size=20))
def test_no_text_does_anything_but_be_read_or_refused(text: str) -> None:
    with suppress(UsageError):
        Device.parse(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [("/job:wroker/task:0", "did you mean 'worker'"), ("/job:worker/task:2", "no task worker:2")],
)
def test_a_job_or_task_that_the_cluster_does_not_have(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Device.parse(text).check(CLUSTER)


# --- in torch's words ---------------------------------------------------------------------------------------


def test_a_card_that_is_there() -> None:
    assert torch_device("/gpu:1", Hardware(real=2)) == torch.device("cuda", 1)
    assert torch_device("/gpu", Hardware(real=2)) == torch.device("cuda", 0)
    assert torch_device("/job:worker/task:1/cpu:3", Hardware(real=2)) == torch.device("cpu")


def test_virtual_ones_are_dealt_out_over_the_cards() -> None:
    there = Hardware(real=2, use=GpuUse(virtual=4))
    assert [torch_device(f"/gpu:{i}", there).index for i in range(4)] == [0, 1, 0, 1]
    assert there.names[3] == "/gpu:3 (virtual)"


def test_soft_placement_is_said_once() -> None:
    said: list[str] = []
    for _ in range(3):
        assert torch_device("/gpu:0", Hardware(real=0), said.append) == torch.device("cpu")
    assert len(said) == 1 and "/gpu:0" in said[0] and "--no-soft-placement" in said[0]


@pytest.mark.parametrize("use", [GpuUse(is_soft=False), GpuUse(is_soft=False, virtual=2)])
def test_without_soft_placement_it_is_refused(use: GpuUse) -> None:
    with pytest.raises(UsageError, match="no /gpu:0 here"):
        torch_device("/gpu:0", Hardware(real=0, use=use))


def test_the_mapping_has_tensorflows_shape() -> None:
    assert mapping_lines(Task("local", 0), Hardware(real=0)) == ["Device mapping: no known devices."]


# --- a worker's own -----------------------------------------------------------------------------------------


def pinned(index: int, real: int, asked: str | None = None, **settings: object) -> tuple[Pin, list[str]]:
    said: list[str] = []
    choices = Settings(run_id="r", **settings)  # type: ignore[arg-type]
    return pin(Assignment(CLUSTER, Task("worker", index), 1, choices, b"", "flags"), said.append, asked, real), said


def test_workers_take_the_cards_in_turn() -> None:
    assert [pinned(index, real=2)[0].torch_device.index for index in (0, 1)] == [0, 1]
    assert [pinned(index, real=1)[0].torch_device.index for index in (0, 1)] == [0, 0]


def test_without_a_card_it_is_the_cpu_and_nobody_is_told() -> None:
    found, said = pinned(1, real=0)
    assert (found.torch_device, found.name, said) == (torch.device("cpu"), "/cpu:0", [])


def test_who_named_cards_is_told_that_there_are_none() -> None:
    assert pinned(0, real=0, asked="")[1] == pinned(0, real=0, asked="-1")[1] == []
    assert pinned(0, real=0, asked="0", worker_device="/cpu:0")[1] == []
    assert "CUDA_VISIBLE_DEVICES=0,1" in pinned(0, real=0, asked="0,1")[1][0]
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES=0"):
        pinned(0, real=0, asked="0", soft_placement=False)


def test_virtual_cards_are_marked() -> None:
    found, _ = pinned(1, real=1, virtual_gpus=2)
    assert (found.name, found.torch_device) == ("/gpu:1 (virtual)", torch.device("cuda", 0))
    assert found.name_of(torch.device("cuda", 0)) == "/gpu:1 (virtual)"
    assert found.name_of(torch.device("cpu")) == "/cpu:0"  # where the script put its model all the same


def test_alone_the_cpu_of_this_machine_is_the_device() -> None:
    assert pin(None, print, real=0).torch_device == torch.device("cpu")
    assert pin(None, print, real=2).torch_device == torch.device("cuda", 0)


# --- ConfigProto --------------------------------------------------------------------------------------------


def test_the_three_options_of_the_document() -> None:
    config = ConfigProto(log_device_placement=True, allow_soft_placement=False)
    config.gpu_options.allow_growth = False
    config.gpu_options.per_process_gpu_memory_fraction = 0.4
    use = config.gpu_use(GpuUse())
    assert (use.is_logged, use.is_soft, use.allow_growth, use.memory_fraction) == (True, False, False, 0.4)
    assert str(ConfigProto()) == ""


FLAGS = GpuUse(virtual=2, is_soft=False, allow_growth=False, memory_fraction=0.3, is_logged=True)


def test_what_a_program_leaves_open_is_as_the_flags_say() -> None:
    zero = GPUOptions(per_process_gpu_memory_fraction=0.0)  # how TensorFlow says nothing
    assert ConfigProto().gpu_use(FLAGS) == ConfigProto(gpu_options=zero).gpu_use(FLAGS) == FLAGS


def test_what_a_program_says_holds_instead_of_the_flags() -> None:
    config = ConfigProto(allow_soft_placement=True, log_device_placement=False)
    config.gpu_options.allow_growth = True
    config.gpu_options.per_process_gpu_memory_fraction = 0.5
    assert config.gpu_use(FLAGS) == GpuUse(virtual=2, is_soft=True, allow_growth=True, memory_fraction=0.5)


def test_a_mistyped_option_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'allow_soft_placement'"):
        ConfigProto().allow_soft_placment = True  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="above 0"):
        ConfigProto(gpu_options=GPUOptions(per_process_gpu_memory_fraction=1.5)).gpu_use(GpuUse())
