"""Check where a PyTorch model's parameters lie, and what their gradients are, before each push.

Used by frameworks/torch/training_step. The parameters are views of the arena. A script may give one other memory
(`flatten_parameters()`, `.to(memory_format=...)`, `.data = ...`): with the same dtype and shape it is laid back on the
arena, with its values; else it is refused. So is a gradient that is not of its parameter's dtype and shape.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import nn

from paceline.cluster.spelling import listed
from paceline.errors import UsageError
from paceline.worker.script import script_line


class Places:
    """The trained parameters, with the view of the arena on which each one must lie."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        make_view: Callable[[int], torch.Tensor],
    ) -> None:
        """Lay the parameters on the arena, with their values; `make_view` returns the view for one of them."""
        self._names = names
        self._parameters = parameters
        self._make_view = make_view
        self._views = [make_view(index) for index in range(len(parameters))]
        self._addresses = [view.data_ptr() for view in self._views]
        self._placed = [index for index, view in enumerate(self._views) if view.numel()]
        with torch.no_grad():
            for index in self._placed:
                self._views[index].copy_(parameters[index])
                parameters[index].data = self._views[index]
        self._model = model
        self._optimizer = optimizer
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._tree = _tree_of(model)
        self._names_now = {id(p): name for name, p in model.named_parameters()}
        self._said: set[str] = set()

    def gradients(self) -> list[torch.Tensor | None]:
        """Return each parameter's gradient, None where it has none. Refuse gradients that a ps cannot apply, and groups
        of the optimizer that hold other parameters than at prepare()."""
        groups = self._optimizer.param_groups
        is_same = len(groups) == len(self._groups)
        for group, members in zip(groups, self._groups, strict=False):
            is_same = (
                is_same and len(group["params"]) == len(members) and all(map(operator.is_, group["params"], members))
            )
        if not is_same:
            raise UsageError(
                "optimizer.param_groups holds other parameters than at prepare(), and the ps goes on with those of "
                "then: give the optimizer its groups before prepare(); to leave a parameter out for a while, call "
                f"requires_grad_(False) on it and set its .grad to None; seen at optimizer.step(){script_line()}"
            )
        gradients: list[torch.Tensor | None] = []
        for parameter, view in zip(self._parameters, self._views, strict=True):
            gradient = parameter.grad
            if gradient is not None and not (
                gradient.dtype is view.dtype and gradient.layout is torch.strided and gradient.is_same_size(view)
            ):
                self._refuse_gradient(self._names[len(gradients)], gradient, view)
            gradients.append(gradient)
        return gradients

    def _refuse_gradient(self, name: str, gradient: torch.Tensor, view: torch.Tensor) -> NoReturn:
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"the gradient of {name} is sparse, which a ps does not take: make its layer with sparse=False, or "
                f"use --mode local, where the optimizer runs on the worker; seen at optimizer.step(){script_line()}"
            )
        raise UsageError(
            f"the gradient of {name} is {_kind(gradient)}, and the ps trains {_kind(view)}: cast modules "
            f"before prepare(), and leave grad_dtype as it is; seen at optimizer.step(){script_line()}"
        )

    def check(self, say: Callable[[str], None]) -> None:
        """Refuse a parameter that is another one than prepare() saw; lay back one that lies elsewhere."""
        parameters, views, addresses = self._parameters, self._views, self._addresses
        for index in self._placed:
            view = views[index]
            if not parameters[index].is_set_to(view) or view.data_ptr() != addresses[index]:
                self._lay_back(index, say)
        for members, key, part in self._tree:
            if members.get(key) is not part:
                self._look_again(say)
                break

    def lay_back(self, say: Callable[[str], None]) -> None:
        """Lay back what lies elsewhere and is still of its own dtype, shape and device; leave the rest to `check`."""
        for index in self._placed:
            parameter, view = self._parameters[index], self._views[index]
            is_elsewhere = not parameter.is_set_to(view) or view.data_ptr() != self._addresses[index]
            if is_elsewhere and _has_kind(parameter, view):
                self._lay_back(index, say)

    def _look_again(self, say: Callable[[str], None]) -> None:
        """Refuse a model that has lost a trained parameter; say so where one has another name now (a layer that was
        wrapped by torch.compile, say)."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        for name, parameter in zip(self._names, self._parameters, strict=True):
            before, now = self._names_now.get(id(parameter)), names.get(id(parameter))
            if before is not None and now is None:
                raise UsageError(
                    f"{name} is no longer in the model, or another parameter is in its place, which the ps does not "
                    f"train: replace and remove layers before prepare(); seen at optimizer.step(){script_line()}"
                )
            if before != now and name not in self._said:
                self._said.add(name)
                say(f"paceline: {name} is called {now} in the model since prepare(); checkpoints still call it {name}")
        self._tree, self._names_now = _tree_of(self._model), names

    def _lay_back(self, index: int, say: Callable[[str], None]) -> None:
        name, parameter, view = self._names[index], self._parameters[index], self._views[index]
        if not _has_kind(parameter, view):
            raise UsageError(
                f"the parameter {name} is {_kind(parameter)}, and was {_kind(view)} when prepare() saw it: call "
                f"model.to(...), model.half() and the like before prepare(); seen at optimizer.step(){script_line()}"
            )
        if name not in self._said:
            self._said.add(name)
            say(
                f"paceline: {name} was given other memory after prepare() (.to(), .data, share_memory(), sending it to "
                "a process): its values count, and it keeps the memory and the memory format that it had at prepare()"
            )
        values = parameter.detach().clone()  # a copy, because the two may overlap
        if view.data_ptr() != self._addresses[index]:  # torch has moved the storage that parameter and view share
            view = self._views[index] = self._make_view(index)
        with torch.no_grad():
            view.copy_(values)
            parameter.data = view


def check_alone(tensors: Mapping[str, torch.Tensor], trained: Sequence[torch.Tensor]) -> str:
    """Refuse parameters whose memory is another tensor's too: they would train apart once they lie on the arena. Return
    a line for the user about aliases of parameters that cannot be found; empty if there are none."""
    named = sorted(((_span(t), name, t) for name, t in tensors.items() if t.numel()), key=lambda each: each[0])
    is_trained = {id(p) for p in trained}
    end: tuple[int, int] = (-1, -1)
    last: tuple[str, torch.Tensor | None] = ("", None)
    for (device, start, stop), name, tensor in named:
        if (device, start) < end and last[1] is not tensor and {id(tensor), id(last[1])} & is_trained:
            raise UsageError(
                f"{last[0]} and {name} share memory, but are two tensors: a ps would train them apart. Tie them by "
                "giving both modules the same nn.Parameter (b.weight = a.weight), or clone one of them before prepare()"
            )
        if (device, stop) > end:
            end, last = (device, stop), (name, tensor)
    return _held_elsewhere(tensors, is_trained)


def _held_elsewhere(tensors: Mapping[str, torch.Tensor], is_trained: set[int]) -> str:
    """Refuse views of a buffer that something else holds too. Return a line about other parameters whose memory
    something else holds; empty if there are none."""
    count_users = getattr(torch._C, "_storage_Use_Count", None)
    if count_users is None:
        return ""
    tensors = {name: t for name, t in tensors.items() if t.untyped_storage().nbytes()}  # else they share no memory
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors.values() if id(t) in is_trained}
    members: dict[int, list[str]] = {pointer: [] for pointer in storages}
    for name, tensor in tensors.items():
        members.get(tensor.untyped_storage().data_ptr(), []).append(name)
    held: list[str] = []
    for pointer, storage in storages.items():
        names = members[pointer]
        if count_users(storage._cdata) == 1 + len(names):  # `storage` here, and the tensors that are known
            continue
        if len(names) > 1 or storage.nbytes() > tensors[names[0]].nbytes:
            raise UsageError(
                f"{listed(names)}: views of a larger tensor that the script holds too. After prepare() they "
                "would no longer be on its memory: clone them before prepare(), or make such a tensor after it"
            )
        held += names
    if not held:
        return ""
    return (
        f"paceline: other tensors share the memory of {listed(held)} (.data, .detach(), numpy(), "
        "state_dict() made before prepare()). They keep the values of now: make them after prepare()"
    )


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the device and the addresses between which a tensor's elements lie."""
    last = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return tensor.get_device(), start, start + (last + 1) * tensor.element_size()


def _tree_of(model: nn.Module) -> list[tuple[Mapping[str, object], str, object]]:
    """List every submodule and parameter with the dictionary that holds it and its name there."""
    parts: list[tuple[Mapping[str, object], str, object]] = []
    for module in model.modules():
        for members in (module._modules, module._parameters):
            parts += [(members, key, part) for key, part in members.items() if part is not None]
    return parts


def _has_kind(parameter: torch.Tensor, view: torch.Tensor) -> bool:
    return (parameter.dtype, parameter.shape, parameter.device) == (view.dtype, view.shape, view.device)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"
