"""HOW calmly did a model learn? What a training script tells of its course, and how that becomes three numbers.

Written by lab/scripts/mnist_script, lab/scripts/ema_script and lab/scripts/cards_script, read by lab/matrices/modes
and lab/matrices/cards. Pure: no clock, no file, no torch.
"""

import math
from collections.abc import Sequence

import msgspec

TOLD = "lab.json"  # what a script tells, in its run folder
DECAY = 0.98  # of the running mean that a loss is compared with


class Point(msgspec.Struct, frozen=True):
    """The test accuracy of the parameters that the chief held at a moment."""

    at_s: float  # since all workers were ready
    updates: int
    accuracy: float


class Timed(msgspec.Struct, frozen=True):
    """What one process trained on when it was warm, and from when to when, by the machine's clock."""

    samples: float
    began_s: float
    ended_s: float


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One run: until the accuracy was reached, and a while beyond it."""

    seconds: float  # from the moment all workers were ready to the end of the last step
    updates: int
    reached: Point | None  # the first one at the accuracy that was asked for
    points: list[Point]  # on the way
    tail: list[Point]  # beyond
    jitter: float | None
    device: str = ""  # where, if it is told
    timed: Timed | None = None  # of the process that tells

    @property
    def best(self) -> float | None:
        return max((point.accuracy for point in [*self.points, *self.tail]), default=None)


class Averages(msgspec.Struct, frozen=True, kw_only=True):
    """Test accuracies of the last and of the averaged parameters, at the same moments."""

    last: list[float]
    averaged: list[float]


def jitter(losses: Sequence[float], skip: int, decay: float = DECAY) -> float | None:
    """How far a step's loss lies from the running mean of those before it: root of the mean square.

    The first `skip` losses only feed the mean. None when nothing is left, or a loss is not finite.

    >>> jitter([1.0, 1.0, 1.0, 3.0], skip=2)
    1.4142135623730951
    """
    if len(losses) <= skip or not losses or not all(math.isfinite(loss) for loss in losses):
        return None
    mean, squares = losses[0], 0.0
    for at, loss in enumerate(losses):
        if at >= skip:
            squares += (loss - mean) ** 2
        mean = decay * mean + (1 - decay) * loss
    return math.sqrt(squares / (len(losses) - skip))


def samples_per_s(processes: Sequence[Timed]) -> float | None:
    """Of all processes, over one window: from when the first was warm until the last had ended.

    >>> samples_per_s([Timed(500, 0.0, 10.0), Timed(500, 10.0, 20.0)])
    50.0
    """
    if not processes:
        return None
    passed_s = max(each.ended_s for each in processes) - min(each.began_s for each in processes)
    return sum(each.samples for each in processes) / passed_s if passed_s > 0 else None


def spread(values: Sequence[float]) -> float | None:
    """Between the largest and the smallest; None for fewer than two.

    >>> spread([0.97, 0.96, 0.975])
    0.015000000000000013
    """
    return max(values) - min(values) if len(values) > 1 else None
