"""WHICH machines may Ray's autoscaler add? By its file, and by its command; without a Ray."""

from pathlib import Path

import pytest

from paceline.launchers.ray.growing import Growth, Kind, monitor, written

TYPES = """
max_workers: {all}
head_node_type: head
available_node_types:
  head: {{resources: {{CPU: 0}}, node_config: {{}}, max_workers: 0}}
  small: {{resources: {{CPU: 1, memory: 7000}}, node_config: {{a: b}}, max_workers: 4}}
"""


@pytest.mark.parametrize(("everything", "at_most"), [(2, 2), (9, 4), ("null", 4)])
def test_a_file_that_says_all(everything: object, at_most: int, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(TYPES.format(all=everything))
    assert written(file) == Growth([Kind({"CPU": 1.0, "memory": 7000.0}, at_most)])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "}",
        "provider: {type: local}",
        "available_node_types: {small: {max_workers: 2}}",
        "available_node_types: {small: {resources: {}, max_workers: 2}}",
    ],
)
def test_a_file_that_does_not_say_all_leaves_everything_possible(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert written(tmp_path / "config.yaml") == Growth() == written(tmp_path / "none.yaml")


def test_the_autoscaler_of_another_ray_is_none_of_this_one() -> None:
    ours = ["python", "-u", "/ray/autoscaler/_private/monitor.py", "--gcs-address=10.0.0.1:6379"]
    other = [*ours[:-1], "--gcs-address=10.0.0.1:6380"]
    reader = ["tail", "--gcs-address=10.0.0.1:6379"]
    assert monitor([[], reader, other, ours], "10.0.0.1:6379") == ours
    assert monitor([[], reader, other], "10.0.0.1:6379") is None
