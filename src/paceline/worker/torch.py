"""WHAT does a PyTorch worker see? Its own model and optimizer, unchanged; underneath, the ps owns the numbers.

Made by `ctx.prepare`. The way of one step (docs/step.md):

1. `optimizer.step()` takes the previous answer if nobody has,
2. copies the gradient into the slot (large ones on tcp: sends it from where it lies) and checks it with one sum,
3. pushes, and returns at once if the answer can be taken later: before the next forward pass.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.errors import NonFiniteGradient, PacelineError, UsageError
from paceline.params.arena import Arena
from paceline.params.layout import TensorSpec
from paceline.params.placement import Plan, place
from paceline.views import DTYPES, flat, shaped
from paceline.wire.frames import Flag, Outcome
from paceline.wire.messages import Assign, Fetch, OptimizerSpec, Options, PushTail, encode
from paceline.worker.client import Client, Identity
from paceline.worker.injection import Injection
from paceline.worker.position import Progress
from paceline.worker.slots import Slots, gather
from paceline.worker.slowness import Slowness
from paceline.worker.torch_copies import copies_stand_alone, readers_see_the_newest
from paceline.worker.torch_gradients import Gradients, Outgoing, bits
from paceline.worker.torch_layout import describe, group_options, optimizer_spec, plain
from paceline.worker.torch_overlap import Overlap

EAGER_STEPS = 2  # these wait inside step(), to see whether a forward pass comes before the next one
MAX_NOT_FINITE = 10  # in a row; then something is wrong with the training, not with a batch


class Trainee:
    """One model and its optimizer, bound to the cluster. Everything here runs on the thread that trains."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, num_ps: int, placement: str) -> None:
        self.model = model
        self.optimizer = optimizer
        self.spec = self.make_spec()
        self.layout, self.tensors = describe(model, optimizer)
        self.plan: Plan = place(self.layout, num_ps, placement)
        self.parameters = [self.tensors[t.name] for t in self.layout.trained]
        devices = {p.device for p in self.parameters}
        if len(devices) != 1:
            raise UsageError(f"the trained parameters are on {len(devices)} devices; a worker trains on one")
        self.device = devices.pop()
        self.arena = Arena.private(self.plan.total_bytes)
        self._on_device: torch.Tensor | None = None
        self._bind()
        self._overlap: Overlap | None = None
        self.client: Client = None  # type: ignore[assignment]  # set by connect, before anything else is called
        self._option_names = tuple(optimizer.defaults)
        values = [value for group in optimizer.param_groups for value in group.values()]
        self._has_tensor_options = any(isinstance(value, torch.Tensor) for value in values)
        self._sent_options = self._option_values()
        self.is_lazy = False
        self._hook_fired = False
        self._holds_averages = False
        self._refreshes_later = False
        self.slowness: Slowness | None = None
        self.injection: Injection | None = None
        self.steps = 0
        self.pushes = 0
        self.wants_ticket = False
        self.is_budgeted = False  # ctx.steps(total) was used: nothing counts beyond it
        self.has_ticket = False
        self.last_outcome = Outcome.APPLIED
        self.discarded = 0
        self.not_finite = 0
        self._not_finite_in_a_row = 0
        self.seen_samples = 0  # of batches that the loader gave since the last push
        self.own_weight: float | None = None  # what the script says instead
        self._weight = 0.0
        self._sent_weight: float | None = 0.0
        self.progress = Progress(0)  # the context's own, once it has begun
        self.on_save: Callable[[int, bool], None] = lambda version, writes: None

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
        if self._on_device is not None:
            flat(self.arena.memory, "uint8", 0, self.plan.total_bytes).copy_(self._on_device)
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

    def parameters_of(self, index: int) -> memoryview:
        """What this worker has of one shard."""
        if self._on_device is not None:
            flat(self.arena.memory, "uint8", 0, self.plan.total_bytes).copy_(self._on_device)
        base = self.plan.base(index)
        return self.arena.memory[base : base + self.plan.shard_bytes[index]]

    def take_carried(self, block: bytearray) -> None:
        """The chief's frozen parameters and buffers, at the start."""
        with torch.no_grad():
            for spec, offset in zip(self.layout.carried, self.layout.carried_offsets, strict=True):
                if spec.numel:
                    value = shaped(flat(memoryview(block), spec.dtype, offset, spec.numel), spec.shape, spec.stride)
                    self.tensors[spec.name].copy_(value)

    def mirror(self) -> None:
        """New values lie in the arena: they are the model's now."""
        if self._on_device is not None:
            self._on_device.copy_(flat(self.arena.memory, "uint8", 0, self.plan.total_bytes))

    # --- connecting -------------------------------------------------------------------------------------------

    def connect(self, me: Identity, say: Callable[[str], None]) -> Client:
        self._me = me
        self._say = say
        self.client = Client(me, self.layout, self.plan, self.arena.memory, say)
        self.client.optimizer = lambda: self.spec
        self.client.weight = lambda: self._weight
        return self.client

    def joined(self, on_load: Callable[[], None]) -> None:
        """After the client has joined: views on the slots, parameters from the ps, hooks on the model."""
        self._find_slots()
        self.client.on_slots, self.client.on_return = self._find_slots, self.refresh
        self._overlap = self._make_overlap()
        self.mirror()
        before_forward = torch._dynamo.disable(self._before_forward)  # type: ignore[no-untyped-call]
        hooks = [
            ("_forward_pre_hooks", self.model.register_forward_pre_hook(before_forward)),
            ("_state_dict_pre_hooks", self.model.register_state_dict_pre_hook(lambda *_: self.settle())),  # type: ignore[no-untyped-call]
            ("_load_state_dict_post_hooks", self.model.register_load_state_dict_post_hook(lambda *_: on_load())),  # type: ignore[no-untyped-call]
        ]
        copies_stand_alone(self.model, hooks, self.settle)
        readers_see_the_newest(self.model, self.settle)

    def _find_slots(self) -> None:
        """Where gradients go; a ps that was connected to again has another slot."""
        self._outgoing = Outgoing(self.client.links, self.layout, self.plan, self.device, self._me.wire)

    def _make_overlap(self) -> Overlap | None:
        if not self._me.overlaps:
            return None
        made = Overlap(self.client, self.layout, self.plan, self._outgoing, self.parameters)
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

    def before_step(self) -> None:
        """The answer of the last push must be in before this step counts."""
        if self._holds_averages:
            raise PacelineError("a step inside ctx.ema(): the model holds averaged parameters there; step outside")
        if self.client.is_pending:
            self._go_eager()
            self.settle()
        self._check_anchor()
        if self.slowness is not None:
            self.slowness.hold_back()
        if self.injection is not None:
            self.injection.before_push(self.steps + 1, self._spoil)

    def _spoil(self) -> None:
        """--chaos nan: one element of the gradient is none."""
        gradient = next((p.grad for p in self.parameters if p.grad is not None and p.grad.numel()), None)
        if gradient is not None:
            with torch.no_grad():
                gradient[(0,) * gradient.dim()] = float("nan")

    def newest_step(self) -> int:
        """The global step with this worker's own push in it, without waiting for the answer to that push."""
        return self.client.links[0].version + self.client.is_pending

    def _push(self, gradients: Gradients) -> None:
        mask = b"" if all(g is not None for g in gradients) else bits([g is not None for g in gradients])
        tail = self._tail(mask)
        sent = self._overlap.shards if self._overlap is not None else ()
        payloads, looks_finite = self._outgoing.write(gradients, bool(mask), sent)
        is_finite = looks_finite or self._is_finite(gradients)
        if is_finite:
            self._not_finite_in_a_row = 0
        if self._overlap is not None and is_finite:
            self._overlap.flush(gradients)
        self.has_ticket = False
        self.client.push(payloads, tail, is_finite, self.wants_ticket, sent, self._outgoing.again)
        self.pushes += 1
        self.progress.pushed()
        if not self.is_lazy:
            self.settle()
            if self.pushes == EAGER_STEPS and self._hook_fired:
                self.is_lazy = True
            self._hook_fired = False

    def settle(self) -> None:
        """Take the answer that is still on its way, if there is one."""
        if not self.client.is_pending:
            return
        began = time.perf_counter() if self.slowness is not None else 0.0
        taken = self.client.take()
        self._outgoing.forget()
        self.mirror()
        if self.slowness is not None and self.client.dial.spec.waits_for_others:
            self.slowness.waited(time.perf_counter() - began)
        self.has_ticket = taken.has_ticket
        self.last_outcome = taken.outcome
        if taken.flags & Flag.SAVE:
            self.on_save(taken.version + 1, bool(taken.flags & Flag.WRITES))
        if taken.outcome in (Outcome.DISCARDED, Outcome.NOT_FINITE):
            self.discarded += 1

    def refresh(self) -> None:
        """The newest parameters, now; while the model holds averages: when it holds its own again."""
        self.settle()
        if self._holds_averages:
            self._refreshes_later = True
        else:
            self._bring_newest()

    def _bring_newest(self) -> None:
        self.client.pull()
        self.mirror()
        if self._overlap is not None:
            self._overlap.forget()

    def before_zeroing(self) -> None:
        """Gradients are about to be cleared in place: what was sent from where it lies may be needed once more."""
        if self._outgoing.direct:
            self.settle()

    def forget_steps(self) -> None:
        """New parameters come from outside: what this worker did to its own since the last pull is gone."""

    def finish(self) -> None:
        """This worker's training is over: nothing of it may be left behind."""
        self.settle()

    def close(self) -> None:
        """Let go of the cluster."""
        if self._overlap is not None:
            self._overlap.close()
        self.client.close()

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():  # an evaluation says nothing about how the training calls the model
            self._hook_fired = True
        if self.client.is_pending:
            self.settle()

    def _go_eager(self) -> None:
        if self.is_lazy:
            self.is_lazy = False
            warnings.warn(
                "paceline: a step came without a forward pass of the prepared model before it, so every step() waits "
                "for its parameters from now on",
                stacklevel=7,  # the script's own optimizer.step()
            )

    def _check_anchor(self) -> None:
        for parameter, pointer in self._anchor:
            if parameter.data_ptr() != pointer:
                raise PacelineError(
                    "the model's parameters were moved or cast after prepare(), so the ps can no longer reach them: "
                    "call model.to(...) or model.half() before prepare()"
                )

    # --- what a push says beside its numbers ------------------------------------------------------------------

    def _tail(self, mask: bytes) -> bytes:
        options, weight = self._changed_options(), self._changed_weight()
        if options is None and weight is None and not mask:
            return b""
        return encode(PushTail(options, mask, weight))

    def _option_values(self) -> list[list[Any]]:
        names = self._option_names
        values = [[group[n] for n in names] for group in self.optimizer.param_groups]
        if self._has_tensor_options:  # a scheduler changes those in place, so a copy must be kept
            values = plain(values)
        return values

    def _changed_options(self) -> list[Options] | None:
        """All groups' options when one of them is another than at the last push (a scheduler did that, say)."""
        values = self._option_values()
        if values == self._sent_options:
            return None
        self._sent_options = values
        self.spec = OptimizerSpec(self.spec.name, group_options(self.optimizer))
        return self.spec.groups

    def _changed_weight(self) -> float | None:
        """How many samples this push is the mean of, when it is another number than before."""
        self._weight = self.own_weight or float(self.seen_samples) or self._weight
        self.seen_samples = 0
        if self._weight == self._sent_weight:
            return None
        self._sent_weight = self._weight
        return self._weight

    def _is_finite(self, gradients: Gradients) -> bool:
        """The sum is suspicious: look, and name what is wrong."""
        bad = self._outgoing.not_finite(gradients)
        if not bad:
            return True
        self.not_finite += 1
        self._not_finite_in_a_row += 1
        who, where = f"worker:{self._me.worker}", ", ".join(bad)
        if self._not_finite_in_a_row >= MAX_NOT_FINITE:
            raise NonFiniteGradient(f"{who}: {self._not_finite_in_a_row} gradients in a row not finite, now in {where}")
        self._sent_options = []  # ps:0 alone hears of this push: what it says is said again with the next
        self._sent_weight = None
        warnings.warn(
            f"paceline: {who}: step {self.steps + 1} discarded, gradient not finite in {where}",
            stacklevel=7,  # the script's own optimizer.step()
        )
        return False

    # --- from outside the loop --------------------------------------------------------------------------------

    def assign_parameters(self) -> None:
        """The chief's parameters, as they are now, become the cluster's."""
        self.settle()
        if self._on_device is not None:
            flat(self.arena.memory, "uint8", 0, self.plan.total_bytes).copy_(self._on_device)
        for link in self.client.links:
            link.ask(Assign("parameters"), bulk=[link.into] if link.into.nbytes else [])
        self.send_carried()

    def send_carried(self) -> None:
        """The chief's buffers and frozen parameters, as they are now."""
        if self.layout.carried_bytes:
            self.client.links[0].ask(Assign("carried"), bulk=[self.carried_block()])

    def slots(self) -> Slots:
        """All optimizer state of the cluster."""
        self.settle()
        return gather(self.client.links, self.layout)

    @contextmanager
    def averages(self) -> Iterator[None]:
        """Inside, the model holds the averaged parameters of the ps; afterwards its own again, to the bit."""
        self.settle()
        blocks = [link.ask_bulk(Fetch("ema"), link.into.nbytes)[1] for link in self.client.links]
        memory = self.arena.memory
        if self._on_device is not None:
            flat(memory, "uint8", 0, self.plan.total_bytes).copy_(self._on_device)
        own = bytes(memory)
        for link, block in zip(self.client.links, blocks, strict=True):
            link.into[:] = block
        self.mirror()
        did_hold, self._holds_averages = self._holds_averages, True
        try:
            yield
        finally:
            self._holds_averages = did_hold
            memory[:] = own
            self.mirror()
            if self._refreshes_later and not did_hold:
                self._refreshes_later = False
                self._bring_newest()
