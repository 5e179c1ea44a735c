"""HOW does a tower stand on another task? Values and a batch go there, a loss and its gradient come back.

Used by ingraph/towers. No code travels: the loss must be a paceline.op, and the model of torch.nn's plain layers, or
made by an op. Must never read the model in its own thread: the thread that trains may be changing it.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import nn

from paceline.cluster.devices import Device
from paceline.frameworks.torch.devices import here, torch_device
from paceline.ingraph import copies, neighbours
from paceline.ingraph.mirror import Build, Mirror, News, op_name, remote_for
from paceline.ingraph.precision import Precision
from paceline.ingraph.remote import Remote
from paceline.ingraph.replicas import Batch, Computed, LocalTower, Loss, Tower


def tower_on(model: nn.Module, device: Device, build: Build | None, number: int) -> Tower:
    """The tower of that number, wherever its device is."""
    remote = remote_for(device)
    if remote is None:
        return LocalTower(model, torch_device(device.hardware))
    return RemoteTower(remote, model, device, build, number)


def gpus_of(device: Device) -> list[str]:
    """The GPUs of a device's task, as tables show them."""
    if device.job is None and device.task is None:
        return here().names
    cluster = neighbours.current()
    return cluster.gpus_of(cluster.task_of(device))


class RemoteTower:
    """A tower on a device of another task."""

    def __init__(self, remote: Remote, model: nn.Module, device: Device, build: Build | None, number: int) -> None:
        self.place = f"{remote.name}{device.hardware}"
        self._mirror = Mirror(remote, model, build, str(device.hardware), f"tower {number}")
        self._number = number
        self._news: News | None = None
        self._precision: Any = None
        self._passes = 0
        self._seed = torch.initial_seed()

    def load(self, model: nn.Module) -> None:
        self._news, self._precision = self._mirror.news(model), msgspec.to_builtins(Precision.now())

    def compute(self, loss: Loss, batch: Batch) -> Computed:
        assert self._news is not None, "load() comes first"
        given = dict(batch) if isinstance(batch, Mapping) else tuple(batch)
        self._passes += 1
        seed = (self._seed + (self._passes << 20) + self._number) % (1 << 63)
        name = op_name(loss, "loss")
        told = self._mirror.call(copies.tower, self._news, name, given, seed, self._number == 0, self._precision)
        return Computed(*told)

    def close(self) -> None:
        self._mirror.close()
