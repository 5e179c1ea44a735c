"""Hold Keras programs (keras_programs.py) to what their rows say: the numbers of plain Keras, or a refusal."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import TrainingFailed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def table(tensorflow: None) -> Any:
    """The table; importing it imports TensorFlow."""
    import_module("keras_programs")
    return import_module("keras_table")


ALL = pytest.mark.nightly("a Keras program that goes wrong on two workers alone")


@pytest.mark.parametrize(("workers", "every"), [(1, 1), (2, 4), pytest.param(2, 1, marks=ALL)])
def test_keras_programs(table: Any, workers: int, every: int, tmp_path: Path) -> None:
    """One test of all rows, so that a skip or a missing row is one line. Names every row that does not hold."""
    wrong = [
        f"{name}: {said}"
        for name, each in list(table.CASES.items())[::every]
        if (said := judge(table, each, workers, tmp_path / name))
    ]
    assert len(table.CASES) >= 40
    assert not wrong, "\n".join(wrong)


def judge(table: Any, each: Any, workers: int, folder: Path) -> str:
    """Say what is wrong with this row; nothing, if it holds."""
    folder.mkdir()
    verdict = each.one if workers == 1 else each.two
    try:
        ours = table.run_cluster(each.program, folder, workers)
    except TrainingFailed as error:
        told = str(error.__cause__)
        return "" if isinstance(verdict, str) and verdict in told else f"refused: {told}"
    if isinstance(verdict, str):
        return "not refused"
    plain = table.run_plain(each.program, folder, workers)
    return "; ".join(filter(None, (differs(a, b, verdict) for a, b in zip(plain, ours, strict=True))))


def differs(plain: list[Any], ours: list[Any], most: float) -> str:
    if [each.shape for each in plain] != [each.shape for each in ours]:
        return f"shapes {[each.shape for each in plain]} and {[each.shape for each in ours]}"
    if all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(plain, ours, strict=True)):
        return ""
    apart = max(
        float(np.abs(a.astype("float64") - b.astype("float64")).max()) for a, b in zip(plain, ours, strict=True)
    )
    return "" if apart <= most else f"{apart:.2g} apart, not {most:.2g}"
