"""Bind a PyTorch model and its optimizer to the cluster: both stay the user's own, and the ps owns the numbers.

Made by ctx.prepare. worker/step/training_step has what every framework shares; here are torch's tensors: parameters
that are views of the arena, gradients, and what a script may do to both between two steps.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks as post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as pre_hooks

from paceline.cluster.spec import Task
from paceline.cluster.spelling import listed
from paceline.errors import UsageError
from paceline.frameworks.torch.aliases import check_alone
from paceline.frameworks.torch.carried import Carried, take_unsaved, unsaved_block
from paceline.frameworks.torch.devices import mapping_lines
from paceline.frameworks.torch.gradients import Outgoing
from paceline.frameworks.torch.layout import check_options, describe, group_options, optimizer_spec, plain
from paceline.frameworks.torch.loads import LoadHook
from paceline.frameworks.torch.optimizer import Remote, convert
from paceline.frameworks.torch.optimizer_state import OptimizerState, slots_of, states_of
from paceline.frameworks.torch.overlap import Overlap
from paceline.frameworks.torch.samples import GradientSamples
from paceline.frameworks.torch.writes import DeviceWrites, OtherTraining, renormalised
from paceline.params.layout import TensorSpec
from paceline.views import DTYPES, flat, shaped
from paceline.wire.messages import OptimizerSpec, Options
from paceline.worker.script import script_line
from paceline.worker.step.optimizer_state import scatter
from paceline.worker.step.training_step import TrainingStep

FIXED = (float, bool, int, type(None))  # options that cannot be changed in place


def step_of(remote: Remote) -> Callable[..., Any]:
    """Return what `optimizer.step()` does once prepare() has changed the optimizer's class: the step of `remote`, and
    around it what torch does around its own."""

    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        self._opt_called = True  # type: ignore[attr-defined]  # what a scheduler looks at to warn about the order
        # torch's wrapper opens a profiler record every time; only hooks, a closure and a profiler need it.
        has_hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks or pre_hooks or post_hooks
        if has_hooks or closure is not None or torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            return hooked(self, closure)
        remote.step()
        return None

    @torch.optim.Optimizer.profile_hook_step
    def hooked(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        remote.step()
        return loss

    return step


class TorchStep(TrainingStep):
    """One model and its optimizer, bound to the cluster. Everything here runs on the thread that trains."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, takes: Callable[[str], bool], **bound: Any
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._takes = takes  # whether this worker's values count for all
        spec = self.make_spec()
        layout, self.tensors = describe(model, optimizer)
        super().__init__(spec, layout, **bound)
        self.parameters = [self.tensors[t.name] for t in self.layout.trained]
        devices = {p.device for p in self.parameters}
        if len(devices) != 1:
            raise UsageError(f"the trained parameters are on {len(devices)} devices; a worker trains on one")
        self.device = devices.pop()
        self._carried = Carried(model, {t.name: self.tensors[t.name] for t in layout.carried}, lambda s: self._say(s))
        self._others = OtherTraining({t.name: self.tensors[t.name] for t in layout.carried if not t.buffer})
        self.alias_line = check_alone(self.tensors, self.parameters)
        # On an accelerator the parameters lie on one block there, and the arena is its mirror.
        self._in_arena = flat(self.arena.memory, "uint8", 0, self.plan.total_bytes)
        is_on_host = self.device.type == "cpu"
        self._block = self._in_arena if is_on_host else torch.zeros_like(self._in_arena, device=self.device)
        self.has_mirror = not is_on_host
        offsets = self.plan.tensor_offsets()
        starts = [offsets.get(index, 0) for index in range(len(self.parameters))]
        parts = [slice(s, s + spec.size_bytes) for s, spec in zip(starts, self.layout.trained, strict=True)]

        def make_view(index: int) -> torch.Tensor:
            spec = self.layout.trained[index]
            if is_on_host:  # each on a storage of its own, as torch.save and share_memory() see it
                vector = flat(self.arena.memory, spec.dtype, starts[index], spec.numel)
            else:
                vector = self._block[parts[index]].view(DTYPES[spec.dtype])
            return shaped(vector, spec.shape, spec.stride)

        self._places = Places(model, optimizer, [t.name for t in layout.trained], self.parameters, make_view)
        self.fill_arena()
        if is_on_host:
            self.watched = [self.arena.memory[part] for part in parts]
        else:
            self.writes = DeviceWrites(self._block, self._in_arena, parts)
        self.remember()
        self.state = OptimizerState(lambda: states_of(self.slots(), self.layout, self.parameters))
        self._option_names = tuple(optimizer.defaults)
        self._sent_options = self._option_values()

    def make_spec(self) -> OptimizerSpec:
        """Return the optimizer that the ps shall run."""
        return optimizer_spec(self.optimizer)

    # --- memory -----------------------------------------------------------------------------------------------

    def block_of(self, specs: Sequence[TensorSpec], offsets: Sequence[int], size_bytes: int) -> bytes:
        return self._carried.block(specs, offsets, size_bytes)

    def take_carried(self, block: bytearray) -> None:
        self._carried.take(self.layout.carried, self.layout.carried_offsets, block)

    def unsaved_block(self) -> bytes:
        return unsaved_block(self.model)

    def take_unsaved(self, block: bytearray) -> None:
        changed = take_unsaved(self.model, block)
        if changed is None:
            self._say(
                "paceline: the buffers with persistent=False are not those of the chief's model: each keeps its own"
            )
        elif changed:
            self._say(f"paceline: buffers with persistent=False that have the chief's values now: {listed(changed)}")

    def mirror(self) -> None:
        if self.has_mirror:
            self._block.copy_(self._in_arena)

    def fill_arena(self) -> None:
        if self.has_mirror:
            self._in_arena.copy_(self._block)

    # --- connecting -------------------------------------------------------------------------------------------

    def joined(self, on_load: Callable[[], None]) -> None:
        super().joined(on_load)
        if self._me.overlaps:
            assert isinstance(self._outgoing, Outgoing)
            self._overlap = Overlap(self.client, self.layout, self.plan, self._outgoing, self.parameters)
            if not self._overlap.shards:
                self._say("paceline: --overlap gains nothing here and is not used: it is for large models on lane tcp")
        self.remember()
        if self.alias_line:
            self._say(self.alias_line)
        self._loads = LoadHook(on_load)
        if not self.is_alone:
            self.samples = GradientSamples(self.parameters, self._say, self._is_weighted)
            self._loads.install(self.model)

    def find_slots(self) -> None:
        self._outgoing = Outgoing(self.client.links, self.layout, self.plan, self.device, self._me.wire)

    # --- one step ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Push this worker's gradient and take the newest parameters."""
        self.before_step()
        was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # what torch.no_grad() does, at a tenth of its price
        try:
            self._push(self._places.gradients())
        finally:
            torch._C._set_grad_enabled(was_enabled)
        self.steps += 1
        self.after_step()

    def _spoil(self) -> None:
        """Set one element of the gradient to NaN (--chaos nan)."""
        gradient = next((p.grad for p in self.parameters if p.grad is not None and p.grad.numel()), None)
        if gradient is not None:
            with torch.no_grad():
                gradient[(0,) * gradient.dim()] = float("nan")

    def check_parameters(self) -> None:
        self._places.check(self._say)
        if not (self.is_alone or self._is_first):
            self._others.check()
        self.shows_state = self.state.is_fetched

    def assigned(self, is_chief: bool) -> None:
        self._others.remember()
        if is_chief and self.state.is_changed:
            self.send_state(self.state)
        self.state.forget()

    def lay_back(self) -> None:
        self._places.lay_back(self._say)

    def _instead_of_writing(self, indices: Sequence[int]) -> str:
        written = [self.parameters[index] for index in indices]
        return renormalised(self.model, written) or super()._instead_of_writing(indices)

    def finish(self) -> UsageError | None:
        return super().finish() or self._carried.end(self.layout.carried)

    def end_first(self) -> None:
        super().end_first()
        self._others.remember()
        self._loads.end()

    # --- the optimizer ----------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Have the optimizer's steps go to the ps."""
        convert(self.optimizer, self, step_of(self))

    def before_zeroing(self) -> None:
        """Do nothing: gradients that are set to zero in place have been sent and counted."""

    def send_memory(self) -> None:
        """Send what the optimizer remembers from before prepare()."""
        if self.optimizer.state:
            self.send_state(self.optimizer.state)

    def load_state(self) -> None:
        """Send the state that the chief has loaded into the optimizer."""
        try:
            if self._takes("optimizer.load_state_dict()"):
                self.send_state(self.state)
        finally:
            self.state.forget()

    def send_state(self, states: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Replace the optimizer's state on the ps."""
        slots = slots_of(states, self.layout, self.parameters)
        self.settle()
        scatter(self.client.links, self.plan, slots)

    def _keep_found(self) -> None:
        super()._keep_found()
        if self.state.is_fetched:
            if self.state.is_changed and self._sends_state("optimizer.state was", "it", "remembers"):
                self.send_state(self.state)
            self.state.forget()

    # --- what a push says beside its numbers ------------------------------------------------------------------

    def _is_weighted(self) -> bool:
        """Tell whether the number of samples in a push plays a part, and the script does not say it."""
        return self.own_weight is None and bool(self.client.dial.spec.has_rounds)

    def _option_values(self) -> list[Any]:
        values: list[Any] = []
        for group in self.optimizer.param_groups:
            for name in self._option_names:
                value = group[name]
                # Schedulers change tensors in place, and a list can be: a copy shows that.
                values.append(value if value.__class__ in FIXED else _copied(value))
        return values

    def _group_options(self) -> list[Options]:
        check_options(self.optimizer)
        return group_options(self.optimizer)

    def device_name(self, pin: Callable[[], Any]) -> str:
        return str(pin().name_of(self.device))

    def mapping_lines(self, task: Task) -> list[str]:
        return mapping_lines(task)


def _copied(value: Any) -> Any:
    return plain(value) if isinstance(value, torch.Tensor | list) else value


class Places:
    """The trained parameters, with the view of the arena on which each one must lie. A script may give one other memory
    (`flatten_parameters()`, `.to(memory_format=...)`, `.data = ...`): with the same dtype and shape it is laid back on
    the arena, with its values; else it is refused. So is a gradient that is not of its parameter's dtype and shape."""

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
