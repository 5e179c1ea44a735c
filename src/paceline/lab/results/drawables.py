"""WHAT is a picture of the lab? Lines or bars with their names and units, before anybody draws them.

Made by lab/results/series and lab/results/task_series, drawn by lab/results/plots. Pure.
"""

import msgspec

from paceline.lab.measuring.starting import slug

MOST_LINES = 10  # in one picture: more cannot be told apart


class Line(msgspec.Struct, frozen=True):
    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]


class Lines(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers against numbers. `ideal`: a line that is drawn thin beside them, as what would be best."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    ideal: Line | None = None
    is_counted: bool = False  # x are whole numbers, and both axes begin at 0
    is_doubled: bool = False  # x are 1, 2, 4, …: as far apart on paper, each with its number; y begins at 0


class Group(msgspec.Struct, frozen=True):
    """One colour of bars: a value for each category (None: not measured), and how far it scatters."""

    label: str
    values: tuple[float | None, ...]
    errors: tuple[tuple[float, float] | None, ...] = ()  # below and above


class Bars(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers for names: one below the other, beside or on top of each other."""

    name: str
    title: str
    unit: str
    categories: tuple[str, ...]
    groups: tuple[Group, ...]
    is_stacked: bool = False
    mark: float | None = None  # a line to compare with
    is_upright: bool = False  # categories are numbers, from left to right
    x_label: str = ""  # of those


Picture = Lines | Bars


def name_of(table: str, what: str) -> str:
    """A picture's name, which is its file's.

    >>> name_of("MNIST to 0.97", "scaling")
    'MNIST-to-0-97-scaling'
    """
    return f"{slug(table)[:60]}-{what}"
