"""HOW does a part of a model run elsewhere? Its forward crosses to another task, and so does its backward.

Called by the user's script as `paceline.place`: model parallelism in its plain form. The module stays the same object
with the same parameters and the same keys; only what `module(x)` does is done there. The way of a step:

1. forward: what has changed of the part's values goes there with the inputs, the outputs come back,
2. backward: the outputs' gradients go there, those of the inputs and of the part's parameters come back,
3. the optimizer, here or on the ps, changes the values as ever; the next forward carries them. With an optimizer of
   the part's own values and gradients stay there, and only its step crosses.

Must never keep a pass there that nobody can ask for any more: the end of the graph here is told with the next forward.
"""

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import msgspec
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from paceline.cluster.devices import Device
from paceline.cluster.spelling import with_article
from paceline.errors import UsageError
from paceline.frameworks.torch.devices import torch_device
from paceline.ingraph import copies
from paceline.ingraph.mirror import Build, Mirror, remote_for
from paceline.ingraph.precision import Precision
from paceline.ingraph.replicas import moved
from paceline.ingraph.resident import Resident


def place(
    module: nn.Module, device: str, optimizer: torch.optim.Optimizer | None = None, *, build: Build | None = None
) -> nn.Module:
    """Let a part of a model run on a device of this or of another task; the same module comes back.

    What it returns comes back to the device of its first input. Its parameters stay here, or on the ps if the optimizer
    was prepared, and travel when they have changed. With an `optimizer` of their own they live with the part instead.
    `build` is for modules that are not made of torch.nn's plain layers: a paceline.op (or a functools.partial of one)
    that makes such a module on the other side.

    >>> model = nn.Sequential(nn.Linear(3, 4), place(nn.Linear(4, 2), "/cpu:0"))
    >>> model(torch.ones(5, 3)).shape
    torch.Size([5, 2])
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"place() takes a module and a device, not {with_article(type(module).__name__)}.")
    if "forward" in vars(module):
        raise UsageError(f"This {type(module).__name__} was placed before, or its forward was replaced; place it once.")
    asked = Device.parse(device)
    remote = remote_for(asked)
    if remote is None:
        where = torch_device(asked.hardware)
        module.to(where)
        if optimizer is not None and optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())  # what it remembers goes along
        module.forward = Nearby(module, where)
        return module
    mirror = Mirror(remote, module, build, str(asked.hardware), f"the placed {type(module).__name__}")
    resident = Resident(module, mirror, optimizer) if optimizer is not None else None
    module.forward = Across(module, mirror, resident)
    return module


class Nearby:
    """The forward of a part on another device of this task."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self.where = str(device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        home = _home([*pytree.tree_leaves((args, kwargs))])
        args, kwargs = moved((args, kwargs), self._device)
        return moved(type(self._module).forward(self._module, *args, **kwargs), home)


