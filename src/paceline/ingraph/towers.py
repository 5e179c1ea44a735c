"""HOW do several devices train one model? Each has a copy of it and takes a batch; their gradients meet at one place.

Called by the user's script as `paceline.towers`. One process decides everything: it holds the variables and the
optimizer, hands out values and batches, takes gradients back. The way of a step, as document 002 tells it:

1. every tower gets the newest values and a batch of its own,
2. computes its loss and its gradient, towers on different devices at the same time,
3. the gradients are averaged where the variables are, in the order of the devices, and the optimizer steps.

With mode "async" nobody waits: each gradient is an update as soon as it is there (`train`). Only the thread that trains
touches the model and the optimizer; towers have copies.
"""

import functools
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import msgspec
import torch
from torch import nn

from paceline import forks
from paceline.cluster.devices import Device
from paceline.cluster.pinning import mark
from paceline.cluster.spelling import hint, with_article
from paceline.errors import PacelineError, UsageError
from paceline.frameworks.torch.constraints import refuse_unkept
from paceline.frameworks.torch.devices import torch_device
from paceline.ingraph.averages import Averages
from paceline.ingraph.remote_towers import gpus_of, tower_on
from paceline.ingraph.replicas import Batch, Computed, Loss, Tower, check_batch, heed_threads, mean, split
from paceline.worker.script import check_owner

SYNC, ASYNC = "sync", "async"
Asked = tuple[Tower, Loss, Batch]
Done = tuple[int, int, Future[Computed]]  # which tower, from how many updates, and how it ended


class Update(msgspec.Struct, frozen=True):
    """One update that `train` has made."""

    step: int  # updates so far, this one too
    towers: tuple[int, ...]  # whose gradients are in it
    loss: Any  # a tensor: the mean over those towers
    staleness: int  # updates that were made while this gradient was computed; 0 in sync


def towers(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    devices: Sequence[str],
    *,
    variables: str = "/cpu:0",
    mode: str = SYNC,
    ema: float | None = None,
    build: Callable[..., nn.Module] | None = None,
) -> "Towers":
    """One copy of the model on each device; a device named twice has two towers, which take turns.

    `variables` is where the model itself and the optimizer are. `build` is for towers on other tasks, where code does
    not travel: a paceline.op (or a functools.partial of one) that makes such a model there; not needed for models of
    torch.nn's plain layers.

    >>> from torch.nn.functional import mse_loss
    >>> model = nn.Linear(3, 1)
    >>> both = towers(model, torch.optim.SGD(model.parameters(), lr=0.1), ["/cpu:0", "/cpu:0"])
    >>> batch = torch.ones(4, 3), torch.ones(4, 1)
    >>> both.step(lambda model, x, y: mse_loss(model(x), y), both.split(batch)).shape
    torch.Size([])
    """
    return Towers(model, optimizer, devices, TowerOptions(variables=variables, mode=mode, ema=ema), build)


class TowerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How towers work together."""

    variables: str = "/cpu:0"
    mode: str = SYNC
    ema: float | None = None


class Towers:
    """Several copies of one model and what they have in common. Usable as a context manager."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        devices: Sequence[str],
        options: TowerOptions,
        build: Callable[..., nn.Module] | None,
    ) -> None:
        parsed = _checked(devices, options)
        _check_optimizer(model, optimizer)
        refuse_unkept(optimizer, "towers()")
        self.model = model
        self.optimizer = optimizer
        self.mode = options.mode
        self.devices = [_shown(each) for each in parsed]
        self.step_count = 0
        self._owner = forks.Owner()
        self._variables = torch_device(Device.parse(options.variables))
        _move(model, optimizer, self._variables)
        self._towers = [tower_on(model, device, build, number) for number, device in enumerate(parsed)]
        self._averages = Averages(model, options.ema) if options.ema is not None else None
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_update),
            optimizer.register_step_post_hook(self._after_update),
        ]
        places = {tower.place for tower in self._towers}
        self._pools: dict[str, ThreadPoolExecutor] = {}
        if len(places) > 1 or options.mode == ASYNC:
            self._pools = {place: ThreadPoolExecutor(1, f"tower {place}", heed_threads) for place in places}

    def __len__(self) -> int:
        return len(self._towers)

    def __str__(self) -> str:
        return f"{len(self)} towers, {self.mode}: {', '.join(self.devices)}; variables on {self._variables}"

    # --- sync: the user's own loop ----------------------------------------------------------------------------

    def split(self, batch: Any) -> list[Any]:
        """Cut one batch into one for each tower; where it does not divide, the first ones get a sample more."""
        return split(batch, len(self))

    def backward(self, loss: Loss, batches: Sequence[Batch]) -> torch.Tensor:
        """What `loss(model, *batch).backward()` does, on all towers: `p.grad` gets the mean of their gradients.

        The mean of the losses comes back. Clip, look at gradients, then call `optimizer.step()` as ever.
        """
        if self.mode == ASYNC:
            raise UsageError('With mode="async" no two gradients meet: loop over towers.train(loss, batches).')
        if isinstance(batches, torch.Tensor) or not isinstance(batches, Sequence) or len(batches) != len(self):
            given = f"{len(batches)}" if isinstance(batches, Sequence) else with_article(type(batches).__name__)
            raise UsageError(
                f"{len(self)} towers take a list of {len(self)} batches, one for each, not {given}; "
                "towers.split(batch) cuts one batch for all."
            )
        return self._round(loss, batches)

    def step(self, loss: Loss, batches: Sequence[Batch]) -> torch.Tensor:
        """zero_grad, backward and the optimizer's step; the mean of the losses comes back."""
        self.optimizer.zero_grad()
        told = self.backward(loss, batches)
        self.optimizer.step()
        return told

    def _round(self, loss: Loss, batches: Sequence[Batch]) -> torch.Tensor:
        """The steps 1 to 3 of above, for as many towers as there are batches."""
        chosen = self._towers[: len(batches)]
        for tower, batch in zip(chosen, batches, strict=True):
            check_batch(batch)
            tower.load(self.model)  # 1
        parts = self._compute([(tower, loss, batch) for tower, batch in zip(chosen, batches, strict=True)])  # 2
        with torch.no_grad():
            for parameter, *gradients in zip(self.model.parameters(), *(p.gradients for p in parts), strict=True):
                averaged = mean(gradients, self._variables)  # 3
                _add_gradient(parameter, averaged)
            _keep_buffers(self.model, parts[0])
            told = mean([part.loss for part in parts], self._variables)
        assert told is not None
        return told

    def _compute(self, asked: Sequence[Asked]) -> list[Computed]:
        check_owner(self._owner, "towers used")
        if not self._pools:
            return [tower.compute(loss, batch) for tower, loss, batch in asked]
        futures = [self._pools[tower.place].submit(tower.compute, loss, batch) for tower, loss, batch in asked]
        errors = [future.exception() for future in futures]  # waits for all: nobody computes on when this raises
        for number, error in enumerate(errors):
            if error is not None:
                error.add_note(f"in tower {number} on {self.devices[number]}")
                raise error
        return [future.result() for future in futures]

    # --- both modes: batches as they come ---------------------------------------------------------------------

    def train(self, loss: Loss, batches: Iterable[Batch]) -> Iterator[Update]:
        """Train on all batches; after every update it is told.

        sync: a batch for each tower, one update of their mean; the last round may have fewer. async: a batch for
        whichever tower is free, and each gradient is an update.

        >>> model = nn.Linear(3, 1)
        >>> both = towers(model, torch.optim.SGD(model.parameters(), lr=0.1), ["/cpu:0", "/cpu:0"], mode="async")
        >>> batches = [(torch.ones(4, 3),)] * 5
        >>> [(each.step, each.towers) for each in both.train(lambda model, x: model(x).mean(), batches)]
        [(1, (0,)), (2, (1,)), (3, (0,)), (4, (1,)), (5, (0,))]
        """
        return self._train_async(loss, batches) if self.mode == ASYNC else self._train_sync(loss, batches)

    def _train_sync(self, loss: Loss, batches: Iterable[Batch]) -> Iterator[Update]:
        source = iter(batches)
        while together := list(islice(source, len(self))):
            self.optimizer.zero_grad()
            told = self._round(loss, together)
            self.optimizer.step()
            yield Update(self.step_count, tuple(range(len(together))), told, 0)

    def _train_async(self, loss: Loss, batches: Iterable[Batch]) -> Iterator[Update]:
        check_owner(self._owner, "towers used")
        source = iter(batches)
        done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        running = 0
        try:
            for number in range(len(self)):
                running += self._send(number, loss, source, done)
            while running:
                number, base, future = done.get()
                running -= 1
                part = self._result(number, future)
                staleness = self.step_count - base
                self._apply(number, part)
                step = self.step_count
                running += self._send(number, loss, source, done)
                yield Update(step, (number,), part.loss, staleness)
        finally:
            for _ in range(running):  # the loop was left, or a tower failed: let the others finish
                done.get()

    def _send(self, number: int, loss: Loss, source: Iterator[Batch], done: "queue.SimpleQueue[Done]") -> bool:
        """Hand the next batch to a tower that is free; False when there is none."""
        for batch in source:
            check_batch(batch)
            tower = self._towers[number]
            tower.load(self.model)
            future = self._pools[tower.place].submit(tower.compute, loss, batch)
            future.add_done_callback(functools.partial(_put, done, number, self.step_count))
            return True
        return False

    def _result(self, number: int, future: "Future[Computed]") -> Computed:
        error = future.exception()
        if error is not None:
            error.add_note(f"in tower {number} on {self.devices[number]}")
            raise error
        return future.result()

    def _apply(self, number: int, part: Computed) -> None:
        self.optimizer.zero_grad()
        with torch.no_grad():
            for parameter, gradient in zip(self.model.parameters(), part.gradients, strict=True):
                _add_gradient(parameter, mean([gradient], self._variables))
            if number == 0:
                _keep_buffers(self.model, part)
        self.optimizer.step()

    # --- averages over time -----------------------------------------------------------------------------------

    def ema(self) -> AbstractContextManager[None]:
        """Inside, the model holds its averaged parameters: `with towers.ema(): evaluate(model)`."""
        return self._kept_averages().held(self.model)

    @property
    def averages(self) -> dict[str, torch.Tensor]:
        """The averaged parameters by name, to be saved."""
        return {name: value.clone() for name, value in self._kept_averages().shadows.items()}

    def _kept_averages(self) -> Averages:
        if self._averages is None:
            raise UsageError("These towers keep no averages; make them with ema=0.999, say.")
        return self._averages

    def _before_update(self, *_: Any) -> None:
        if self._averages is not None and self._averages.is_held:
            raise PacelineError("a step inside towers.ema(): the model holds averaged parameters there; step outside")

    def _after_update(self, *_: Any) -> None:
        self.step_count += 1
        if self._averages is not None:
            self._averages.update(self.model)

    # --- the end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of copies and threads; the model and the optimizer stay as they are. A forked child has neither."""
        if not self._owner.is_here:
            return
        for pool in self._pools.values():
            pool.shutdown()
        for tower in self._towers:
            tower.close()
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> "Towers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _put(done: "queue.SimpleQueue[Done]", number: int, base: int, told: "Future[Computed]") -> None:
    done.put((number, base, told))


