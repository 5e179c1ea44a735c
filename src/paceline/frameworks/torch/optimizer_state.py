"""Show a script the optimizer's state, which lies on the ps, as `optimizer.state`, and take what it writes there.

Used by frameworks/torch/optimizer and frameworks/torch/training_step. The state is fetched when it is touched and let
go at the next step; what was changed in between goes to the ps, or is refused beside other workers.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from xxhash import xxh3_64_intdigest

from paceline.params.layout import Layout
from paceline.views import NAMES, as_bytes, flat, shaped
from paceline.wire.messages import MASTER, WIDE_AVERAGE
from paceline.worker.step.optimizer_state import COUNTERS, Slots, WholeSlot

State = dict[str, Any]


class OptimizerState(MutableMapping[torch.Tensor, State]):
    """The state of each trained parameter; like torch's, it makes an empty one where there is none."""

    def __init__(self, fetch: Callable[[], Mapping[torch.Tensor, State]]) -> None:
        self._fetch = fetch
        self._values: defaultdict[torch.Tensor, State] = defaultdict(dict)
        self._fetched: object = None
        self.is_fetched = False  # since the last step

    @property
    def is_changed(self) -> bool:
        """Tell whether the script has written since the state was fetched."""
        return self.is_fetched and _digest(self._values) != self._fetched

    def forget(self) -> None:
        """Let the state go: it is fetched anew when it is touched again."""
        self._values, self._fetched, self.is_fetched = defaultdict(dict), None, False

    def replace(self, values: Mapping[torch.Tensor, State]) -> None:
        """Take these values for what the script has written."""
        self._values, self._fetched, self.is_fetched = defaultdict(dict, values), None, True

    def _now(self) -> defaultdict[torch.Tensor, State]:
        if not self.is_fetched:
            self._values = defaultdict(dict, self._fetch())
            self._fetched, self.is_fetched = _digest(self._values), True
        return self._values

    def __getitem__(self, key: torch.Tensor) -> State:
        return self._now()[key]

    def __setitem__(self, key: torch.Tensor, value: State) -> None:
        self._now()[key] = value

    def __delitem__(self, key: torch.Tensor) -> None:
        del self._now()[key]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def __contains__(self, key: object) -> bool:
        return key in self._now()

    def get(self, key: torch.Tensor, default: Any = None) -> Any:
        return self._now().get(key, default)

    def __reduce__(self) -> Any:
        """Make a copy torch's own kind of state."""
        return defaultdict, (dict, dict(self._now()))


def states_of(slots: Slots, layout: Layout, parameters: Sequence[torch.Tensor]) -> dict[torch.Tensor, State]:
    """Return what the ps remember in torch's shape."""
    states: dict[torch.Tensor, State] = {}
    for index, named in slots.items():
        spec = layout.trained[index]
        state = states[parameters[index]] = {}
        for name, whole in named.items():
            if name not in (MASTER, WIDE_AVERAGE):  # torch knows no wider copy of a parameter
                vector = flat(memoryview(whole.data), whole.dtype, 0, 1 if whole.is_scalar else spec.numel)
                state[name] = vector.reshape(()) if whole.is_scalar else shaped(vector, spec.shape, spec.stride)
    return states


def slots_of(states: Mapping[torch.Tensor, State], layout: Layout, parameters: Sequence[torch.Tensor]) -> Slots:
    """Return torch's states as the ps take them."""
    slots: Slots = {}
    for index, (spec, parameter) in enumerate(zip(layout.trained, parameters, strict=True)):
        state = states.get(parameter, {})
        slots[index] = {name: _whole(name, value, spec.stride) for name, value in state.items() if value is not None}
    return slots


def _whole(name: str, value: Any, stride: tuple[int, ...]) -> WholeSlot:
    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
    tensor = tensor.detach().to("cpu")
    if name in COUNTERS:
        return WholeSlot(NAMES[tensor.dtype], True, bytearray(as_bytes(tensor)))
    laid = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)
    return WholeSlot(NAMES[tensor.dtype], False, bytearray(as_bytes(laid)))


def _digest(values: Mapping[torch.Tensor, State]) -> object:
    return {id(p): {n: _digest_of(v) for n, v in state.items()} for p, state in values.items() if state}


def _digest_of(value: Any) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    tensor = value.detach().contiguous()
    return tensor.dtype, tuple(tensor.shape), xxh3_64_intdigest(as_bytes(tensor.cpu()))
