"""WHERE is a worker that is saved at the end of a pass? At the next epoch: nobody gets a pass without a batch."""

from collections.abc import Iterator

import pytest
import torch

from paceline.frameworks.torch.data import _Counted
from paceline.telemetry.steps import StepClock
from paceline.wire.messages import EPOCH, Position
from paceline.worker.positions.position import NoWorker, Own, Progress


class Batches:
    """An iterator as a loader's: it knows its length."""

    def __init__(self, count: int) -> None:
        self._left = iter([torch.zeros(1)] * count)
        self._count = count

    def __next__(self) -> torch.Tensor:
        return next(self._left)

    def __len__(self) -> int:
        return self._count


def steps_of(progress: Progress, epochs: int, count: int) -> Iterator[tuple[int, int]]:
    for epoch in progress.epochs(epochs):
        progress.begin_pass()
        for number, _ in enumerate(_Counted(Batches(count), None, progress, StepClock())):
            progress.pushed()
            yield epoch, number


class Told(NoWorker):
    """A worker that keeps what it sends."""

    def __init__(self) -> None:
        self.sent: list[Position] = []

    def send_position(self, position: Position) -> None:
        self.sent.append(position)


def sent_after(step: tuple[int, int], epochs: int = 3, count: int = 2) -> Position:
    """What a worker says of itself when the update of this step is saved."""
    told = Told()
    progress = Progress(0, told)
    announce = {(0, 1): (0, 0), (1, 0): (0, 1), (1, 1): (1, 0), (2, 1): (2, 0)}[step]
    for at in steps_of(progress, epochs, count):
        if at == announce:
            progress.announced(7)
    (position,) = told.sent
    return position


def test_in_the_middle_of_a_pass() -> None:
    position = sent_after((1, 0))
    assert (position.epoch, position.batch, position.version) == (1, 1, 7)


def test_after_the_last_batch_the_next_epoch_is_next() -> None:
    for step in ((0, 1), (1, 1), (2, 1)):
        position = sent_after(step)
        assert (position.epoch, position.batch, position.at) == (step[0] + 1, 0, EPOCH)


def test_what_the_script_saves_after_its_pass_goes_on_with_the_next_epoch() -> None:
    progress = Progress(0)
    for epoch in progress.epochs(2):
        progress.begin_pass()
        for _ in _Counted(Batches(2), None, progress, StepClock()):
            progress.pushed()
        position = progress.at_end(5)
        assert (position.epoch, position.batch) == (epoch + 1, 0)


class Counting(Own):
    """Options that change with every push; `goes_on` as in Keras, or not."""

    def __init__(self, goes_on: bool) -> None:
        self.goes_on = goes_on
        self.count = 0

    def options(self) -> tuple[list[dict[str, object] | None], list[dict[str, object]]]:
        return [], [{"count": self.count}]


@pytest.mark.parametrize(("goes_on", "said"), [(True, 5), (False, 3)])
def test_in_an_epoch_without_batches_of_ours_the_options_are_known(goes_on: bool, said: int) -> None:
    """Three pushes an epoch: the fifth is saved. Options that go on with the steps are as then, others as the epoch
    began: with it they begin again."""
    told, beats = Told(), []
    progress = Progress(0, told)
    progress.own = Counting(goes_on)
    for _ in progress.epochs(2):
        for _ in range(3):
            if progress.own.count == 4:
                progress.announced(5)
            progress.pushed()
            if progress.own.count == 5:
                beats.append(progress.beat())
            progress.own.count += 1
    assert [(p.epoch, p.version, p.groups) for p in told.sent] == [(1, 5, [{"count": said}])]
    assert [(p.epoch, p.groups) for p in beats] == [(1, [{"count": said}])]
