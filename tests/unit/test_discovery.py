"""WHICH task am I? Every source, their order, and what each refuses."""

import json
import shlex
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster import flags, sources
from paceline.cluster.discovery import Assignment, discover, discover_as, encode_for_child
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import UsageError

CLUSTER = {"ps": ["h:1"], "worker": ["h:2", "h:3"]}
FOUR = "--job_name=worker --task_index=1 --ps_hosts=h:1 --worker_hosts=h:2,h:3"
SETTINGS_PY = "ps_svrs = ['h:1']\nworker_svrs = ('h:2', 'h:3')\n"


class Started:
    """A script started by hand with its own home and folder, so that no test sees the real ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {"XDG_CONFIG_HOME": str(folder / "config")}

    def __call__(
        self, line: str = "", *, flags: bool = False, cluster: dict[str, list[str]] | None = None
    ) -> Assignment | None:
        return discover(cluster, flags, shlex.split(line), self.environ, self.folder)

    def found(self, line: str = "", *, flags: bool = False, cluster: dict[str, list[str]] | None = None) -> Assignment:
        assignment = self(line, flags=flags, cluster=cluster)
        assert assignment is not None
        return assignment

    def tf_config(self, cluster: object, job: str, index: object) -> None:
        self.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


@pytest.fixture
def started(tmp_path: Path) -> Started:
    return Started(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        FOUR,
        "--task_index 1 --worker_hosts 'h:2, h:3' --ps_hosts h:1 --job_name worker",
        'x --epochs=3 -v --job-name=\'"worker"\' --task-index="1" --ps-hosts=h:1 --worker-hosts=h:2,h:3 --x',
        "-job_name=worker -task_index=0 -ps_hosts=h:1 -worker_hosts=h:2,h:3 --task_index=1 -- --task_index=0",
    ],
)
def test_flags_in_any_spelling_and_order(started: Started, line: str) -> None:
    found = started.found(line, flags=True)
    assert (found.cluster, found.task, found.source) == (ClusterSpec(CLUSTER), Task("worker", 1), "flags")
    assert found.incarnation == 0


def test_without_a_cluster_it_is_a_plain_single_process(started: Started) -> None:
    (started.folder / "settings.py").write_text(SETTINGS_PY)
    started.environ["TF_CONFIG"] = "{}"
    assert started("--mode --data=somewhere --lease_s=x --epochs 3") is None
    assert started("", flags=True) is None
    assert not (started.folder / "config").exists()


def test_the_first_source_found_wins(started: Started) -> None:
    started.tf_config(CLUSTER, "worker", 0)
    assert started.found(flags=True).source == "TF_CONFIG"
    (started.folder / "settings.py").write_text(SETTINGS_PY)
    assert started.found("--job_name=ps").source == "settings.py"
    assert started.found(FOUR).source == "flags"
    by_argument = started.found(FOUR, flags=True, cluster=CLUSTER)
    assert by_argument.source == "cluster argument"
    by_launcher = msgspec.structs.replace(by_argument, source="launcher")
    started.environ.update(encode_for_child(by_launcher))
    assert started.found(FOUR, flags=True, cluster=CLUSTER).source == "launcher"


def test_a_script_in_the_process_of_serve_learns_how_serve_found_it(started: Started) -> None:
    by_serve = started.found(FOUR, flags=True)
    started.environ.update(encode_for_child(by_serve))
    assert started.found("").source == "flags"


def test_a_child_learns_exactly_what_the_launcher_knew() -> None:
    settings = Settings(run_id="r", mode="sync", replicas_to_aggregate=2, run_dir="runs/r")
    sent = Assignment(ClusterSpec(CLUSTER), Task("worker", 1), 3, settings, bytes(range(32)), "launcher")
    environ = encode_for_child(sent)
    assert set(environ) == {"PACELINE_TASK", "PACELINE_SECRET"}
    assert discover(argv=["--mode=async"], environ=environ, script_dir="/nowhere") == sent
    assert sent.secret.hex() not in environ["PACELINE_TASK"]


def test_printing_an_assignment_leaves_the_secret_out() -> None:
    secret = b"0123456789abcdef0123456789abcdef"
    shown = repr(Assignment(ClusterSpec(CLUSTER), Task("ps", 0), 0, Settings(run_id="r"), secret, "flags"))
    assert "0123" not in shown
    assert "Task(job='ps', index=0)" in shown


@pytest.mark.parametrize(
    "broken",
    [{"PACELINE_TASK": "{"}, {"PACELINE_TASK": "{}"}, {"PACELINE_SECRET": "abcd"}, {"PACELINE_SECRET": "x"}],
)
def test_a_broken_launcher_environment_is_refused(broken: dict[str, str]) -> None:
    whole = Assignment(ClusterSpec(CLUSTER), Task("ps", 0), 0, Settings(run_id="r"), bytes(32), "launcher")
    with pytest.raises(UsageError, match="launcher"):
        discover(argv=[], environ=encode_for_child(whole) | broken)


def test_settings_flags_are_read_by_hand(started: Started) -> None:
    line = (
        f"{FOUR} --mode sync --replicas-to-aggregate=2 --placement=greedy --lane=tcp --data full "
        "--log-style=tf --log_every=1 --log-device-placement --run_dir=runs/x --save-every=none --lease-s 2.5 "
        "--wait_s=9"
    )
    settings = started.found(line).settings
    assert msgspec.structs.replace(settings, run_id="") == Settings(
        run_id="",
        run_dir="runs/x",
        mode="sync",
        replicas_to_aggregate=2,
        placement="greedy",
        lane="tcp",
        data="full",
        log_every=1,
        log_style="tf",
        log_device_placement=True,
        save_every="none",
        lease_s=2.5,
        wait_s=9.0,
    )


def test_the_dial_is_read_by_hand(started: Started) -> None:
    line = (
        f"{FOUR} --mode=local --local-steps 5 --outer=sync --outer-lr=1 --outer_momentum 0 --replicas_to_aggregate=1 "
        "--extra-tokens 0 --grace_ms 20% --ema=0.99 --wire=bfloat16 --master model --min_workers=2 --slow worker:1=5x"
    )
    assert msgspec.structs.replace(started.found(line).settings, run_id="") == Settings(
        run_id="",
        mode="local",
        local_steps=5,
        outer="sync",
        outer_lr=1.0,
        outer_momentum=0.0,
        replicas_to_aggregate=1,
        extra_tokens=0,
        grace_ms="20%",
        ema=0.99,
        wire="bfloat16",
        master="model",
        min_workers=2,
        slow="worker:1=5x",
    )
    bounded = started.found(f"{FOUR} --mode bounded --staleness 0 --staleness-scale --overlap").settings
    assert (bounded.staleness, bounded.staleness_scale, bounded.overlap) == (0, True, True)
    assert bounded.mode_spec.staleness == 0


def test_the_first_workers_are_enough_by_hand(started: Started) -> None:
    """--workers would be too common a name among the flags of scripts, so a script's own is left alone."""
    settings = started.found(f"{FOUR} --started_workers=1 --workers=8").settings
    assert (settings.started_workers, settings.min_workers) == (1, 1)
    settings = started.found(f"{FOUR} --started-workers=2").settings
    assert (settings.started_workers, settings.min_workers) == (2, 2)
    assert started.found(f"{FOUR} --started_workers=1 --min-workers=2").settings.min_workers == 2


