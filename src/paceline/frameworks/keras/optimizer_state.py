"""Show a Keras script the optimizer's state, which lies on the ps, as the optimizer's own variables, and find what the
script writes there.

Used by frameworks/keras/training_step and frameworks/keras/objects. The variables are made when a script asks for them,
with the values of that moment; from then on they are compared before each push. Must never import torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from paceline.frameworks.keras.gradients import dtype_of, vector
from paceline.frameworks.keras.layout import Weight
from paceline.params.layout import Layout
from paceline.worker.step.optimizer_state import Slots, WholeSlot

# What the ps remember of a weight -> where a Keras optimizer has it, one variable a weight.
SLOTS = {
    "momentum": ("momentums", "_momentums"),
    "velocity": ("_velocities",),
    "velocity_hat": ("_velocity_hats",),
    "accumulator": ("_accumulators",),
    "average_gradient": ("_average_gradients",),
}
STEP = "step"  # of the optimizers whose formula has the number of the step in it: Keras's iterations
COUNTING = ("Adam", "AdamW")


def variables_of(optimizer: Any, slot: str) -> Sequence[Any] | None:
    """Return what an optimizer has of this slot, one variable a weight; None where it is made without it."""
    return next((found for name in SLOTS[slot] if (found := getattr(optimizer, name, None))), None)


class KerasState:
    """The state of one optimizer, whose class's own `build` makes its variables."""

    def __init__(
        self, optimizer: Any, build: Callable[..., None], trained: Sequence[Weight], layout: Layout, read: Any, put: Any
    ) -> None:
        self._optimizer = optimizer
        self._build = build
        self._trained = trained
        self._layout = layout
        self._read, self._put = read, put
        self._shown: dict[tuple[int, str], int] = {}
        self.counts = type(optimizer).__name__ in COUNTING
        # What the iterations are at the next step, unless the script sets them; None: not known.
        self.next_count: int | None = int(optimizer.iterations.numpy()) if optimizer.built else 0
        self.remember()

    def show(self, fetch: Callable[[], Slots]) -> None:
        """Make the variables, and give them what the ps remember now; what the script has just written stays."""
        if not self._optimizer.built or self.changed():
            return
        self._make()
        slots = fetch()
        for (index, slot), weight, variable in self._own():
            if (whole := slots.get(index, {}).get(slot)) is not None:
                flat = vector(memoryview(whole.data), whole.dtype, 0, weight.spec.numel)
                values = weight.as_own(flat.reshape(weight.spec.shape))
                self._put(variable, np.ascontiguousarray(values).astype(dtype_of(variable.dtype)))
        self.remember()

    def _make(self) -> None:
        if not any(True for _ in self._own()):
            self._optimizer.built = False
            self._build(self._optimizer, list(self._optimizer._trainable_variables))

    def remember(self) -> None:
        """Take the values that the variables hold now for those of the ps."""
        self._shown = {key: self._digest(variable) for key, _, variable in self._own()}

    def changed(self) -> list[tuple[int, str]]:
        """Return what the script has written since then."""
        return [key for key, _, variable in self._own() if self._shown.get(key) != self._digest(variable)]

    def is_other(self, count: int | None) -> bool:
        """Tell whether these iterations are not what they would be by themselves, and play a part in the update."""
        return self.counts and None not in (count, self.next_count) and count != self.next_count

    def slots(self, there: Mapping[int, Mapping[str, WholeSlot]], count: int | None) -> Slots:
        """Return what the ps shall remember: what they have `there`, with what the script has written over it."""
        slots: Slots = {index: dict(named) for index, named in there.items()}
        changed = set(self.changed())
        if count is not None and not any(slots.values()):
            self._make()
        for (index, slot), weight, variable in self._own():
            named = slots.setdefault(index, {})
            if (index, slot) in changed or slot not in named:
                laid = np.ascontiguousarray(weight.as_laid_out(self._read(variable)))
                named[slot] = WholeSlot(weight.spec.dtype, False, bytearray(laid.tobytes()))
        for named in slots.values():
            if self.counts and named and (count is not None or STEP not in named):
                steps = np.array(self.next_count if count is None else count, "float32")
                named[STEP] = WholeSlot("float32", True, bytearray(steps.tobytes()))
        return slots

    def _digest(self, variable: Any) -> int:
        return xxh3_64_intdigest(np.ascontiguousarray(self._read(variable)).reshape(-1).view(np.uint8).data)

    def _own(self) -> Iterator[tuple[tuple[int, str], Weight, Any]]:
        for slot in SLOTS:
            if kept := variables_of(self._optimizer, slot):
                for index, weight in enumerate(self._trained):
                    key = self._optimizer._var_key(weight.variable)
                    if (at := self._optimizer._trainable_variables_indices.get(key)) is not None:
                        yield (index, slot), weight, kept[at]
