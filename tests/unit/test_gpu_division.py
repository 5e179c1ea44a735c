"""WHICH device is a worker's own? How cards are divided, what the ps sees, and which flags make no sense."""

import pytest

from paceline.cluster import flags
from paceline.cluster.pinning import GpuUse, beside, check_memory, check_share, pinned, sharing, visible
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.cluster.validate import check
from paceline.errors import UsageError
from paceline.launchers import gpus
from paceline.launchers.entry import Program
from paceline.launchers.resume_command import command
from paceline.telemetry import summary
from paceline.telemetry.records import WorkerReport

ONE_HOST = ClusterSpec({"ps": ["a:1"], "worker": ["a:2", "a:3", "a:4"]})
TWO_HOSTS = ClusterSpec({"ps": ["a:1"], "worker": ["a:2", "b:2", "a:3", "b:3"]})


def devices(cluster: ClusterSpec, num_gpus: int, **settings: object) -> list[str]:
    choices = Settings(run_id="r", **settings)  # type: ignore[arg-type]
    check(choices, cluster)
    return [str(pinned(choices, cluster, task, num_gpus)).removeprefix("/device:") for task in cluster.workers]


def test_the_workers_of_one_host_take_its_cards_in_turn() -> None:
    assert devices(ONE_HOST, 2) == ["GPU:0", "GPU:1", "GPU:0"]
    assert devices(ONE_HOST, 4) == ["GPU:0", "GPU:1", "GPU:2"]
    assert devices(ONE_HOST, 0) == ["CPU:0"] * 3


def test_every_host_has_its_own_cards() -> None:
    assert devices(TWO_HOSTS, 2) == ["GPU:0", "GPU:0", "GPU:1", "GPU:1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/cpu:0", ["CPU:0"] * 3),
        ("/gpu:1", ["GPU:1"] * 3),
        ("/gpu", ["GPU:0", "GPU:1", "GPU:0"]),
        ("/gpu:1,/gpu:0", ["GPU:1", "GPU:0", "GPU:1"]),
        ("/job:worker/task:2/cpu:0", ["GPU:0", "GPU:1", "CPU:0"]),
        ("/task:2/cpu:0", ["GPU:0", "GPU:1", "CPU:0"]),
        ("/cpu:0,/task:1/gpu:0", ["CPU:0", "GPU:0", "CPU:0"]),
        ("/cpu:0, /job:worker/replica:0/task:1/device:GPU:0", ["CPU:0", "GPU:0", "CPU:0"]),
    ],
)
def test_worker_device_says_otherwise(text: str, expected: list[str]) -> None:
    assert devices(ONE_HOST, 2, worker_device=text) == expected


def test_a_chief_is_a_worker_too() -> None:
    cluster = ClusterSpec({"chief": ["a:1"], "ps": ["a:2"], "worker": ["a:3"]})
    assert devices(cluster, 2) == ["GPU:0", "GPU:1"]
    assert devices(cluster, 2, worker_device="/job:chief/cpu:0") == ["CPU:0", "GPU:1"]