def _checked(devices: Sequence[str], options: TowerOptions) -> list[Device]:
    if isinstance(devices, str) or not devices:
        raise UsageError('towers needs a list of devices, such as ["/gpu:0", "/gpu:1"].')
    if options.mode not in (SYNC, ASYNC):
        raise UsageError(f"Towers have no mode {options.mode!r}; {hint(options.mode, [SYNC, ASYNC])}.")
    where = Device.parse(options.variables)
    if where.job is not None or where.task is not None:
        raise UsageError(
            f"variables={options.variables!r} names a task: the variables are with this process (/cpu:0, /gpu:0), or "
            "on the ps if the optimizer was prepared: ctx.prepare(model, optimizer)."
        )
    return [Device.parse(each) for each in devices]


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Towers give gradients to the model's parameters, once a step, and to nothing else."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("LBFGS computes the loss several times in a step, and towers once; use another optimizer.")
    own = set(model.parameters())
    strange = sum(each not in own for group in optimizer.param_groups for each in group["params"])
    if strange:
        raise UsageError(
            f"The optimizer has {strange} parameter(s) that the model does not have, which towers would never train; "
            "make it of model.parameters()."
        )


def _shown(device: Device) -> str:
    """A tower's device as it was named; marked if it shares its card with another name, or is not there."""
    return f"{device}{mark(device, gpus_of(device))}" if device.kind == "GPU" else str(device)


def _move(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """The model, and what the optimizer remembers, to where the variables shall be."""
    if all(each.device == device for each in [*model.parameters(), *model.buffers()]):
        return
    model.to(device)
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())


def _add_gradient(parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
    """As autograd does: the first one is it, further ones are added."""
    if gradient is None:
        return
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


def _keep_buffers(model: nn.Module, first: Computed) -> None:
    """Running statistics, say: the first tower's count."""
    for mine, its in zip(model.buffers(), first.buffers, strict=True):
        mine.copy_(its)
