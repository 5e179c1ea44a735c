"""WHAT does a PyTorch worker see? Its own model and optimizer, unchanged; underneath, the ps owns the numbers.

Made by `ctx.prepare`. The way of one step (docs/step.md):

1. `optimizer.step()` takes the previous answer if nobody has,
2. copies the gradient into the slot (large ones on tcp: sends it from where it lies) and checks it with one sum,
3. pushes, and returns at once if the answer can be taken later: before the next forward pass.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.errors import NonFiniteGradient, PacelineError, UsageError
from paceline.params.arena import Arena
from paceline.params.layout import ITEM_BYTES, Layout, TensorSpec
from paceline.params.placement import Plan, place
from paceline.transport.base import Buffer
from paceline.views import DTYPES, NAMES, as_bytes, flat, shaped, storage_order
from paceline.wire.frames import Outcome
from paceline.wire.messages import Assign, OptimizerSpec, Options, PushTail, encode
from paceline.worker.client import Client, Identity
from paceline.worker.slots import Slots, gather
from paceline.worker.torch_copies import copies_stand_alone, readers_see_the_newest

SUPPORTED = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adadelta,
    torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop,
)  # fmt: skip
SMALL_BYTES = 1 << 20  # a shard up to this size is copied together before it is sent on tcp
EAGER_STEPS = 2  # these wait inside step(), to see whether a forward pass comes before the next one
MAX_NOT_FINITE = 10  # in a row; then something is wrong with the training, not with a batch


def optimizer_spec(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """Name and numbers of an optimizer, as a ps takes them."""
    if type(optimizer) not in SUPPORTED:
        names = ", ".join(cls.__name__ for cls in SUPPORTED)
        raise UsageError(
            f"{type(optimizer).__name__} cannot run on a ps, because it is not known to be elementwise: use one of "
            f"{names} (`--mode local`, once it is there, takes any optimizer: there it runs on the worker)"
        )
    return OptimizerSpec(type(optimizer).__name__, group_options(optimizer))


def group_options(optimizer: torch.optim.Optimizer) -> list[Options]:
    """The options of each parameter group now, without what schedulers keep there for themselves."""
    names = optimizer.defaults
    return [{n: _plain(v) for n, v in group.items() if n in names} for group in optimizer.param_groups]


def _plain(value: Any) -> Any:
    """An option as it travels: torch's and numpy's numbers become Python's."""
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value.item() if hasattr(value, "item") else value


def describe(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Layout, dict[str, torch.Tensor]]:
    """The layout of a model, and its tensors by the layout's names. Tied tensors have one name, the first."""
    group_of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    persistent = model.state_dict(keep_vars=True)
    named = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in persistent)]
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        named.append((f"optimizer.{number}", parameter))  # a parameter of no module, or seen above
    for name, tensor in named:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    specs = [_spec(name, tensor, group_of.get(id(tensor), -1)) for name, tensor in tensors.items()]
    of_model = {id(p) for p in model.parameters()}
    if not of_model & group_of.keys():
        raise UsageError("the optimizer holds none of this model's parameters, so training would not change the model")
    # Widest first, so that the flat memory holds one run a dtype.
    specs.sort(key=lambda s: -ITEM_BYTES[s.dtype])
    return Layout(tuple(specs)), tensors


def _spec(name: str, tensor: torch.Tensor, group: int) -> TensorSpec:
    if tensor.dtype not in NAMES:
        raise UsageError(f"{name} has dtype {tensor.dtype}, which cannot be sent: use one of {', '.join(ITEM_BYTES)}")
    stride = tensor.stride() if _is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
    return TensorSpec(name, tuple(tensor.shape), tuple(stride), NAMES[tensor.dtype], group)


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent != 1:
            if stride != expected:
                return False
            expected *= extent
    return True