@pytest.mark.parametrize(("text", "range_"), [("3", (3, 3)), ("2:6", (2, 6)), ("2:2", (2, 2))])
def test_a_number_of_workers_or_a_range(text: str, range_: tuple[int, int]) -> None:
    assert flags.worker_range(text) == range_


@pytest.mark.parametrize("text", ["", "two", "2:", ":2", "2:6:8", "0", "0:2", "-1", "6:2", "2-6"])
def test_what_is_no_number_of_workers(text: str) -> None:
    with pytest.raises(UsageError, match="--workers is"):
        flags.worker_range(text)


def test_every_task_by_hand_has_the_same_run_id(started: Started) -> None:
    worker = started.found(FOUR).settings
    ps = started.found(FOUR.replace("worker --task_index=1", "ps"), cluster=dict(reversed(CLUSTER.items()))).settings
    assert worker == ps
    assert worker.run_id.startswith("by-hand-")
    assert worker.run_dir is None
    assert started.found(FOUR + ",h:4").settings.run_id != worker.run_id


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (FOUR.replace("=worker", "=worke"), r"no job 'worke'; did you mean 'worker'\?"),
        (FOUR.replace("index=1", "index=2"), "no task worker:2; job 'worker' has 2 tasks"),
        (FOUR.replace("index=1", "index=-1"), "no task worker:-1"),
        (FOUR.replace("index=1", "index=one"), "whole number"),
        (FOUR.replace("--task_index=1", ""), "'worker' has 2 tasks; say which one"),
        (FOUR.replace("--ps_hosts=h:1", ""), "--worker_hosts is given without --ps_hosts"),
        (FOUR.replace("=h:1", "=h:2"), "both have the address h:2"),
        (FOUR.replace("--job_name=worker", ""), "Add --job_name"),
        ("--job_name --task_index=0 --ps_hosts=h:1 --worker_hosts=h:2", "--job_name has no value"),
        (FOUR.replace("=worker", "=chief"), "no job 'chief'"),
        ("--job_name=ps --task_index=0", "no cluster was found"),
        (FOUR + " --mode=sinc", "did you mean 'sync'"),
        (FOUR + " --lease_s=soon", "number of seconds"),
        (FOUR + " --log_device_placement=maybe", "=true or"),
        (FOUR + " --mode", "--mode has no value"),
        (FOUR + " --mode=bounded --staleness=-1", "--staleness is -1; a worker may be 0 or more"),
        (FOUR + " --mode=bounded --staleness=few", "--staleness is 'few'; it must be a whole number"),
        (FOUR + " --staleness=1", "--staleness only makes sense with --mode bounded, and the mode is async"),
        (FOUR + " --mode=local --local-steps=0", "--local-steps is 0; a worker makes at least 1"),
        (FOUR + " --mode=sync --local_steps=2", "--local-steps only makes sense with --mode local"),
        (FOUR + " --outer=sync", "--outer only makes sense with --mode local"),
        (FOUR + " --outer-lr=1", "--outer-lr only makes sense with --mode local"),
        (FOUR + " --outer-momentum=0", "--outer-momentum only makes sense with --mode local"),
        (FOUR + " --mode=local --outer=both", "--outer is 'both'; use sync or async"),
        (FOUR + " --mode=local --outer_lr=0", "--outer-lr is 0.0; it must be a number above 0"),
        (FOUR + " --mode=local --outer_lr=nan", "--outer-lr is nan; it must be a number above 0"),
        (FOUR + " --mode=local --outer_momentum=1", "--outer-momentum is 1.0; it must be 0 or more, and below 1"),
        (FOUR + " --mode=local --outer-momentum=-0.1", "--outer-momentum is -0.1"),
        (FOUR + " --mode=local --overlap", "--mode local pushes none; leave one out"),
        (FOUR + " --ema=1", "--ema is 1.0; the decay must lie between 0 and 1"),
        (FOUR + " --ema=0", "--ema is 0.0"),
        (FOUR + " --ema=nan", "--ema is nan"),
        (FOUR + " --ema=high", "--ema is 'high'; it must be a number, such as 0.9"),
        (FOUR + " --wire=fp16", "Unknown wire 'fp16'; .*float16"),
        (FOUR + " --master=double", "Unknown master 'double'; valid: float32, model"),
        (FOUR + " --min_workers=0", "--min-workers is 0; it must be between 1 and the 2 workers"),
        (FOUR + " --min_workers=3", "--min-workers is 3; it must be between 1 and the 2 workers"),
        (FOUR + " --started_workers=3", "--started-workers is 3; it must be between 1 and the 2 workers"),
        (FOUR + " --slow=worker:2=5x", "--slow names worker:2, which is no worker .* worker:0, worker:1"),
        (FOUR + " --slow=ps:0=5x", "--slow names ps:0, which is no worker"),
        (FOUR + " --slow=worker:1=0.5x", "--slow gives worker:1 the factor 0.5; 1 or more slows"),
        (FOUR + " --slow=worker:1=2x,worker:1=3x", "--slow names worker:1 twice"),
        (FOUR + " --slow=5x", "--slow is '5x'; write it as worker:1=5x"),
        (FOUR + " --mode=sync --grace-ms=5", "--grace-ms and --extra-tokens need --replicas-to-aggregate"),
        (FOUR + " --mode=sync --replicas_to_aggregate=2 --grace-ms=soon", "--grace-ms is 'soon'; use milliseconds"),
        (FOUR + " --mode=sync --replicas_to_aggregate=2 --extra-tokens=-1", "--extra-tokens is -1; it must be 0"),
        (FOUR + " --mode=sync --replicas_to_aggregate=5 --extra-tokens=1", "at most 4 gradients a round"),
        (
            FOUR + " --mode=sync --staleness-scale",
            "--staleness-scale is for async, bounded and local with --outer async",
        ),
    ],
)
def test_bad_flags_are_refused_before_anything_is_made(started: Started, line: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as refused:
        started(line, flags=True)
    assert "\n" not in str(refused.value)
    assert list(started.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--lane=smh", "Unknown lane 'smh'; did you mean 'shm'"),
        ("--lane=inproc", "Lane inproc is for tests"),
        ("--wait-s=0", "--wait-s is 0.0; it must be a number of seconds above 0"),
        ("--tls --insecure", "leave one out"),
        ("--virtual-gpus=-1", "--virtual-gpus is -1"),
        ("--gpu-memory-fraction=2", "--gpu-memory-fraction is 2.0"),
    ],
)
def test_a_cluster_of_ops_is_checked_too(started: Started, line: str, sentence: str) -> None:
    """However its task is found; how to train is no matter there: --mode may be the script's own."""
    with pytest.raises(UsageError, match=sentence):
        discover_as({"local": ["h:1"]}, "local", 0, shlex.split(line), started.environ)
    with pytest.raises(UsageError, match=sentence):
        argv = shlex.split(f"--job_name=local {line}")
        discover({"local": ["h:1"]}, True, argv, started.environ, started.folder, is_training=False)
    assert list(started.folder.iterdir()) == []
    assert discover_as({"local": ["h:1"]}, "local", 0, ["--mode=draw"], started.environ).task == Task("local", 0)


