"""WHO takes part? Tasks, ClusterSpec and what validate refuses."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task, split_address
from paceline.cluster.validate import check
from paceline.errors import UsageError

SPEC = ClusterSpec({"ps": ["h:1"], "worker": ["h:2", "h:3"]})
WITH_CHIEF = ClusterSpec({"worker": ["h:2", "h:3"], "ps": ["h:1"], "chief": ["h:4"]})


def test_a_task_is_written_and_read_in_both_spellings() -> None:
    task = Task("worker", 1)
    assert (str(task), task.device) == ("worker:1", "/job:worker/replica:0/task:1")
    assert Task.parse("worker:1") == task
    assert sorted([Task("worker", 10), Task("worker", 2), Task("ps", 5)])[1] == Task("worker", 2)


@pytest.mark.parametrize("text", ["", "worker", "worker:", ":1", "worker:-1", "worker:x", "a b:1", "worker:1:2"])
def test_what_is_no_task_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="job:index"):
        Task.parse(text)


def test_cluster_spec_answers_as_tensorflows_does() -> None:
    assert SPEC.jobs == ["ps", "worker"]
    assert SPEC.num_tasks("worker") == 2
    assert SPEC.task_indices("worker") == [0, 1]
    assert SPEC.task_address("worker", 1) == "h:3"
    assert SPEC.job_tasks("worker") == ["h:2", "h:3"]
    assert SPEC.as_dict() == {"ps": ["h:1"], "worker": ["h:2", "h:3"]}
    assert repr(SPEC) == "ClusterSpec({'ps': ['h:1'], 'worker': ['h:2', 'h:3']})"


def test_every_way_to_make_a_spec_gives_an_equal_one() -> None:
    assert ClusterSpec(SPEC) == SPEC
    assert ClusterSpec(SPEC.as_dict()) == SPEC
    assert ClusterSpec({"worker": {1: "h:3", 0: "h:2"}, "ps": {"0": "h:1"}}) == SPEC
    assert hash(ClusterSpec({"worker": ("h:2", "h:3"), "ps": ["h:1"]})) == hash(SPEC)
    assert SPEC != WITH_CHIEF


def test_workers_are_counted_from_the_chief() -> None:
    assert SPEC.chief == Task("worker", 0)
    assert WITH_CHIEF.chief == Task("chief", 0)
    assert [str(task) for task in WITH_CHIEF.workers] == ["chief:0", "worker:0", "worker:1"]
    assert WITH_CHIEF.worker_index(Task("worker", 1)) == 2
    assert WITH_CHIEF.ps == [Task("ps", 0)]
    assert WITH_CHIEF.address(Task("chief", 0)) == "h:4"


def test_questions_about_who_is_not_there_are_refused() -> None:
    with pytest.raises(UsageError, match=r"no job 'worke'; did you mean 'worker'\?"):
        SPEC.num_tasks("worke")
    with pytest.raises(UsageError, match="no task worker:2; job 'worker' has 2 tasks, indices 0 to 1"):
        SPEC.task_address("worker", 2)
    with pytest.raises(UsageError, match="ps:0 is no worker"):
        SPEC.worker_index(Task("ps", 0))
    with pytest.raises(UsageError, match="no chief"):
        _ = ClusterSpec({"ps": ["h:1"]}).chief


@pytest.mark.parametrize(
    ("cluster", "sentence"),
    [
        ({}, "cluster is empty"),
        ({"ps": []}, "'ps' has no tasks"),
        ({"ps": "h:1"}, "list of addresses"),
        ({"ps": ["h"]}, "'h' has no port"),
        ({"ps": ["h:"]}, "has no port"),
        ({"ps": ["h:0"]}, "from 1 to 65535"),
        ({"ps": ["h:65536"]}, "from 1 to 65535"),
        ({"ps": ["h:http"]}, "from 1 to 65535"),
        ({"ps": [":1"]}, "no valid host"),
        ({"ps": ["grpc://h:1"]}, "without a scheme"),
        ({"ps": ["::1:2222"]}, "no valid host"),
        ({"ps": ["h:1"], "worker": ["h:2", "H:01"]}, "ps:0 and worker:1 both have the address"),
        ({"chief": ["h:1", "h:2"]}, "only one task, not 2"),
        ({"worker": {0: "h:1", 2: "h:2"}}, "without a gap"),
        ({"a b": ["h:1"]}, "no job name"),
    ],
)
def test_a_bad_cluster_is_refused_with_one_sentence(cluster: dict[str, list[str]], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as refused:
        ClusterSpec(cluster)
    assert "\n" not in str(refused.value)


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert split_address("[fe80::1]:2222") == ("fe80::1", 2222)


JSON = st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x))


@given(st.dictionaries(st.sampled_from(["ps", "worker", "chief", ""]), JSON) | JSON)
def test_no_shape_of_cluster_raises_anything_but_usage_error(cluster: object) -> None:
    try:
        spec = ClusterSpec(cluster)  # type: ignore[arg-type]
    except UsageError:
        return
    assert ClusterSpec(spec.as_dict()) == spec


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mode": "asinc"}, r"Unknown mode 'asinc'; did you mean 'async'\? \(valid: async, sync, bounded, local\)"),
        ({"placement": "round-robin"}, "did you mean 'round_robin'"),
        ({"lane": "rdma"}, "valid: auto, shm, tcp, grpc[.]"),
        ({"data": "Shard"}, "did you mean 'shard'"),
        ({"buffers": "means"}, "did you mean 'mean'"),
        ({"replicas_to_aggregate": 1}, "only makes sense with --mode sync"),
        ({"mode": "sync", "replicas_to_aggregate": 0}, "a round needs at least 1 gradient"),
        ({"mode": "sync", "replicas_to_aggregate": 5, "extra_tokens": 1}, "give at most 4 gradients a round"),
        ({"lease_s": 0.0}, "above 0"),
        ({"wait_s": float("inf")}, "above 0"),
        ({"log_every": -1}, "0 .* or more"),
        ({"log_style": "tensorflow"}, "log-style.*tf"),
        ({"keep": 0}, "at least 1 checkpoint stays"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, object], sentence: str) -> None:
    plain = Settings(run_id="r")
    check(plain, SPEC)
    with pytest.raises(UsageError, match=sentence):
        check(msgspec.structs.replace(plain, **changes), SPEC)


def test_k_of_n_may_be_any_number_of_the_workers() -> None:
    for count in (1, 2, 3):
        check(Settings(run_id="r", mode="sync", replicas_to_aggregate=count), WITH_CHIEF)


@pytest.mark.parametrize(
    ("cluster", "sentence"),
    [({"worker": ["h:1"]}, "no job ps"), ({"ps": ["h:1"]}, "no job worker")],
)
def test_training_needs_a_ps_and_a_worker(cluster: dict[str, list[str]], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        check(Settings(run_id="r"), ClusterSpec(cluster))