class Trainee:
    """One model and its optimizer, bound to the cluster. Everything here runs on the thread that trains."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, num_ps: int, placement: str) -> None:
        self.model = model
        self.optimizer = optimizer
        self.spec = optimizer_spec(optimizer)
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
        self.client: Client = None  # type: ignore[assignment]  # set by connect, before anything else is called
        self._option_names = tuple(optimizer.defaults)
        values = [value for group in optimizer.param_groups for value in group.values()]
        self._has_tensor_options = any(isinstance(value, torch.Tensor) for value in values)
        self._sent_options = self._option_values()
        self.is_lazy = False
        self._hook_fired = False
        self.steps = 0
        self.wants_ticket = False
        self.has_ticket = False
        self.discarded = 0
        self._not_finite = 0

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

    def take_carried(self, block: bytearray) -> None:
        """The chief's frozen parameters and buffers, at the start."""
        with torch.no_grad():
            for spec, offset in zip(self.layout.carried, self.layout.carried_offsets, strict=True):
                if spec.numel:
                    value = shaped(flat(memoryview(block), spec.dtype, offset, spec.numel), spec.shape, spec.stride)
                    self.tensors[spec.name].copy_(value)

    # --- connecting -------------------------------------------------------------------------------------------

    def connect(self, me: Identity, has_rounds: bool, say: Callable[[str], None]) -> Client:
        self.client = Client(me, has_rounds, self.layout, self.plan, self.arena.memory, say)
        return self.client

    def joined(self, on_load: Callable[[], None]) -> None:
        """After the client has joined: views on the slots, parameters from the ps, hooks on the model."""
        self._slots: list[memoryview | None] = []
        is_small = max(self.plan.shard_bytes) <= SMALL_BYTES
        for link, pieces in zip(self.client.links, self.plan.shards, strict=True):
            slot = link.slot
            if slot is None and (self.device.type != "cpu" or is_small):
                # Gradients of an accelerator must come to the host, and little ones are sent faster in one piece.
                slot = Arena.private(link.into.nbytes).memory
            self._slots.append(slot if pieces else None)
        self._whole: list[tuple[int, torch.Tensor]] = []
        self._cut: list[tuple[int, int, int, torch.Tensor]] = []
        self._sums: list[torch.Tensor] = []
        for slot, pieces in zip(self._slots, self.plan.shards, strict=True):
            if slot is not None:
                self._view_slot(slot, pieces)
        self._direct = [s for s, pieces in enumerate(self.plan.shards) if pieces and self._slots[s] is None]
        self._payloads: list[Sequence[Buffer]] = [
            () if link.shares_memory or slot is None else (slot,)
            for link, slot in zip(self.client.links, self._slots, strict=True)
        ]
        self._every = [view for _, view in self._whole]
        self._order = [index for index, _ in self._whole]
        self.mirror()
        before_forward = torch._dynamo.disable(self._before_forward)  # type: ignore[no-untyped-call]
        hooks = [
            ("_forward_pre_hooks", self.model.register_forward_pre_hook(before_forward)),
            ("_state_dict_pre_hooks", self.model.register_state_dict_pre_hook(lambda *_: self.settle())),  # type: ignore[no-untyped-call]
            ("_load_state_dict_post_hooks", self.model.register_load_state_dict_post_hook(lambda *_: on_load())),  # type: ignore[no-untyped-call]
        ]
        copies_stand_alone(self.model, hooks, self.settle)
        readers_see_the_newest(self.model, self.settle)

    def _view_slot(self, slot: memoryview, pieces: Sequence[Any]) -> None:
        trained = self.layout.trained
        for dtype in sorted({trained[p.tensor].dtype for p in pieces}):
            same = [p for p in pieces if trained[p.tensor].dtype == dtype]
            first, last = same[0], same[-1]
            numel = (last.offset - first.offset) // ITEM_BYTES[dtype] + last.numel
            self._sums.append(flat(slot, dtype, first.offset, numel))
        for piece in pieces:
            spec = trained[piece.tensor]
            vector = flat(slot, spec.dtype, piece.offset, piece.numel)
            if piece.numel == spec.numel:
                self._whole.append((piece.tensor, shaped(vector, spec.shape, spec.stride)))
            else:
                self._cut.append((piece.tensor, piece.start, piece.stop, vector))

    def mirror(self) -> None:
        if self._on_device is not None:
            self._on_device.copy_(flat(self.arena.memory, "uint8", 0, self.plan.total_bytes))

    # --- one step ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Push this worker's gradient; the answer is taken now, or before the next forward pass."""
        if self.client.is_pending:
            self._go_eager()
            self.settle()
        self._check_anchor()
        with torch.no_grad():
            tail, payloads, is_finite = self._prepare_push([p.grad for p in self.parameters])
        self.client.push(payloads, tail, is_finite, self.wants_ticket)
        self.steps += 1
        if not self.is_lazy:
            self.settle()
            if self.steps == EAGER_STEPS and self._hook_fired:
                self.is_lazy = True
            self._hook_fired = False

    def settle(self) -> None:
        """Take the answer that is still on its way, if there is one."""
        if not self.client.is_pending:
            return
        taken = self.client.take()
        self.mirror()
        self.has_ticket = taken.has_ticket
        if taken.outcome in (Outcome.DISCARDED, Outcome.NOT_FINITE):
            self.discarded += 1

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
                stacklevel=6,  # the script's own optimizer.step()
            )

    def _check_anchor(self) -> None:
        for parameter, pointer in self._anchor:
            if parameter.data_ptr() != pointer:
                raise PacelineError(
                    "the model's parameters were moved or cast after prepare(), so the ps can no longer reach them: "
                    "call model.to(...) or model.half() before prepare()"
                )

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

    # --- gradients --------------------------------------------------------------------------------------------

    def _prepare_push(self, gradients: list[torch.Tensor | None]) -> tuple[bytes, Sequence[Sequence[Buffer]], bool]:
        options = self._changed_options()
        mask = b"" if all(g is not None for g in gradients) else _bits([g is not None for g in gradients])
        tail = encode(PushTail(options, mask)) if options is not None or mask else b""
        self._copy(gradients, bool(mask))
        if not self._direct:
            return tail, self._payloads, self._is_finite(self._sums, gradients)
        payloads = list(self._payloads)
        for shard in self._direct:
            payloads[shard] = self._buffers(shard, gradients)
        return tail, payloads, self._is_finite([g for g in gradients if g is not None], gradients)

    def _option_values(self) -> list[list[Any]]:
        names = self._option_names
        values = [[group[n] for n in names] for group in self.optimizer.param_groups]
        if self._has_tensor_options:  # a scheduler changes those in place, so a copy must be kept
            values = _plain(values)
        return values

    def _changed_options(self) -> list[Options] | None:
        """All groups' options when one of them is another than at the last push (a scheduler did that, say)."""
        values = self._option_values()
        if values == self._sent_options:
            return None
        self._sent_options = values
        self.spec = OptimizerSpec(self.spec.name, group_options(self.optimizer))
        return self.spec.groups

    def _copy(self, gradients: list[torch.Tensor | None], has_gaps: bool) -> None:
        """Into the slots: whole tensors in one call, cut ones piece by piece in the order they lie in memory."""
        if self._whole:
            if has_gaps:
                pairs = [(view, g) for i, view in self._whole if (g := gradients[i]) is not None]
                if pairs:
                    torch._foreach_copy_([v for v, _ in pairs], [g for _, g in pairs])
            else:
                torch._foreach_copy_(self._every, [gradients[i] for i in self._order])  # type: ignore[misc]
        for index, start, stop, vector in self._cut:
            gradient = gradients[index]
            if gradient is not None:
                vector.copy_(self._as_laid_out(index, gradient)[start:stop])

    def _as_laid_out(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient as a flat vector in the order in which its parameter lies in memory."""
        spec = self.layout.trained[index]
        if gradient.stride() != spec.stride:
            ordered = torch.empty_strided(spec.shape, spec.stride, dtype=gradient.dtype, device=gradient.device)
            gradient = ordered.copy_(gradient)
        return storage_order(gradient)

    def _buffers(self, shard: int, gradients: list[torch.Tensor | None]) -> list[Buffer]:
        """A shard's bytes straight from the gradients: pieces, and zeros where there are none or between them."""
        buffers: list[Buffer] = []
        position = 0
        for piece in self.plan.shards[shard]:
            spec, gradient = self.layout.trained[piece.tensor], gradients[piece.tensor]
            if piece.offset > position:
                buffers.append(bytes(piece.offset - position))
            size = piece.numel * ITEM_BYTES[spec.dtype]
            if gradient is None:
                buffers.append(bytes(size))
            else:
                buffers.append(as_bytes(self._as_laid_out(piece.tensor, gradient)[piece.start : piece.stop]))
            position = piece.offset + size
        if position < self.plan.shard_bytes[shard]:
            buffers.append(bytes(self.plan.shard_bytes[shard] - position))
        return buffers

    def _is_finite(self, vectors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> bool:
        """One sum finds a NaN or an infinity for a thirtieth of the price of isfinite; if it is suspicious, look."""
        total = 0.0
        for vector in vectors:
            total += vector.sum().item()
        if math.isfinite(total):
            self._not_finite = 0
            return True
        bad = [
            self.layout.trained[i].name
            for i, g in enumerate(gradients)
            if g is not None and not bool(torch.isfinite(g).all())
        ]
        if not bad:
            self._not_finite = 0
            return True  # large, but finite: only the sum overflowed
        self._not_finite += 1
        if self._not_finite >= MAX_NOT_FINITE:
            raise NonFiniteGradient(f"{self._not_finite} gradients in a row were not finite, now in {', '.join(bad)}")
        self._sent_options = []  # ps:0 alone hears of this push: what it says of options is said again with the next
        warnings.warn(
            f"paceline: step {self.steps + 1} discarded, gradient not finite in {', '.join(bad)}",
            stacklevel=7,  # the script's own optimizer.step()
        )
        return False


def _bits(flags: Sequence[bool]) -> bytes:
    """
    >>> _bits([True, False, True]).hex()
    '05'
    """
    out = bytearray((len(flags) + 7) // 8)
    for index, flag in enumerate(flags):
        if flag:
            out[index >> 3] |= 1 << (index & 7)
    return bytes(out)