def test_a_chief_of_its_own_by_flags(started: Started) -> None:
    found = started.found("--job_name=chief --ps_hosts=h:1 --worker_hosts=h:2 --chief_hosts=h:9")
    assert found.cluster.chief == found.task == Task("chief", 0)


def test_a_job_name_that_is_the_scripts_own_is_left_alone(started: Started) -> None:
    assert started("--job_name=nightly") is None
    with pytest.raises(UsageError, match="no cluster was found"):
        started("--job_name=ps")


def test_a_cluster_argument_needs_a_task(started: Started) -> None:
    with pytest.raises(UsageError, match="Which task is this"):
        started(cluster=CLUSTER)


def test_settings_py_of_the_documents(started: Started) -> None:
    (started.folder / "settings.py").write_text(SETTINGS_PY + "print(undefined_name)\nother = open('x')\n")
    found = started.found("--job_name=worker --task_index=1")
    assert (found.cluster, found.task, found.source) == (
        ClusterSpec(CLUSTER),
        Task("worker", 1),
        "settings.py",
    )


def test_settings_py_of_something_else_is_left_alone(started: Started) -> None:
    (started.folder / "settings.py").write_text("DEBUG = True\n")
    assert started("--job_name=nightly") is None


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("ps_svrs = ['h:1']", "has no worker_svrs"),
        ("ps_svrs = hosts()\nworker_svrs = ['h:2']", "ps_svrs in settings.py must be a plain list"),
        ("ps_svrs = 'h:1'\nworker_svrs = ['h:2']", "ps_svrs in settings.py must be a plain list"),
        ("ps_svrs = [", "not valid Python"),
        ("ps_svrs = [" * 1000, "not valid Python"),
        ("\0", "not valid Python"),
        ("ps_svrs = []\nworker_svrs = ['h:2']", "'ps' has no tasks"),
    ],
)
def test_a_broken_settings_py_is_refused(source: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        sources.settings_py(source.encode())


@pytest.mark.parametrize(("job", "index"), [("chief", 0), ("worker", 1), ("ps", 0), ("worker", "1")])
def test_tf_config(started: Started, job: str, index: object) -> None:
    started.tf_config(CLUSTER | {"chief": ["h:9"]}, job, index)
    found = started.found("--mode=sync")
    assert (found.task, found.source) == (Task(job, int(str(index))), "TF_CONFIG")
    assert found.settings.mode == "sync"
    assert found.cluster.chief == Task("chief", 0)


def test_an_evaluator_may_be_outside_the_cluster(started: Started) -> None:
    started.tf_config(CLUSTER, "evaluator", 0)
    found = started.found()
    assert found.task == Task("evaluator", 0)
    with pytest.raises(UsageError, match="no job 'evaluator'"):
        found.cluster.address(found.task)
    started.tf_config(CLUSTER, "evaluator", 1)
    with pytest.raises(UsageError, match="only evaluator:0"):
        started()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{cluster", "TF_CONFIG is not JSON"),
        ('{"x": ' * 100_000, "TF_CONFIG is not JSON"),
        ("\udcff", "TF_CONFIG is not JSON"),
        ("[]", "TF_CONFIG must be like"),
        ('{"cluster": {"ps": ["h:1"]}}', 'no "task"'),
        ('{"task": {"type": "ps", "index": 0}}', 'no "cluster"'),
        ('{"cluster": {"ps": [1]}, "task": {"type": "ps"}}', r"TF_CONFIG must be like .*\$\.cluster"),
        ('{"cluster": {"worker": ["h:1"]}, "task": {"type": "worker", "index": 0}}', "no job ps"),
        ('{"cluster": {"ps": ["h:1"]}, "task": {"type": "ps", "index": 3}}', "has 1 task, index 0"),
    ],
)
def test_a_broken_tf_config_is_refused(started: Started, text: str, sentence: str) -> None:
    started.environ["TF_CONFIG"] = text
    with pytest.raises(UsageError, match=sentence) as refused:
        started()
    assert "\n" not in str(refused.value)