class Across:
    """The forward of a part on another task."""

    def __init__(self, module: nn.Module, mirror: Mirror, resident: Resident | None) -> None:
        self._module = module
        self._mirror = mirror
        self.where = mirror.task
        self._resident = resident
        self._passes = 0
        self._over: deque[int] = deque()  # passes that are done with, and the other side does not know yet

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UsageError(
            f"A module on {self._mirror.task} cannot be copied: place the copy of a module, not a copy of a placed one."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, shape = pytree.tree_flatten((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        tensors = [*inputs, *self._module.parameters()]
        has_backward = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        asked = _Asked(self, leaves, shape, len(inputs), has_backward)
        outputs = _Crossing.apply(asked, *tensors)  # type: ignore[no-untyped-call]
        return asked.result(outputs)

    def forward(
        self, asked: "_Asked", wanted: Sequence[bool], inputs: Sequence[torch.Tensor]
    ) -> tuple[int | None, Any]:
        """1. The number of the pass and what the other side told."""
        state = torch.get_rng_state() if self._mirror.may_draw(self._module) else None
        over = [self._over.popleft() for _ in range(len(self._over))]
        with self._mirror.lock:
            number = None
            if asked.has_backward:
                self._passes += 1
                number = self._passes
            news = self._mirror.news(self._module)
            given, precision = asked.given(inputs), msgspec.to_builtins(Precision.now())
            told = self._mirror.call(copies.forward, news, number, over, given, list(wanted), state, precision)
            _, _, buffers, drawn = told
            self._take_buffers(buffers)
        if drawn is not None:
            torch.set_rng_state(drawn)
        return number, told

    def versions(self) -> list[int]:
        """How often each parameter was changed in place, as autograd counts."""
        return [parameter._version for parameter in self._module.parameters()]

    def backward(
        self, number: int, gradients: Sequence[torch.Tensor | None], versions: list[int]
    ) -> tuple[list[Any], Iterable[Any]]:
        """2. The gradients of the inputs, and of the parameters that were trained when the pass was made.

        Parameters that have changed since are sent first: autograd refuses there what it would have refused here.
        """
        with self._mirror.lock:
            if self._resident is not None:
                return self._resident.backward(number, gradients, _is_kept())
            asked = number, list(gradients), _is_kept()
            told: tuple[list[Any], list[Any]]
            if self._mirror.is_known and versions != self.versions():
                told = self._mirror.call(copies.changed_backward, self._mirror.news(self._module), *asked)
            else:
                told = self._mirror.ask(copies.backward, *asked)
        return told

    def done_with(self, number: int) -> None:
        self._over.append(number)

    def _take_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Running statistics, say, which the forward pass has changed."""
        first = sum(1 for _ in self._module.parameters())
        with torch.no_grad():
            for number, (mine, its) in enumerate(zip(self._module.buffers(), buffers, strict=False)):
                mine.copy_(its)
                self._mirror.changed_there(first + number, mine)


class _Asked:
    """One call: what goes in as it was given, and how what comes out is put together again."""

    def __init__(self, across: Across, leaves: list[Any], shape: Any, count: int, has_backward: bool) -> None:
        self.across = across
        self.num_inputs = count
        self.has_backward = has_backward
        self._leaves = leaves
        self._shape = shape
        self._told: Any = None

    def given(self, inputs: Sequence[torch.Tensor]) -> Any:
        """The arguments with these tensors."""
        left = iter(inputs)
        return pytree.tree_unflatten(
            [next(left) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves], self._shape
        )

    def taken(self, told: Any) -> list[torch.Tensor]:
        """The tensors of a result, at home."""
        leaves, shape = pytree.tree_flatten(moved(told, _home(self._leaves)))
        self._told = leaves, shape
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def result(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The result with the tensors that autograd knows."""
        leaves, shape = self._told
        left = iter(tensors)
        return pytree.tree_unflatten([next(left) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], shape)


class _Token:
    """Lives as long as autograd may ask for the backward of a pass."""


class _Crossing(torch.autograd.Function):
    """Forward and backward of a part, as autograd sees them. The part's parameters are inputs like any other, so that
    their gradients are added up where those of all parameters are."""

    @staticmethod
    def forward(ctx: Any, asked: _Asked, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = asked.num_inputs
        wanted = ctx.needs_input_grad[1 : 1 + count] if asked.has_backward else [False] * count
        number, (result, differentiable, _, _) = asked.across.forward(asked, wanted, tensors[:count])
        outputs = asked.taken(result)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[o for o, is_it in zip(outputs, differentiable, strict=True) if not is_it])
        if number is not None:
            ctx.across, ctx.number, ctx.versions = asked.across, number, asked.across.versions()
            ctx.save_for_backward(*tensors[:count])  # so that torch sees what changes until then
            ctx.devices = [each.device for each in tensors]
            ctx.token = _Token()
            weakref.finalize(ctx.token, asked.across.done_with, number).atexit = False
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors  # refused by torch if one has changed, or if this is a second time
        of_inputs, of_parameters = ctx.across.backward(ctx.number, gradients, ctx.versions)
        told = chain(of_inputs, of_parameters)
        given = [next(told) if is_needed else None for is_needed in ctx.needs_input_grad[1:]]
        return (None, *(g if g is None else g.to(d) for g, d in zip(given, ctx.devices, strict=True)))


def _is_kept() -> bool:
    """Whether backward runs with retain_graph, so that it may come again."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


def _home(leaves: Sequence[Any]) -> torch.device:
    """Where the first of these tensors is."""
    return next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu"))