@pytest.mark.parametrize(
    ("text", "present", "expected"),
    [
        (None, 3, ("0", "1", "2")),
        ("2,0", 3, ("2", "0")),
        (" 1 , 0 ", 3, ("1", "0")),
        ("0,9,1", 3, ("0",)),
        ("0,0", 3, ()),
        ("-1", 3, ()),
        ("", 3, ()),
        ("NoDevFiles", 3, ()),
        ("GPU-8932f937,GPU-af12", 3, ("GPU-8932f937", "GPU-af12")),
        ("GPU-1,GPU-1", 3, ()),
        ("0", 0, ()),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(text: str | None, present: int, expected: tuple[str]) -> None:
    assert visible(text, present) == expected


def test_the_ps_hides_gpus_unless_told() -> None:
    assert gpus.environ_of(Task("ps", 0), Settings(run_id="")) == {"CUDA_VISIBLE_DEVICES": ""}
    assert gpus.environ_of(Task("ps", 0), Settings(run_id="", ps_device="/gpu:0")) == {}
    assert gpus.environ_of(Task("worker", 0), Settings(run_id="")) == {}


def test_what_the_launcher_tells() -> None:
    plain = Settings(run_id="")
    assert gpus.told(plain, ONE_HOST, 0) == []
    assert gpus.told(plain, ONE_HOST, 2)[0].startswith("Devices: worker:0 on /gpu:0, worker:1 on /gpu:1, worker:2 on")
    pinned_there = Settings(run_id="", worker_device="/gpu:5")
    assert gpus.told(pinned_there, ONE_HOST, 0)[0].count("on /cpu:0") == 3
    virtual = Settings(run_id="", virtual_gpus=2)
    assert gpus.told(virtual, ONE_HOST, 1)[0].count("(virtual)") == 3
    named = gpus.names(virtual, ONE_HOST, 1)
    assert named[Task("ps", 0)] == "/job:ps/replica:0/task:0/device:CPU:0"
    assert named[Task("worker", 1)] == "/job:worker/replica:0/task:1/device:GPU:1 (virtual)"
    assert gpus.names(plain, ONE_HOST, 1)[Task("worker", 1)] == "/job:worker/replica:0/task:1/device:GPU:0"


# --- memory -------------------------------------------------------------------------------------------------


def test_who_shares_a_card() -> None:
    assert [sharing(Settings(run_id=""), ONE_HOST, task, 1, 1) for task in ONE_HOST.workers] == [3, 3, 3]
    virtual = Settings(run_id="", virtual_gpus=3)
    assert [sharing(virtual, ONE_HOST, task, 3, 1) for task in ONE_HOST.workers] == [3, 3, 3]
    assert [sharing(virtual, ONE_HOST, task, 3, 2) for task in ONE_HOST.workers] == [2, 1, 2]


def test_growth_has_no_limit_unless_one_is_named() -> None:
    assert GpuUse().share(3) is None
    assert GpuUse(memory_fraction=0.3).share(3) == 0.3
    assert GpuUse(allow_growth=False).share(3) == pytest.approx(0.3)


def test_more_memory_than_a_card_has_is_refused() -> None:
    greedy = Settings(run_id="", allow_growth=False, gpu_memory_fraction=0.5)
    with pytest.raises(UsageError, match=r"--gpu-memory-fraction 0\.33 or less"):
        check_memory(greedy, ONE_HOST, real=1)
    check_memory(greedy, ONE_HOST, real=3)
    check_memory(greedy, ONE_HOST, real=0)
    check_memory(Settings(run_id="", gpu_memory_fraction=0.5), ONE_HOST, real=1)  # a limit is no claim


def test_tasks_that_serve_ops_use_every_card_of_their_host() -> None:
    cluster = ClusterSpec({"ps": ["a:1"], "worker": ["a:2", "b:2", "a:3"]})
    everybody = [*cluster.ps, *cluster.workers]
    assert [beside(cluster, task, everybody) for task in everybody] == [3, 3, 1, 3]
    assert beside(cluster, Task("worker", 0), cluster.workers) == 2  # where the ps serves none
    assert beside(cluster, Task("worker", 0), []) == 1


@pytest.mark.parametrize("num", [1, 2, 3, 8])
def test_their_shares_fit_the_card_unless_they_are_named(num: int) -> None:
    at_once = GpuUse(allow_growth=False)
    assert num * (at_once.share(num) or 1.0) <= 1
    check_share(at_once, num)
    check_share(GpuUse(memory_fraction=0.9), num)  # a limit is no claim
    if num > 1:
        with pytest.raises(UsageError, match=f"{num} tasks share one card, each takes 0.9"):
            check_share(GpuUse(allow_growth=False, memory_fraction=0.9), num)


# --- flags --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"worker_device": "/tpu:0"}, "TPU"),
        ({"worker_device": "/gpu:-1"}, "-1"),
        ({"worker_device": "/job:worker/task:7/gpu:0"}, "no task worker:7"),
        ({"worker_device": "/task:7/gpu:0"}, "no task worker:7"),
        ({"worker_device": "/task:1"}, "say which device"),
        ({"ps_device": "/task:1/gpu:0"}, "no task ps:1"),
        ({"worker_device": "/job:wroker/gpu:0"}, "did you mean 'worker'"),
        ({"worker_device": "/job:ps/gpu:0"}, "a ps trains nothing"),
        ({"worker_device": "/job:worker/task:1"}, "say which device"),
        ({"worker_device": "/job:ps/job:worker"}, "job twice"),
        ({"ps_device": "/job:worker/gpu:0"}, "no ps"),
        ({"virtual_gpus": -1}, "--virtual-gpus is -1"),
        ({"gpu_memory_fraction": 0.0}, "above 0"),
        ({"gpu_memory_fraction": 1.2}, "at most 1"),
        ({"gpu_memory_fraction": float("nan")}, "at most 1"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check(Settings(run_id="r", **wrong), ONE_HOST)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "num_cards", "said"),
    [
        ({"worker_device": "/gpu:0"}, 0, "no GPU here"),
        ({"worker_device": "/gpu:3"}, 2, "/gpu:0 to /gpu:1"),
        ({"virtual_gpus": 2}, 0, "needs a card"),
    ],
)
def test_the_launcher_refuses_a_missing_gpu_only_without_soft_placement(
    settings: dict[str, object], num_cards: int, said: str
) -> None:
    gpus.check(Settings(run_id="", **settings), ONE_HOST, num_cards)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=said):
        gpus.check(Settings(run_id="", soft_placement=False, **settings), ONE_HOST, num_cards)  # type: ignore[arg-type]


def test_a_switch_that_is_on_can_be_turned_off_by_hand() -> None:
    given = flags.read(["--no-allow-growth", "--no_soft_placement", "--gpu-memory-fraction", "0.3"])
    settings = flags.settings(given, "r")
    assert (settings.allow_growth, settings.soft_placement, settings.gpu_memory_fraction) == (False, False, 0.3)
    assert flags.settings(flags.read(["--allow_growth=false"]), "r").allow_growth is False


def test_the_command_that_goes_on_says_so_too() -> None:
    settings = Settings(run_id="r", allow_growth=False, worker_device="/gpu:0")
    assert "--worker-device /gpu:0 --no-allow-growth" in command(Program(script="t.py"), 1, 2, settings, "runs/r")


def test_virtual_gpus_are_marked_in_the_summary() -> None:
    settings = Settings(run_id="r", virtual_gpus=2)
    report = WorkerReport(index=0, task="worker:0", device="/gpu:0 (virtual)")
    told = summary.build(settings, ONE_HOST, ([report], []), ok=True, wall_s=1.0, restarts=0, lost=[], error=None)
    rows = told["workers"]
    assert told["virtual_gpus"] == 2 and isinstance(rows, list) and rows[0]["device"] == "/gpu:0 (virtual)"