JOB = st.sampled_from(["ps", "worker", "chief", "evaluator", "x"]) | st.text()
ADDRESSES = st.lists(st.sampled_from(["h:1", "h:2", "h:3", "h"]) | st.text()) | st.none() | st.integers()
TASK = st.fixed_dictionaries({}, optional={"type": JOB | st.integers(), "index": st.integers() | st.text()})
CONFIG = st.fixed_dictionaries({}, optional={"cluster": st.dictionaries(JOB, ADDRESSES), "task": TASK | st.none()})


@given(st.text() | CONFIG.map(json.dumps))
def test_no_tf_config_raises_anything_but_usage_error(text: str) -> None:
    try:
        discover(argv=[], environ={"TF_CONFIG": text}, script_dir="/nowhere")
    except UsageError:
        return


FLAG = st.sampled_from(sorted(flags.CLUSTER_FLAGS + flags.SETTINGS_FLAGS))
VALUE = st.sampled_from(["ps", "worker", "0", "1", "h:1", "h:2", "sync", ""]) | st.text()
TOKEN = st.builds("--{}={}".format, FLAG, VALUE) | FLAG.map("--{}".format) | VALUE


@given(st.lists(TOKEN, max_size=8).map(lambda tokens: [*FOUR.split(), *tokens]), st.booleans())
def test_no_argv_raises_anything_but_usage_error(argv: list[str], is_asked: bool) -> None:
    try:
        discover(None, is_asked, argv, {}, "/nowhere")
    except UsageError:
        return


def test_tasks_of_one_user_share_a_secret(started: Started) -> None:
    first = started.found(FOUR).secret
    assert started.found(FOUR).secret == first
    given = started.folder / "given"
    given.touch(mode=0o600)
    given.write_text("ab" * 32)
    assert started.found(f"{FOUR} --secret-file={given}").secret == bytes([0xAB]) * 32 != first
