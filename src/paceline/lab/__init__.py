"""WHAT is measured? Scenarios, run side by side; a new matrix is one file and one line here."""

from collections.abc import Callable

from paceline.lab import overhead
from paceline.lab.scenario import Matrix

MATRICES: dict[str, Callable[[], Matrix]] = {"overhead": overhead.matrix}
