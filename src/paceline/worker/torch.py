"""WHAT does a PyTorch worker see? Its own model and optimizer, unchanged; underneath, the ps owns the numbers.

Made by `ctx.prepare`. worker/trainee has what every framework shares; here are torch's tensors: parameters that are
views of the arena, gradients, and the hooks that take an answer before the next forward pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.cluster.spec import Task
from paceline.errors import PacelineError, UsageError
from paceline.params.layout import TensorSpec
from paceline.views import DTYPES, flat, shaped
from paceline.wire.messages import OptimizerSpec, Options
from paceline.worker.torch_compiler import disabled
from paceline.worker.torch_copies import copies_stand_alone, readers_see_the_newest
from paceline.worker.torch_devices import mapping_lines
from paceline.worker.torch_gradients import Outgoing
from paceline.worker.torch_layout import describe, group_options, optimizer_spec, plain
from paceline.worker.torch_overlap import Overlap
from paceline.worker.trainee import Trainee


class TorchTrainee(Trainee):
    """One model and its optimizer, bound to the cluster. Everything here runs on the thread that trains."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, num_ps: int, placement: str) -> None:
        self.model = model
        self.optimizer = optimizer
        spec = self.make_spec()
        layout, self.tensors = describe(model, optimizer)
        super().__init__(spec, layout, num_ps, placement)
        self.parameters = [self.tensors[t.name] for t in self.layout.trained]
        devices = {p.device for p in self.parameters}
        if len(devices) != 1:
            raise UsageError(f"the trained parameters are on {len(devices)} devices; a worker trains on one")
        self.device = devices.pop()
        self._on_device: torch.Tensor | None = None
        self._bind()
        self._option_names = tuple(optimizer.defaults)
        values = [value for group in optimizer.param_groups for value in group.values()]
        self._has_tensor_options = any(isinstance(value, torch.Tensor) for value in values)
        self._sent_options = self._option_values()

    def make_spec(self) -> OptimizerSpec:
        """What the ps shall run."""
        return optimizer_spec(self.optimizer)

    # --- memory -----------------------------------------------------------------------------------------------

    def _bind(self) -> None:
        """Lay the trained parameters on the arena (on an accelerator: on one block there, the arena is its mirror)."""
        if self.device.type != "cpu":
            self._on_device = torch.zeros(self.plan.total_bytes, dtype=torch.uint8, device=self.device)
        offsets = self.plan.tensor_offsets()
        with torch.no_grad():
            for index, (spec, parameter) in enumerate(zip(self.layout.trained, self.parameters, strict=True)):
                if spec.numel == 0:
                    continue
                view = self._typed(spec, offsets[index])
                view.copy_(parameter)
                parameter.data = view
        self.fill_arena()
        self._anchor = [(p, p.data_ptr()) for p in (self.parameters[0], self.parameters[-1])]

    def _typed(self, spec: TensorSpec, offset: int) -> torch.Tensor:
        if self._on_device is None:
            vector = flat(self.arena.memory, spec.dtype, offset, spec.numel)
        else:
            vector = self._on_device[offset : offset + spec.size_bytes].view(DTYPES[spec.dtype])
        return shaped(vector, spec.shape, spec.stride)

    def carried_block(self) -> bytes:
        """The values of all carried tensors, one after the other."""
        block = bytearray(self.layout.carried_bytes)
        for spec, offset in zip(self.layout.carried, self.layout.carried_offsets, strict=True):
            if spec.numel:
                shaped(flat(memoryview(block), spec.dtype, offset, spec.numel), spec.shape, spec.stride).copy_(
                    self.tensors[spec.name].detach()
                )
        return bytes(block)

    def take_carried(self, block: bytearray) -> None:
        """The chief's frozen parameters and buffers, at the start."""
        with torch.no_grad():
            for spec, offset in zip(self.layout.carried, self.layout.carried_offsets, strict=True):
                if spec.numel:
                    value = shaped(flat(memoryview(block), spec.dtype, offset, spec.numel), spec.shape, spec.stride)
                    self.tensors[spec.name].copy_(value)

    def mirror(self) -> None:
        if self._on_device is not None:
            self._on_device.copy_(flat(self.arena.memory, "uint8", 0, self.plan.total_bytes))

    def fill_arena(self) -> None:
        if self._on_device is not None:
            flat(self.arena.memory, "uint8", 0, self.plan.total_bytes).copy_(self._on_device)

    # --- connecting -------------------------------------------------------------------------------------------

    def joined(self, on_load: Callable[[], None]) -> None:
        """Views on the slots, parameters from the ps, hooks on the model."""
        self.find_slots()
        self.client.on_slots, self.client.on_return = self.find_slots, self.refresh
        self._overlap = self._make_overlap()
        self.mirror()
        before_forward = disabled(self._before_forward)
        hooks = [
            ("_forward_pre_hooks", self.model.register_forward_pre_hook(before_forward)),
            ("_state_dict_pre_hooks", self.model.register_state_dict_pre_hook(lambda *_: self.settle())),  # type: ignore[no-untyped-call]
            ("_load_state_dict_post_hooks", self.model.register_load_state_dict_post_hook(lambda *_: on_load())),  # type: ignore[no-untyped-call]
        ]
        copies_stand_alone(self.model, hooks, self.settle)
        readers_see_the_newest(self.model, self.settle)

    def find_slots(self) -> None:
        """Where gradients go; a ps that was connected to again has another slot."""
        self._outgoing = Outgoing(self.client.links, self.layout, self.plan, self.device, self._me.wire)

    def _make_overlap(self) -> Overlap | None:
        if not self._me.overlaps:
            return None
        outgoing = self._outgoing
        assert isinstance(outgoing, Outgoing)
        made = Overlap(self.client, self.layout, self.plan, outgoing, self.parameters)
        if not made.shards:
            self._say("paceline: --overlap gains nothing here and is not used: it is for large models on lane tcp")
        return made

    # --- one step ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Push this worker's gradient; the answer is taken now, or before the next forward pass."""
        self.before_step()
        with torch.no_grad():
            self._push([p.grad for p in self.parameters])
        self.steps += 1

    def _spoil(self) -> None:
        """--chaos nan: one element of the gradient is none."""
        gradient = next((p.grad for p in self.parameters if p.grad is not None and p.grad.numel()), None)
        if gradient is not None:
            with torch.no_grad():
                gradient[(0,) * gradient.dim()] = float("nan")

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():  # an evaluation says nothing about how the training calls the model
            self._hook_fired = True
        if self.client.is_pending:
            self.settle()

    def _check_anchor(self) -> None:
        for parameter, pointer in self._anchor:
            if parameter.data_ptr() != pointer:
                raise PacelineError(
                    "the model's parameters were moved or cast after prepare(), so the ps can no longer reach them: "
                    "call model.to(...) or model.half() before prepare()"
                )

    # --- what a push says beside its numbers ------------------------------------------------------------------

    def _option_values(self) -> list[list[Any]]:
        names = self._option_names
        values = [[group[n] for n in names] for group in self.optimizer.param_groups]
        if self._has_tensor_options:  # a scheduler changes those in place, so a copy must be kept
            values = plain(values)
        return values

    def _group_options(self) -> list[Options]:
        return group_options(self.optimizer)

    def device_name(self, pin: Callable[[], Any]) -> str:
        name: str = pin().name_of(self.device)
        return name

    def mapping_lines(self, task: Task) -> list[str]:
        return mapping_lines(task)
