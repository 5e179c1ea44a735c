"""WHAT does another task have of a module? A copy, which hears before every call what has changed here since the last.

Used by ingraph/remote_towers and ingraph/place; ingraph/copies is the other side. A copy belongs to the connection over
which it was made and ends with it, so each mirror has a connection of its own and one call at a time.
Must never send a value that lies there already: values are compared by a hash, because a pull may write them unseen.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import xxhash
from torch import nn

from paceline.cluster.devices import Device
from paceline.errors import ConnectionLost, UsageError
from paceline.ingraph import draws, layers, neighbours
from paceline.ingraph.attributes import Attributes, attributes_of, changed, check_structure, structure_of
from paceline.ingraph.op import Op
from paceline.ingraph.remote import Remote
from paceline.ingraph.replicas import tensors_of, trained_of, training_of
from paceline.views import as_bytes

Build = Callable[..., nn.Module]


class News(msgspec.Struct, frozen=True):
    """What a copy must hear, and what is known of it once it has."""

    told: dict[str, Any]
    hashes: list[bytes]
    modes: tuple[list[bool], list[bool]]
    attributes: Attributes


class Mirror:
    """One module's copy on the other side of a connection."""

    def __init__(self, remote: Remote, module: nn.Module, build: Build | None, hardware: str, name: str) -> None:
        self.task = remote.name
        self.name = name  # what errors call the copy: a tower, a part
        self.lock = threading.RLock()  # around news and their call, where several threads could be at it
        self._remote = remote
        self._end = weakref.finalize(self, remote.close)  # nobody closes a module
        self._how = {**how(module, build), "device": hardware, "tensors": signature(module)}
        self._structure, self._attributes = structure_of(module), attributes_of(module)  # when the copy is made
        self._heard: News | None = None
        self._given_away = 0  # so many values, the first ones, are the copy's own

    def give_away(self, module: nn.Module) -> None:
        """From now on the copy's parameters are the only ones; those here are never sent again."""
        self._given_away = len(list(module.parameters()))

    def news(self, module: nn.Module) -> News:
        """What the copy must hear now. Nothing in it changes when the module does."""
        check_structure(module, self._structure)
        heard, tensors, kept = self._heard, tensors_of(module), self._given_away
        hashes = [b""] * kept + [digest(tensor) for tensor in tensors[kept:]]
        before = heard.hashes if heard is not None else [b""] * len(hashes)
        other = [number for number in range(kept, len(hashes)) if hashes[number] != before[number]]
        told: dict[str, Any] = {"values": [(number, tensors[number].clone()) for number in other]}
        modes = training_of(module), trained_of(module)
        attributes, known = attributes_of(module), self._attributes
        if heard is None and not kept:
            told["how"] = self._how
        else:
            known = heard.attributes if heard is not None else {}  # {}: after an error nobody knows
        if new := changed(attributes, known):
            told["attributes"] = new
        if heard is None or modes != heard.modes:
            told["training"], told["trained"] = modes
        return News(told, hashes, modes, attributes)

    def call(self, what: Op[..., Any], news: News, *args: Any) -> Any:
        """Run one of ingraph/copies after the news; if that fails, the next call tells everything anew."""
        self._heard = None
        told = self._ask(what, (news.told, *args), on_held="how" not in news.told)
        self._heard = news
        return told

    def ask(self, what: Op[..., Any], *args: Any) -> Any:
        """Run one of ingraph/copies that needs no news, only what is there."""
        return self._ask(what, args, on_held=True)

    def _ask(self, what: Op[..., Any], args: Sequence[Any], on_held: bool) -> Any:
        try:
            with draws.aside():
                return self._remote.call(what.name, args, what=self.name, on_held=on_held)
        except BaseException as error:
            self._heard = None
            if isinstance(error, ConnectionLost) and self.task not in str(error):
                raise ConnectionLost(f"{self.task}: {error}") from error
            raise

    @property
    def is_known(self) -> bool:
        """Whether the copy is there, as far as is known."""
        return self._heard is not None

    def may_draw(self, module: nn.Module) -> bool:
        """Whether the copy's forward pass may draw random numbers now; of what an op has made nobody knows."""
        return layers.may_draw(module) if "layers" in self._how else any(training_of(module))

    def changed_there(self, number: int, value: torch.Tensor) -> None:
        """The copy has changed this value itself, and it was put here, too."""
        if self._heard is not None:
            self._heard.hashes[number] = digest(value)

    def close(self) -> None:
        self._end()


def remote_for(device: Device) -> Remote | None:
    """The way to a device's task, over a connection of its own; None when that is this very process."""
    if device.job is None and device.task is None:
        return None
    here = neighbours.current()
    task = here.task_of(device)
    if task == here.task:
        return None
    return neighbours.remote_to(here.assignment, task.device, here.cluster.address(task))


def how(module: nn.Module, build: Build | None) -> dict[str, Any]:
    """How the other side makes such a module: from its layers, or by an op that both sides have."""
    if build is None:
        return {"layers": msgspec.to_builtins(layers.describe(module))}
    made_by, args, kwargs = build, (), {}
    if isinstance(build, functools.partial):
        made_by, args, kwargs = build.func, build.args, build.keywords
    return {"op": op_name(made_by, "build"), "args": list(args), "kwargs": dict(kwargs)}


def op_name(function: Any, argument: str) -> str:
    """The name under which the other side finds a function, or why it cannot."""
    if not isinstance(function, Op):
        raise UsageError(
            f"{argument}={getattr(function, '__qualname__', repr(function))} is to run on another task, and no code "
            "travels: make it a @paceline.op in a module that both sides import."
        )
    return function.name


def signature(module: nn.Module) -> list[tuple[str, list[int]]]:
    """Name and shape of every tensor, in the order in which they are sent."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return [(name, list(tensor.shape)) for name, tensor in named]


def digest(tensor: torch.Tensor) -> bytes:
    """A hash of a value and of how it lies in memory."""
    plain = tensor.detach().cpu().contiguous()
    data = as_bytes(plain) if plain.numel() else b""
    return xxhash.xxh3_128_digest(data) + repr((tensor.stride(), tensor.dtype)).encode()
