"""WHAT is asked of a Ray cluster, and can it ever be had? Without a Ray."""

import pytest

from paceline.cluster.spec import Task
from paceline.errors import UsageError
from paceline.launchers.ray import bundles
from paceline.launchers.ray.bundles import Wish, fit


def test_every_task_has_a_bundle_of_its_own() -> None:
    asked = bundles.bundles(Wish(ps=2, workers=3, worker_cpus=2.0, worker_gpus=1.0))
    assert asked.wanted == [{"CPU": 1.0}] * 2 + [{"CPU": 2.0, "GPU": 1.0}] * 3
    assert sorted(asked.of.values()) == [0, 1, 2, 3, 4] and asked.of[Task("worker", 0)] == 2
    assert asked.later == []


def test_colocated_each_ps_shares_a_bundle_with_its_part_of_the_workers() -> None:
    asked = bundles.bundles(Wish(ps=2, workers=5, is_colocated=True))
    assert asked.wanted == [{"CPU": 4.0}, {"CPU": 3.0}]
    together = [[str(task) for task, place in asked.of.items() if place == here] for here in (0, 1)]
    assert together == [["ps:0", "worker:0", "worker:2", "worker:4"], ["ps:1", "worker:1", "worker:3"]]


@pytest.mark.parametrize("is_colocated", [False, True])
def test_those_who_may_join_later_are_not_reserved_for(is_colocated: bool) -> None:
    asked = bundles.bundles(Wish(ps=1, workers=6, started=2, is_colocated=is_colocated))
    assert sum(bundle["CPU"] for bundle in asked.wanted) == 3.0
    assert [str(task) for task in asked.later] == ["worker:2", "worker:3", "worker:4", "worker:5"]


@pytest.mark.parametrize(
    ("wanted", "machines", "can"),
    [
        ([{"CPU": 1}] * 3, [{"CPU": 2}], False),
        ([{"CPU": 1}] * 3, [{"CPU": 2}, {"CPU": 1}], True),
        ([{"CPU": 3}], [{"CPU": 2}, {"CPU": 2}], False),  # enough in all, but a bundle lies on one machine
        ([{"CPU": 1}, {"CPU": 1, "GPU": 1}], [{"CPU": 8}], False),
        ([{"CPU": 1}] * 2 + [{"CPU": 1, "GPU": 1}] * 2, [{"CPU": 2, "GPU": 2}, {"CPU": 2}], True),
        ([{"CPU": 1}] * 2 + [{"CPU": 2}] * 2, [{"CPU": 3}, {"CPU": 3}], True),  # not with both small ones in one
        ([{"CPU": 0.5}] * 4, [{"CPU": 2}], True),
        ([{"CPU": 1}], [], False),
    ],
)
def test_what_fits(wanted: list[dict[str, float]], machines: list[dict[str, float]], can: bool) -> None:
    assert fit(wanted, machines) is can


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        (Wish(worker_gpus=-1), r"--worker-gpus is -1; it must be 0 or more"),
        (Wish(worker_gpus=1.5), r"Ray gives a share of one, or a whole number"),
        (Wish(worker_cpus=0), r"--worker-cpus 0 leaves nothing to ask Ray for"),
        (Wish(ps=3, workers=2, is_colocated=True), r"3 ps and 2 workers"),
    ],
)
def test_what_no_ray_can_give_is_refused(wish: Wish, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        bundles.check(wish)
