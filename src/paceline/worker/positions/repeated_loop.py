"""Refuse a training loop that counts from 0 again where the run goes on, or end it in time.

Made by worker/session for the prepared worker, called by worker/positions/position. After `--resume` such a loop is
refused. In a worker that was started again in a run it goes on, and ends when the others have ended and it has done as
much as they.
"""

import time
from collections.abc import Callable
from typing import NoReturn

from paceline.checkpoint.loop import PASS, Loop
from paceline.errors import UsageError
from paceline.worker.positions.position import Progress
from paceline.worker.step.training_step import TrainingStep

ASK_S = 0.5  # how often it is asked, inside a pass, whether the others have ended
PLAIN_RANGE = "write `for epoch in ctx.epochs(n)` instead of `for epoch in range(n)`, or `for _ in ctx.steps(total)`"


class RepeatedLoop:
    """One worker's loop, once it is known that neither ctx.epochs nor ctx.steps guides it."""

    def __init__(
        self,
        worker: int,
        training_step: TrainingStep,
        progress: Progress,
        is_restarted: bool,
        warn: Callable[[str], None],
    ) -> None:
        self._worker = worker
        self._training_step = training_step
        self._progress = progress
        self._is_restarted = is_restarted
        self._warn = warn
        self._asked_s = 0.0
        self._others_did: tuple[int, int] | None = None  # most passes and steps of the others, once all have ended

    def check(self, loop: Loop, global_step: int) -> None:
        """Refuse a loop that begins again after `--resume`; in a restarted worker, end it when the others end."""
        change = loop.change if loop.begins_again else PLAIN_RANGE
        if not self._is_restarted:
            if loop.begins_again:
                raise UsageError(loop.refusal("this run goes on from a checkpoint", global_step))
            if not loop.kind:
                self._warn(f"the loop of this script cannot be read; if it begins again after a resume, {change}")
            return
        self._progress.on_repeat = self._end_with_the_others
        if loop.kind != PASS:
            self._warn(
                "this worker was started again and goes on where it was, but its loop counts from 0 again: it ends "
                f"when the other workers have ended and it has done as much as they; to let it end by itself, {change}"
            )

    def _end_with_the_others(self, is_inside: bool) -> None:
        """End this worker if all others have ended and it has done as much as they have. Inside a pass (`is_inside`),
        ask for that only now and then."""
        if self._others_did is None:
            now_s = time.monotonic()
            if is_inside and now_s - self._asked_s < ASK_S:
                return
            self._asked_s, status = now_s, self._training_step.client.status()
            if set(status.live) - {self._worker} or not status.ended:
                return
            passes, pushes = zip(*status.ended.values(), strict=True)
            self._others_did = max(passes), max(pushes)
        done, steps = self._others_did
        if self._progress.done >= done and (done or self._training_step.steps >= steps):
            self._end(f"{done} passes over the data" if done else f"{steps} steps")

    def _end(self, what: str) -> NoReturn:
        self._training_step.settle()
        self._warn(f"this worker ends here: as the others, it has made {what}, with those before its restart")
        raise SystemExit(0)
