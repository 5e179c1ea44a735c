"""Save and restore what of PyTorch belongs to a worker's position: generators, schedulers and options.

Made by frameworks/torch/preparation, used by worker/positions/position. What cannot be saved is said once, and starts
anew after a restart.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from paceline.frameworks.torch import rng as torch_rng
from paceline.frameworks.torch.options import load_groups, load_scheduler, saved_groups, saved_scheduler
from paceline.wire.messages import Position
from paceline.worker.positions.position import Own


class TorchOwn(Own):
    """The generators, schedulers and options of one worker. A scheduler may count on the steps of an epoch."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedulers: Sequence[Any], say: Callable[[str], None]) -> None:
        self._optimizer = optimizer
        self._schedulers = schedulers
        self._say = say
        self._generators: dict[str, torch.Generator] = {}
        self._said: set[int] = set()

    def follow(self, loader: DataLoader[Any]) -> None:
        """Save the generators of this loader and of its samplers, too."""
        batches = getattr(loader.batch_sampler, "of_script", loader.batch_sampler)
        sampler = getattr(batches, "sampler", loader.sampler)
        for name, owner in (("loader", loader), ("batches", batches), ("sampler", sampler)):
            for attribute, value in getattr(owner, "__dict__", {}).items():
                if isinstance(value, torch.Generator):
                    self._generators[name if attribute == "generator" else f"{name}.{attribute}"] = value
                elif isinstance(value, np.random.Generator | np.random.RandomState | random.Random):
                    self._say(
                        f"paceline: {type(owner).__name__}.{attribute} is a random generator that checkpoints do not "
                        "hold: after a restart it starts anew. A torch.Generator in its place goes on"
                    )

    def capture(self) -> torch_rng.Rng:
        return torch_rng.capture(self._generators)

    def restore(self, states: Mapping[str, bytes]) -> None:
        torch_rng.restore(states, self._generators)

    def options(self) -> tuple[list[dict[str, object] | None], list[dict[str, object]]]:
        told = [saved_scheduler(each) for each in self._schedulers]
        for number, (state, scheduler) in enumerate(zip(told, self._schedulers, strict=True)):
            if state is None and number not in self._said:
                self._said.add(number)
                self._say(
                    f"paceline: the state of {type(scheduler).__name__} is not made of plain values, so checkpoints "
                    "leave it out: after a restart it starts anew"
                )
        return told, saved_groups(self._optimizer)

    def load(self, position: Position) -> None:
        groups = position.groups or []
        if groups and not load_groups(self._optimizer, groups):
            self._say(
                f"paceline: the optimizer had {len(groups)} parameter groups where training goes on from, and has "
                f"{len(self._optimizer.param_groups)} now: its options start anew"
            )
        has_scheduler = any("initial_lr" in group for group in groups)
        if has_scheduler and not self._schedulers:
            self._say(
                "paceline: a scheduler changes this optimizer's options, and was not given to prepare(): it starts "
                "anew; with prepare(model, optimizer, loader, scheduler) it goes on"
            )
        for scheduler, state in zip(self._schedulers, position.schedulers, strict=False):
            if state is not None:
                load_scheduler(scheduler, state)
