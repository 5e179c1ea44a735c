"""Check the markers of the tiers, order the longest tests first, and skip tests whose extra is not installed.

The tiers are disjoint, and together they are all tests: `make test` runs those without a marker, `make test-slow` those
marked `slow`, `make nightly` those marked `nightly`, which must say what they would catch that the others do not.
TensorFlow, gRPC and Ray are extras, and not imported to find out. What takes minutes begins first, so that no core
waits for it at the end.
"""

import os
import signal
from importlib.util import find_spec

import pytest

pytest_plugins = ["watchdog"]

PROCESSES_S = 240  # of a test that starts processes, each of which may take DEADLINE_S
NEEDS = "PACELINE_TEST_NEEDS"  # packages that must be there, by commas: no test may be skipped for the lack of one


def pytest_configure() -> None:
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, lambda *_: None)):
        if signal.getsignal(number) is signal.SIG_IGN:  # by `&` or nohup; processes of tests would inherit that
            signal.signal(number, handler)
    missing = [name for name in os.environ.get(NEEDS, "").split(",") if name and find_spec(name) is None]
    if missing:
        raise pytest.UsageError(f"{', '.join(missing)} is not installed, and must be: {NEEDS} says so.")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    silent = [item.nodeid for item in items for mark in item.iter_markers("nightly") if not "".join(mark.args)]
    if silent:
        raise pytest.UsageError(f"{silent[0]} is marked nightly, and must say what it would catch that CI does not.")
    for item in items:
        if "processes" in getattr(item, "fixturenames", ()) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(PROCESSES_S))
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if items:  # of a socket that another test has left: it comes when the garbage is collected, wherever that is
        items[0].session.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))


@pytest.fixture(scope="session")
def grpc() -> None:
    """For tests of the lane grpc; they are skipped, and say so, where gRPC is not installed."""
    if find_spec("grpc") is None:
        pytest.skip("gRPC is not installed: pip install 'paceline[grpc]'")


@pytest.fixture(scope="session")
def ray() -> None:
    """For tests on a Ray cluster; they are skipped, and say so, where Ray is not installed."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'paceline[ray]'")


@pytest.fixture(scope="session")
def tensorflow() -> None:
    """For tests whose processes import TensorFlow; they are skipped, and say so, where it is not installed."""
    if find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed: pip install 'paceline[tensorflow]'")
