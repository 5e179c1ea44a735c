"""WHAT does a task do with a copy of somebody's module? Compute a tower's gradient, or run forward and backward of it.

These are ops, called by ingraph/mirror through ingraph/remote_towers and ingraph/place; every paceline.Server has
them. A connection is served by one thread, so the copies lie in that thread and end with it.
Must never build anything but torch.nn's plain layers and what a registered op makes.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from paceline.cluster.devices import Device
from paceline.cluster.spelling import with_article
from paceline.errors import ConnectionLost, ProtocolError, UsageError
from paceline.frameworks.torch.devices import torch_device
from paceline.ingraph import attributes, layers
from paceline.ingraph.draws import turn_of
from paceline.ingraph.mirror import signature
from paceline.ingraph.op import find, op
from paceline.ingraph.precision import Precision
from paceline.ingraph.replicas import computed, follow, moved, training_of

News = dict[str, Any]


class Copy:
    """A module as somebody else has it, on a device of this task."""

    def __init__(self, how: dict[str, Any]) -> None:
        with turn_of(_CPU).taken():
            self.module = _made(how)
        self.device = torch_device(Device.parse(how["device"]))
        self.module.to(self.device)
        wanted, found = [(n, list(s)) for n, s in how["tensors"]], signature(self.module)
        if wanted != found:
            raise UsageError(f"The module that was made here is another one: {_difference(wanted, found)}.")
        self.passes: dict[int, Pass] = {}
        self.optimizer: torch.optim.Optimizer | None = None  # where the parameters are this copy's own

    def hear(self, news: News) -> None:
        """Be as the other side's module is now."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        with torch.no_grad():
            for number, value in news["values"]:
                mine = tensors[number]
                if (mine.dtype, mine.stride()) != (value.dtype, value.stride()):
                    mine.data = torch.empty_like(value, device=self.device)  # as module.to() does
                mine.copy_(value)  # autograd sees it, and refuses a backward that needs what was there before
        attributes.put(self.module, news.get("attributes", {}))
        if "training" in news:
            follow(self.module, news["training"], news["trained"])


class Pass(msgspec.Struct, frozen=True):
    """A forward pass whose backward may still come. What has a gradient is what had one then: by now the parameters may
    be frozen, or trained, by others."""

    outputs: list[Any]
    inputs: list[GradientEdge]
    parameters: dict[int, GradientEdge]  # by their numbers


class _Here(threading.local):
    def __init__(self) -> None:
        self.copy: Copy | None = None


_here = _Here()
_CPU = torch.device("cpu")


def current(news: News) -> Copy:
    """This connection's copy, after the news."""
    if "how" in news:
        _here.copy = Copy(news["how"])
    held().hear(news)
    return held()


def held() -> Copy:
    """This connection's copy."""
    if _here.copy is None:
        raise ConnectionLost("the copy that this call is for is not here any more; was this task started again?")
    return _here.copy


# --- towers -------------------------------------------------------------------------------------------------------


@op
def tower(
    news: News, loss: str, batch: Any, seed: int, wants_buffers: bool, precision: Any
) -> tuple[Any, list[Any], list[Any]]:
    """The loss of a batch, its gradient, and the buffers as it leaves them if they are wanted."""
    copy = current(news)
    with seeded(seed, copy.device):
        done = computed(copy.module, find(loss).fn, moved(batch, copy.device), copy.device, _precision(precision))
    return done.loss, done.gradients, done.buffers if wants_buffers else []


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """What is drawn inside on this device depends on the seed and nothing else, and nothing else depends on it."""
    with turn_of(device).taken() as generator:
        generator.manual_seed(seed)
        yield


# --- parts of a model ---------------------------------------------------------------------------------------------


