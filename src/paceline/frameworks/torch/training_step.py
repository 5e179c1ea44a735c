"""Bind a PyTorch model and its optimizer to the cluster: both stay the user's own, and the ps owns the numbers.

Made by ctx.prepare. worker/training_step has what every framework shares; here are torch's tensors: parameters that are
views of the arena, gradients, and what a script may do to both between two steps.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline.cluster.spec import Task
from paceline.cluster.spelling import listed
from paceline.errors import UsageError
from paceline.frameworks.torch.carried import Carried, take_unsaved, unsaved_block
from paceline.frameworks.torch.devices import mapping_lines
from paceline.frameworks.torch.gradients import Outgoing
from paceline.frameworks.torch.layout import check_options, describe, group_options, optimizer_spec, plain
from paceline.frameworks.torch.loads import LoadHook
from paceline.frameworks.torch.optimizer import convert
from paceline.frameworks.torch.optimizer_state import OptimizerState, slots_of, states_of
from paceline.frameworks.torch.overlap import Overlap
from paceline.frameworks.torch.places import Places, check_alone
from paceline.frameworks.torch.samples import GradientSamples
from paceline.frameworks.torch.writes import DeviceWrites, OtherTraining, renormalised
from paceline.params.layout import TensorSpec
from paceline.views import DTYPES, flat, shaped
from paceline.wire.messages import OptimizerSpec, Options
from paceline.worker.optimizer_state import scatter
from paceline.worker.training_step import TrainingStep

FIXED = (float, bool, int, type(None))  # options that cannot be changed in place


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
        convert(self.optimizer, self)

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
