"""WHO hears that a task only serves ops? Every ps that listens, now, later, or once more after it was started again."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paceline.cluster.discovery import Assignment
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.ingraph.aside import Aside
from paceline.launchers.ports import Reserved
from paceline.modes import make as make_mode
from paceline.modes.spec import ModeSpec
from paceline.server.control.config import PsConfig
from paceline.server.service import Service

SECRET = b"1" * 32


@contextmanager
def listening(address: str) -> Iterator[Service]:
    config = PsConfig(0, 1, 2, "r", make_mode(ModeSpec(), 2), "bytes", lease_s=60.0)
    ps = Service(config, SECRET, lambda of, report: None)
    ps.listen(address, ("tcp",))
    running = threading.Thread(target=ps.run, args=(lambda core: None,))
    running.start()
    try:
        yield ps
    finally:
        ps.stop()
        running.join(60)


@pytest.mark.parametrize("source", ["launcher", "flags"])
def test_a_ps_hears_it_when_it_comes_and_again_when_it_was_started_anew(source: str) -> None:
    with Reserved() as ports:
        cluster = ClusterSpec({"ps": ports.addresses(1), "worker": ports.addresses(2)})
        ports.before_start()
    address = cluster.address(Task("ps", 0))
    aside = Aside(Assignment(cluster, Task("worker", 1), 1, Settings(run_id="r", lane="tcp"), SECRET, source))
    aside.tell()  # nobody is there yet
    for _ in range(2):
        with listening(address) as ps:
            assert ps.core.control.members.missing == [0, 1]
            aside.tell()
            aside.tell()
            assert ps.core.control.members.missing == [0]
            assert len(aside._told) == 1
    aside.close()


def test_a_cluster_without_ps_and_a_task_that_is_no_worker_have_nobody_to_tell() -> None:
    workers = ClusterSpec({"worker": ["h:1"]})
    with_ps = ClusterSpec({"ps": ["h:2"], "worker": ["h:1"]})
    for cluster, task in ((workers, Task("worker", 0)), (with_ps, Task("ps", 0))):
        assert Aside(Assignment(cluster, task, 1, Settings(run_id="r"), SECRET, "flags"))._ps == []
