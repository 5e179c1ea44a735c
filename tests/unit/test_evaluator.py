"""An evaluator's step is that of the values which its model holds now."""

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.worker import evaluator
from paceline.worker.evaluator import Evaluator


class Variables:
    """Two variables of a run that trains on: each look at them finds another version."""

    def __init__(self) -> None:
        self.layout = SimpleNamespace(tensors=[SimpleNamespace(name=name) for name in ("a", "optimizer.0")])
        self.version = 0
        self.is_closed = False

    def __iter__(self) -> Any:
        return iter(["a", "optimizer.0"])

    def get(self, name: str, is_averaged: bool) -> Any:
        self.version += 1
        return SimpleNamespace(version=self.version), (name, is_averaged)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Variables:
    made = Variables()
    monkeypatch.setattr(evaluator, "_wait_for_values", lambda me, say: made)
    return made


def test_the_step_is_that_of_the_values_in_the_model(variables: Variables) -> None:
    taken: list[Any] = []
    follows = Evaluator({"a": taken.append}, SimpleNamespace(), print)  # type: ignore[arg-type]
    follows.pull()
    assert (follows.step, taken) == (1, [("a", False)])
    with follows.averages():
        assert (follows.step, taken[-1]) == (2, ("a", True))
    assert (follows.step, taken[-1]) == (3, ("a", False)), "after averages the model holds the newest values again"


def test_a_model_that_lacks_a_variable_is_refused_and_nothing_stays_open(variables: Variables) -> None:
    with pytest.raises(UsageError, match="lacks a, which the cluster trains"):
        Evaluator({}, SimpleNamespace(), print)  # type: ignore[arg-type]
    assert variables.is_closed
