"""The fixtures of tests on hosts: those of tests/integration, and `hosts`, which makes some."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from process_fixtures import gate, ports, processes, train, verified_launch
from processes import Processes
from running_hosts import RunningHost, lacking, running_hosts

__all__ = ["gate", "ports", "processes", "train", "verified_launch"]


@pytest.fixture
def hosts(processes: Processes, tmp_path: Path) -> Iterator[Callable[[int], list[RunningHost]]]:
    """`hosts(2)`: so many hosts, each with an sshd; skipped, loudly, where there can be none."""
    if why := lacking():
        pytest.skip(f"NOT TESTED: there can be no hosts here: {why}")
    with ExitStack() as stack:
        yield lambda count: stack.enter_context(running_hosts(count, tmp_path / "hosts", processes))
