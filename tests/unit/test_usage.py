"""WHAT becomes of looks at a task? Means and peaks, by values; and a real look at this process."""

import os
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.lab.cells import Cell, Finished
from paceline.lab.matrices.carrier_matrix import carried_line
from paceline.telemetry import cards, meter, summary
from paceline.telemetry.records import PairBytes, PsReport, WorkerReport
from paceline.telemetry.sampler import Sampler
from paceline.telemetry.usage import Card, GpuUse, Look, Net, Spread, TaskUse, Usage

BUSY = Card(
    index=1, name="GTX 1080", fan_percent=35, temperature_c=53, power_w=40.0, power_limit_w=180.0, memory_mib=653,
    memory_total_mib=8114, busy_percent=17,
)  # fmt: skip
IDLE = msgspec.structs.replace(BUSY, fan_percent=27, temperature_c=34, power_w=5.0, memory_mib=355, busy_percent=0)


def net(sent: int, received: int, loopback: int) -> Net:
    return Net(outer_sent_bytes=sent, outer_received_bytes=received, loopback_bytes=loopback)


def test_means_and_peaks_over_all_looks() -> None:
    usage = Usage()
    looks = [
        Look(at_s=10.0, cpu_s=3.0, rss_bytes=100_000_000, net=net(10, 20, 30), cards=[IDLE]),
        Look(at_s=11.0, cpu_s=4.5, rss_bytes=300_000_000, net=net(11, 22, 33), cards=[BUSY]),
        Look(at_s=14.0, cpu_s=5.0, rss_bytes=200_000_000, net=net(15, 26, 37), cards=[]),
    ]
    assert [usage.note(look) for look in looks] == [None, 1.5, pytest.approx(1 / 6)]
    used = usage.use("worker:0", telemetry_s=0.002, peak_rss_bytes=350_000_000)
    assert used == TaskUse(
        name="worker:0",
        cpu_cores=0.5,
        memory_mb=200.0,
        peak_memory_mb=350.0,
        gpus=[
            GpuUse(
                index=1,
                name="GTX 1080",
                fan_percent=Spread(31.0, 35),
                temperature_c=Spread(43.5, 53),
                power_w=Spread(22.5, 40.0),
                power_limit_w=180.0,
                memory_mib=Spread(504.0, 653),
                memory_total_mib=8114,
                busy_percent=Spread(8.5, 17),
            )
        ],
        net=net(5, 6, 7),
        telemetry_ms_per_s=0.5,
    )


def test_cards_that_were_another_programs_are_forgotten_once_this_ones_are_known() -> None:
    """Before a ps has started CUDA the driver sees it on no card, and all of the host are looked at."""
    usage = Usage()
    other = msgspec.structs.replace(BUSY, index=0)
    for at_s, seen in ((0.0, [other, IDLE]), (1.0, [BUSY]), (2.0, [])):
        usage.note(Look(at_s=at_s, cpu_s=0.0, rss_bytes=1, cards=seen))
    used = usage.use("ps:0", 0.0)
    assert used is not None and [gpu.index for gpu in used.gpus] == [1]


def test_what_nobody_saw_is_not_told() -> None:
    usage = Usage()
    assert usage.use("ps:0", 0.0) is None
    usage.note(Look(at_s=1.0, cpu_s=1.0, rss_bytes=5_000_000, cards=[Card(index=0)]))
    used = usage.use("ps:0", 0.001)
    assert used is not None and used.cpu_cores is None and used.telemetry_ms_per_s is None and used.net is None
    assert used.memory_mb == used.peak_memory_mb == 5.0 and used.gpus == [GpuUse(index=0)]


def test_time_that_a_child_took_along_is_not_negative() -> None:
    usage = Usage()
    usage.note(Look(at_s=0.0, cpu_s=5.0, rss_bytes=1))
    assert usage.note(Look(at_s=1.0, cpu_s=4.0, rss_bytes=1)) == 0.0


