"""Read any variable from the ps by name, beside the training: a ps as a key-value store.

Used by ctx.kv, evaluators and `paceline kv`. Opens its own connections, joins nothing, changes nothing. No framework.
A connection that ends is made again for up to `wait_s`: a ps may have been started again.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from paceline.checkpoint.tensors import RAW
from paceline.cluster.settings import PACELINE
from paceline.errors import (
    AuthenticationError,
    ClusterError,
    ConnectionLost,
    PacelineError,
    UsageError,
    WaitTimeout,
)
from paceline.params.layout import ITEM_BYTES, Layout, TensorSpec, total_bytes
from paceline.params.placement import Plan, place
from paceline.transport.channel import Channel, connect
from paceline.transport.security import Role
from paceline.wire import messages as m
from paceline.worker.reach import OWN, Access, located
from paceline.worker.requests.deadline import Deadline
from paceline.worker.requests.joining import RETRY_S, device
from paceline.worker.requests.rpc import call

R = TypeVar("R")


class Entry(msgspec.Struct, frozen=True):
    """One variable: what it is, which version of it, and on which ps it lies."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    version: int
    ps: tuple[str, ...]
    is_trained: bool


class NothingYet(ClusterError):
    """The ps answer, but no worker has brought them a model."""


class Kv:
    """Reads variables of a run. `kv["0.weight"]` is a numpy array (bfloat16 comes as float32)."""

    def __init__(
        self,
        addresses: Sequence[str],
        lane: str,
        secret: bytes,
        wait_s: float = 0.0,
        say: Callable[[str], None] = lambda line: None,
        style: str = PACELINE,
    ) -> None:
        self._addresses, self._lane, self._secret = addresses, lane, secret
        self._wait_s, self._say, self._style = wait_s, say, style
        self._channels = [self._connect(index) for index in range(len(addresses))]
        self._limit_bytes = 0
        described = [self._ask(index, m.Describe(), m.Described)[0] for index in range(len(addresses))]
        first = described[0]
        if first.layout is None:
            self.close()
            raise NothingYet("the ps hold nothing yet: no chief has initialised the model")
        self.layout: Layout = first.layout
        self._limit_bytes = total_bytes(self.layout.tensors)
        self.plan: Plan = place(self.layout, first.num_ps, first.placement)
        self._versions = [each.version for each in described]

    def __iter__(self) -> Iterator[str]:
        return iter([t.name for t in self.layout.tensors])

    def __getitem__(self, name: str) -> "np.ndarray[Any, Any]":
        return self.get(name)[1]

    def entries(self) -> list[Entry]:
        """Return all variables, in the model's order."""
        return [self._entry(t.name, self._versions) for t in self.layout.tensors]

    def get(self, name: str, is_averaged: bool = False) -> tuple[Entry, "np.ndarray[Any, Any]"]:
        """Return a variable's newest values, or what the ps keep as its average with --ema; raise UsageError with the
        names there are if there is none of that name."""
        spec = next((t for t in self.layout.tensors if t.name == name), None)
        if spec is None:
            raise UsageError(
                f"no variable '{name}' on the ps; there are {', '.join(t.name for t in self.layout.tensors)}"
            )
        memory = bytearray(spec.size_bytes)
        versions = list(self._versions)
        if spec.is_trained:
            index = self.layout.trained.index(spec)
            item = ITEM_BYTES[spec.dtype]
            for shard, piece in self.plan.owners(index):
                reply, block = self._ask(shard, m.Fetch("ema" if is_averaged else "parameters", index), m.Fetched)
                memory[piece.start * item : piece.stop * item] = block
                versions[shard] = reply.version
        else:
            offset = self.layout.carried_offsets[self.layout.carried.index(spec)]
            _, block = self._ask(0, m.Fetch("carried"), m.Fetched)
            memory[:] = block[offset : offset + spec.size_bytes]
        return self._entry(name, versions), _as_array(spec, memory)

    def _entry(self, name: str, versions: Sequence[int]) -> Entry:
        spec = next(t for t in self.layout.tensors if t.name == name)
        shards = [s for s, _ in self.plan.owners(self.layout.trained.index(spec))] if spec.is_trained else [0]
        version = max((versions[s] for s in shards), default=0)
        return Entry(name, spec.shape, spec.dtype, version, tuple(f"ps:{s}" for s in shards), spec.is_trained)

    def _ask(self, index: int, request: m.Request, expects: type[R]) -> tuple[R, bytearray]:
        """Ask this ps, on this connection or on the next one."""
        return call(_Reader(self, index), request, expects, limit_bytes=self._limit_bytes)

    def _connect(self, index: int) -> Channel:
        return connect(self._addresses[index], self._lane, self._secret, role=Role.READER)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


class _Reader:
    """One ps for a reader."""

    def __init__(self, kv: Kv, index: int) -> None:
        self.name = f"ps:{index}"
        self._kv = kv
        self._index = index
        self._waiting: Deadline | None = None
        if kv._wait_s:
            self._waiting = Deadline(kv._wait_s, [device(index)], kv._say, style=kv._style)

    @property
    def channel(self) -> Channel:
        return self._kv._channels[self._index]

    def reconnect(self, error: ClusterError) -> None:
        if self._waiting is None or isinstance(error, WaitTimeout):
            raise error
        self.channel.close()
        while True:
            self._waiting.again(f"{device(self._index)} at {self._kv._addresses[self._index]} went away ({error})")
            try:
                self._kv._channels[self._index] = self._kv._connect(self._index)
                return
            except ConnectionLost as lost:
                error = lost
                time.sleep(RETRY_S)  # nothing tells when a ps can be connected to


def _as_array(spec: TensorSpec, memory: bytearray) -> "np.ndarray[Any, Any]":
    item = ITEM_BYTES[spec.dtype]
    raw = np.frombuffer(memory, dtype=RAW[item])
    if spec.dtype == "bfloat16":
        raw, item = raw.astype(np.uint32) << 16, 4
        values = raw.view(np.float32)
    else:
        values = raw.view(spec.dtype)
    return np.lib.stride_tricks.as_strided(values, spec.shape, tuple(s * item for s in spec.stride)).copy()


def open_run(run: Path | str, access: Access = OWN) -> Kv:
    """Connect to a run that trains now, by its folder or the addresses of its ps."""
    found = located(run, access)
    try:
        return Kv(found.ps, "auto", found.secret)
    except AuthenticationError as error:
        raise UsageError(found.refused(error)) from error
    except NothingYet as error:
        raise PacelineError(f"the run in {run} has not begun: {error}") from error
    except ClusterError as error:
        raise PacelineError(f"the run in {run} does not answer, it may have ended: {error}") from error


def read(run: Path | str, access: Access = OWN) -> list[Entry]:
    """Return all variables, for `paceline kv ls`."""
    with closing(open_run(run, access)) as kv:
        return kv.entries()


def value(run: Path | str, name: str, access: Access = OWN) -> tuple[Entry, "np.ndarray[Any, Any]"]:
    """Return one variable with its values, for `paceline kv get`."""
    with closing(open_run(run, access)) as kv:
        return kv.get(name)