@op
def forward(
    news: News,
    number: int | None,
    over: Sequence[int],
    given: tuple[Any, Any],
    wanted: Sequence[bool],
    state: Any,
    precision: Any,
) -> tuple[Any, list[bool], list[Any], Any]:
    """Run the module. `number`: of this pass, None if no backward will come; `over`: passes that are done with;
    `wanted`: for which input tensors a gradient will be; `state`: of the caller's generator, if the module may draw;
    `precision`: of the caller's autocast.

    The result, which of its tensors have gradients, the buffers, and the generator's state where it has changed.
    """
    copy = current(news)
    for each in over:
        copy.passes.pop(each, None)
    leaves, shape = pytree.tree_flatten(moved(given, copy.device))
    at = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    inputs = []
    for place, is_wanted in zip(at, wanted, strict=True):
        if is_wanted:
            inputs.append(get_gradient_edge(leaves[place].requires_grad_(True)))
            leaves[place] = leaves[place].clone()  # the first layer may work in place
    args, kwargs = pytree.tree_unflatten(leaves, shape)
    is_traced, cast = number is not None, _precision(precision).on(copy.device)
    with _drawing(state, copy.device) as drawn, torch.set_grad_enabled(is_traced), cast:
        result = copy.module(*args, **kwargs)
    outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if number is not None:
        trained = [(at, each) for at, each in enumerate(copy.module.parameters()) if each.requires_grad]
        copy.passes[number] = Pass(outputs, inputs, {at: get_gradient_edge(each) for at, each in trained})
    buffers = list(copy.module.buffers()) if any(training_of(copy.module)) else []
    return result, [each.requires_grad for each in outputs], buffers, drawn[0]


@op
def backward(number: int, gradients: list[Any], is_kept: bool) -> tuple[list[Any], list[Any]]:
    """The gradients of the inputs and of the parameters, for those of the outputs. `is_kept`: it may come again."""
    inputs, parameters = differentiated(held(), number, gradients, is_kept)
    return inputs, list(parameters.values())


@op
def changed_backward(news: News, number: int, gradients: list[Any], is_kept: bool) -> tuple[list[Any], list[Any]]:
    """As backward, after parameters have changed; torch says whether they were needed as they had been."""
    current(news)
    return backward.fn(number, gradients, is_kept)


def differentiated(copy: Copy, number: int, gradients: list[Any], is_kept: bool) -> tuple[list[Any], dict[int, Any]]:
    """The gradients of a pass's inputs, and of its parameters by their numbers."""
    if number not in copy.passes:
        raise ConnectionLost("the forward pass of this backward is not here any more")
    done = copy.passes[number] if is_kept else copy.passes.pop(number)
    given = [(o, g) for o, g in zip(done.outputs, gradients, strict=True) if o.requires_grad and g is not None]
    wanted = [*done.inputs, *done.parameters.values()]
    told: Sequence[Any] = [None] * len(wanted)
    if given and wanted:
        outputs, its = [o for o, _ in given], [g.to(copy.device) for _, g in given]
        told = torch.autograd.grad(outputs, wanted, its, retain_graph=is_kept, allow_unused=True)
    count = len(done.inputs)
    return list(told[:count]), dict(zip(done.parameters, told[count:], strict=True))


@contextmanager
def _drawing(state: Any, device: torch.device) -> Iterator[list[Any]]:
    """Draw as the caller would have, if it has sent its generator's state; the list has the state afterwards. A card
    has a generator of its own, which goes on."""
    drawn: list[Any] = [None]
    if state is None:
        yield drawn
        return
    if device.type != "cpu":
        with turn_of(device).taken(is_undone=False):
            yield drawn
        return
    with turn_of(device).taken() as generator:
        generator.set_state(state)
        yield drawn
        after = generator.get_state()
        drawn[0] = None if torch.equal(after, state) else after


def _precision(told: Any) -> Precision:
    try:
        return msgspec.convert(told, Precision)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"a precision that does not parse: {error}") from error


def _made(how: dict[str, Any]) -> nn.Module:
    if "layers" in how:
        return layers.build(msgspec.convert(how["layers"], list[layers.Layer]))
    made = find(how["op"]).fn(*how["args"], **how["kwargs"])
    if not isinstance(made, nn.Module):
        raise UsageError(f"{how['op']} returned {with_article(type(made).__name__)} where a module was wanted.")
    return made


def _difference(wanted: list[tuple[str, list[int]]], found: list[tuple[str, list[int]]]) -> str:
    for mine, its in zip(found, wanted, strict=False):
        if mine != its:
            return f"it has {mine[0]} of shape {tuple(mine[1])} where {its[0]} of shape {tuple(its[1])} was wanted"
    if not wanted and not found:
        raise ProtocolError("two modules that differ in nothing")
    return f"it has {len(found)} tensors where {len(wanted)} were wanted"