def test_a_real_look_at_this_process() -> None:
    mine = meter.Meter("worker:0")
    mine.look()
    before_bytes, peak_bytes = mine.rss_bytes, meter.peak_rss_bytes()
    held = bytearray(os.urandom(1 << 10)) * (64 << 10)  # 64 MiB, all of them there
    used = mine.use(telemetry_s=0.0)
    assert mine.rss_bytes > before_bytes + len(held) / 2, "the second look sees what has come since the first"
    assert used is not None and used.cpu_cores is not None and used.cpu_cores >= 0
    assert used.peak_memory_mb is not None and used.peak_memory_mb >= round(mine.rss_bytes / 1e6, 1)
    assert peak_bytes is not None and used.peak_memory_mb >= round(peak_bytes / 1e6, 1), "the system's own is in it"
    assert used.memory_mb is not None and used.memory_mb <= used.peak_memory_mb and used.gpus == []
    assert mine.told()["rss_bytes"] == mine.rss_bytes > 0


class FakeNvml:
    """NVML as its binding looks from here: two cards, this process on the second; no fan (as on a server's card)."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, card: int) -> list[Any]:
        return [SimpleNamespace(pid=self.pid)] if card == 1 else []

    def nvmlDeviceGetMemoryInfo(self, card: int) -> Any:
        return SimpleNamespace(used=653 << 20, total=8114 << 20)

    def nvmlDeviceGetUtilizationRates(self, card: int) -> Any:
        return SimpleNamespace(gpu=17)

    def nvmlDeviceGetName(self, card: int) -> bytes:
        return b"GTX 1080"

    def nvmlDeviceGetFanSpeed(self, card: int) -> int:
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetTemperature(self, card: int, sensor: int) -> int:
        return 53

    def nvmlDeviceGetPowerUsage(self, card: int) -> int:
        return 40_000

    def nvmlDeviceGetEnforcedPowerLimit(self, card: int) -> int:
        return 180_000


@pytest.mark.parametrize(("pid", "seen"), [(os.getpid(), [1]), (-1, [0, 1])], ids=["its own", "in a container"])
def test_cards_in_the_units_of_the_documents(pid: int, seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(pid))
    looked = cards.Cards().look()
    assert [card.index for card in looked] == seen
    assert looked[-1] == msgspec.structs.replace(BUSY, fan_percent=None)


def test_a_host_without_a_driver_has_no_cards() -> None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert cards.Cards().look() == []
    else:
        pytest.skip("there is a driver here")


def test_the_summary_tells_all_tasks_and_pairs_together() -> None:
    cluster = ClusterSpec({"ps": ["h:1"], "worker": ["h:2", "h:3"]})
    used = [TaskUse(name=name, cpu_cores=0.5, memory_mb=1.0, peak_memory_mb=2.0) for name in ("ps:0", "worker:0")]
    pair = PairBytes(worker="worker:0", ps="ps:0", lane="tcp", pushed_bytes=1000, pulled_bytes=3000)
    pair = msgspec.structs.replace(pair, tcp_sent_bytes=1200, tcp_received_bytes=3300)
    workers = [WorkerReport(index=0, task="worker:0", steps=2, use=used[1], pairs=[pair]), WorkerReport(index=1)]
    told = summary.build(
        Settings(run_id="r"), cluster, (workers, [PsReport(index=0, use=used[0])]),
        ok=True, wall_s=1.0, restarts=0, lost=[], error=None,
    )  # fmt: skip
    assert not {"use", "pairs"} & {*told["workers"][0], *told["ps"][0]}  # type: ignore[index]
    done = msgspec.json.decode(msgspec.json.encode(told), type=Finished)
    assert (done.tasks, done.pairs) == (used, [pair])
    cell = Cell(title="t", labels=("tcp",), program=("m",), num_workers=2, settings=Settings(run_id=""))
    assert carried_line(cell, done) == ("-", "0.5", "1.5", "1.1250", "0.50", "0.50", "2", "2", "-", "")


def test_a_plain_task_has_the_same_shape() -> None:
    sampler, task = Sampler(), Task("ps", 0)
    sampler.begin(task, 100.0)
    for at_s, rss in ((101.0, 10_000_000), (102.0, 30_000_000)):
        sampler.note(task, Look(at_s=at_s, cpu_s=0.5, rss_bytes=rss))
    assert sampler.use(task) == TaskUse(name="ps:0", cpu_cores=0.25, memory_mb=20.0, peak_memory_mb=30.0)
    assert sampler.use(Task("ps", 1)) == TaskUse(name="ps:1", cpu_cores=0.0)
