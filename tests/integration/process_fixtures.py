"""WHICH fixtures do tests on real processes share? Processes, ports, the gate and the training script.

Imported by the conftest of tests/integration and of tests/fault.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from processes import Gate, Processes

import paceline
from paceline.launchers.ports import Reserved
from paceline.telemetry.ledgers import verdict_of

PROGRAMS = Path(__file__).with_name("programs")


@contextmanager
def started_processes(folder: Path) -> Iterator[Processes]:
    """Starts processes in a folder; fails when one of them, or one that they started, survives."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's `&` has it ignored, and children inherit that
        signal.signal(signal.SIGINT, signal.default_int_handler)
    started = Processes(folder)
    try:
        yield started
        left = started.survivors()
    finally:
        started.kill()
        started.print_all()
    assert not left, f"these processes survived the test: {left}"
    assert not started.violations(), "its ledgers do not agree"
    assert not started.executed_data(), f"I7: a ps executed data: {started.executed_data()}"


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with started_processes(tmp_path) as started:
        yield started


@pytest.fixture(autouse=True)
def verified_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """paceline.launch writes ledgers, and they are verified when it has ended."""
    plain = paceline.launch
    numbers = count(1)

    def launch(*args: Any, **options: Any) -> dict[str, Any]:
        folder = Path(options.setdefault("run_dir", str(tmp_path / f"launched-{next(numbers)}")))
        told = plain(*args, **{"ledger": True, **options})
        assert verdict_of(folder).violations == []
        return told

    monkeypatch.setattr(paceline, "launch", launch)


@pytest.fixture
def ports() -> Iterator[Reserved]:
    """Free loopback addresses that nobody else gets while the test runs."""
    with Reserved() as reserved:
        yield reserved


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path)
    yield made
    made.close()


@pytest.fixture
def train() -> Path:
    """The script that most tests run; see its --help for the faults it can place."""
    return PROGRAMS / "train.py"
