"""HOW WELL was something learned, and by which bits? Told by lab/scripts/accuracy_script and in_graph_script.

Read by lab/matrices/accuracy and lab/matrices/seeds; its course by lab/results/series. Pure: no clock, no file, no
torch.
"""

import msgspec

from paceline.lab.scripts import curves


class Point(msgspec.Struct, frozen=True):
    """The parameters after so many updates: their test accuracy, and a hash of their bits."""

    updates: int
    accuracy: float
    digest: str


class Learned(msgspec.Struct, frozen=True):
    """One run's points, in the order in which they were reached; the last one is its end."""

    points: list[Point]
    first_epoch_s: float | None = None  # where no task of a cluster tells it
    epoch_s: float | None = None  # the mean of those after the first
    course: list[curves.Point] = []  # accuracies on the way, with the time trained until then; an older file has none
    batch: int | None = None  # samples of a worker's step
    client_us: dict[str, float] = {}  # in-graph: where the client's mean step went, as lab/scripts/feeding divides it

    @property
    def last(self) -> Point:
        return self.points[-1]

    def after(self, updates: int) -> Point | None:
        """The point after exactly so many updates.

        >>> Learned([Point(550, 0.3, "a"), Point(1100, 0.4, "b")]).after(550).accuracy
        0.3
        """
        return next((point for point in self.points if point.updates == updates), None)
