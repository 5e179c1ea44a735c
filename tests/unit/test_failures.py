"""WHAT is the root cause? The first failure for good, unless it names a task that had died before and came back."""

from paceline.cluster.spec import Task
from paceline.launchers.failures import Failure, in_order

GONE = "paceline: error: {} at 127.0.0.1:1 went away while it ran f: the connection ended"


def died(index: int) -> Failure:
    return Failure(Task("worker", index), -9, [], is_back=True)


def client(names: str, code: int = 3) -> Failure:
    return Failure(Task("worker", 0), code, [GONE.format(names)])


def test_the_death_of_the_task_that_a_failure_names_comes_first() -> None:
    failed = client("/job:worker/replica:0/task:1")
    later = Failure(Task("worker", 2), 3, [])
    assert in_order([failed, later], [died(1), died(2)]) == [died(1), failed, later]


def test_whoever_died_and_is_not_named_has_nothing_to_do_with_it() -> None:
    for names in ("/job:worker/replica:0/task:11", "/job:ps/replica:0/task:1"):
        assert in_order([client(names)], [died(1)]) == [client(names)]


def test_an_error_of_the_script_s_own_is_its_own_cause() -> None:
    raised = client("/job:worker/replica:0/task:1", code=1)
    assert in_order([raised], [died(1)]) == [raised]
    assert in_order([], [died(1)]) == [], "all is well again"
