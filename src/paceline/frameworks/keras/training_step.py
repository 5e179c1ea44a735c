"""Bind a Keras model and its optimizer to the cluster: both stay the user's own, and the ps owns the numbers.

Made by ctx.prepare. worker/step/training_step has what every framework shares; here are Keras's variables. A variable's
memory is TensorFlow's, and what was read from it never changes, so new values are assigned, not written into it.

A step comes in one of two ways:

- eager: gradients lie in memory. Push, take the answer, and assign what comes back;
- inside tf.function (and model.fit): the graph calls out with the gradients, and assigns what comes back.

TensorFlow is imported only where it is Keras's backend. Must never import torch.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import keras
import numpy as np

from paceline import exits
from paceline.cluster.devices import Device
from paceline.cluster.pinning import Hardware
from paceline.cluster.spec import Task
from paceline.errors import PacelineError, UsageError
from paceline.frameworks.keras.aligned_arrays import Lent
from paceline.frameworks.keras.constraints import release
from paceline.frameworks.keras.gradients import Outgoing, vector
from paceline.frameworks.keras.layout import (
    MAPPED,
    Names,
    Weight,
    describe,
    group_options,
    learning_rate,
    num_groups,
    optimizer_spec,
    refuse_extras,
)
from paceline.frameworks.keras.objects import convert_optimizer
from paceline.frameworks.keras.optimizer_state import KerasState
from paceline.params.layout import TensorSpec
from paceline.wire.messages import OptimizerSpec, Options
from paceline.worker.script import script_line
from paceline.worker.step.optimizer_state import scatter
from paceline.worker.step.training_step import TrainingStep

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
tf: Any = import_module("tensorflow") if IS_TENSORFLOW else None


class KerasStep(TrainingStep):
    """One model and its optimizer, bound to the cluster."""

    loading = "model.load_weights() or model.set_weights()"

    def __init__(self, model: Any, optimizer: Any, names: Names | None, **bound: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        self._as_torch = names is not None
        layout, self.weights = describe(model, None if self.is_local else optimizer, names)
        self._num_groups = num_groups(layout)
        super().__init__(self.make_spec(), layout, **bound)
        self.trained: list[Weight] = [self.weights[t.name] for t in layout.trained]
        self._number = {id(w.variable): index for index, w in enumerate(self.trained)}
        self._number.update({id(w.variable.value): index for index, w in enumerate(self.trained)})
        offsets = self.plan.tensor_offsets()
        starts = [offsets.get(index, 0) for index in range(len(self.trained))]
        self.views = self._views(layout.trained, starts, self.arena.memory)
        self._lent = Lent(self.views)
        self.fill_arena()
        self.lr = learning_rate(optimizer)
        self._own_options = MAPPED.get(type(optimizer).__name__, ())
        self._sent_options = self._option_values()
        self.state: KerasState | None = None
        if not self.is_local and not self._as_torch:
            self.state = KerasState(optimizer, type(optimizer).build, self.trained, layout, read, assign)
        self._is_closed = False
        self._iterations: int | None = None  # Keras's iterations, as of this step
        self.is_in_graph = False
        self._gradients: list[Any] = []

    def make_spec(self) -> OptimizerSpec:
        """Return the optimizer that the ps shall run."""
        return optimizer_spec(self.optimizer, self._num_groups, self._as_torch)

    # --- memory -----------------------------------------------------------------------------------------------

    def mirror(self) -> None:
        if not self.is_in_graph:  # else the graph assigns
            for weight, view in zip(self.trained, self.views, strict=True):
                assign(weight.variable, view)

    def fill_arena(self) -> None:
        for weight, view in zip(self.trained, self.views, strict=True):
            np.copyto(view, read(weight.variable))

    def block_of(self, specs: Sequence[TensorSpec], offsets: Sequence[int], size_bytes: int) -> bytes:
        block = bytearray(size_bytes)
        for spec, view in zip(specs, self._views(specs, offsets, memoryview(block)), strict=True):
            np.copyto(view, read(self.weights[spec.name].variable))
        return bytes(block)

    def take_carried(self, block: bytearray) -> None:
        specs = self.layout.carried
        for spec, view in zip(specs, self._views(specs, self.layout.carried_offsets, memoryview(block)), strict=True):
            assign(self.weights[spec.name].variable, view)

    def _views(self, specs: Sequence[TensorSpec], offsets: Sequence[int], memory: memoryview) -> list[Any]:
        """View these weights in memory, with each variable's own order of axes."""
        parts = [
            vector(memory, s.dtype, offset, s.numel).reshape(s.shape) for s, offset in zip(specs, offsets, strict=True)
        ]
        return [self.weights[s.name].as_own(part) for s, part in zip(specs, parts, strict=True)]

    # --- connecting -------------------------------------------------------------------------------------------

    def joined(self, on_load: Callable[[], None]) -> None:
        super().joined(on_load)
        self.on_load = on_load
        self.writes = VariableWrites(self)
        if self._me.overlaps:
            self._say("paceline: --overlap is for torch workers, and is not used here")

    def find_slots(self) -> None:
        self._outgoing = Outgoing(self.client.links, self.layout, self.plan, self.trained, self._me.wire)

    # --- the optimizer's state ------------------------------------------------------------------------------------

    def show_state(self) -> None:
        """Give the optimizer's variables what the ps remember, for a script that reads them."""
        if self.state is not None and not (self.is_in_graph or in_graph() or self._is_closed) and self.owner.is_here:
            self.state.show(self.slots)

    def follow(self) -> None:
        """Have the optimizer's updates go to the ps."""
        convert_optimizer(self.optimizer, self)

    def send_memory(self) -> None:
        """Send what the optimizer remembers from before prepare(), or say that it starts anew."""
        if self.state is not None and int(self.optimizer.iterations.numpy()):
            scatter(self.client.links, self.plan, self.state.slots({}, None))
        elif int(self.optimizer.iterations.numpy()):
            self._say("paceline: this optimizer has trained before; what it remembers starts anew on the ps")

    def forget_count(self) -> None:
        """Expect iterations that are set to those of a checkpoint, not by the script."""
        if self.state is not None:
            self.state.next_count = None

    def assigned(self, is_chief: bool) -> None:
        if self.state is not None:
            count = int(self.optimizer.iterations.numpy())
            is_other = self.state.is_other(count)
            if is_chief and (is_other or self.state.changed()):
                self._send_state(self.state, count if is_other else None)
            self.state.next_count = count
            self.state.remember()

    def _keep_found(self) -> None:
        super()._keep_found()
        if self.state is None:
            return
        count, self._iterations = self._iterations, None
        is_other = self.state.is_other(count)
        if self.state.changed() or is_other:
            what = "optimizer.iterations was" if is_other else "the optimizer's variables were"
            if self._sends_state(what, "the optimizer's variables", "remember"):
                self._send_state(self.state, count if is_other else None)
            self.state.remember()
        if count is not None:
            self.state.next_count = count + 1

    def _send_state(self, state: KerasState, count: int | None) -> None:
        scatter(self.client.links, self.plan, state.slots(self.slots(), count))

    def close(self) -> None:
        super().close()
        self._is_closed = True
        release(weight.variable for weight in self.trained)

    # --- one step ---------------------------------------------------------------------------------------------

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Push what Keras has clipped and unscaled; the optimizer calls this."""
        refuse_extras(self.optimizer)
        numbers = [self.number(v) for v in variables]
        if len(set(numbers)) < len(numbers):
            twice = next(self.trained[n].spec.name for n in numbers if numbers.count(n) > 1)
            raise UsageError(
                f"{twice} is given twice to one apply_gradients(){script_line()}: add its gradients first, or apply "
                "them one after the other"
            )
        if in_graph():
            self._apply_in_graph(gradients, numbers)
            return
        self.lr, self._iterations = learning_rate(self.optimizer), int(self.optimizer.iterations.numpy())
        self.step(self._ordered([as_array(g) for g in gradients], numbers))

    def number(self, variable: Any) -> int:
        """Return which of the trained tensors a variable is."""
        if id(variable) not in self._number:
            raise PacelineError(
                f"{getattr(variable, 'path', variable)} was not trainable when prepare() saw the model, so the ps do "
                "not train it"
            )
        return self._number[id(variable)]

    def _ordered(self, gradients: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
        ordered: list[Any] = [None] * len(self.trained)
        for number, gradient in zip(numbers, gradients, strict=True):
            ordered[number] = gradient
        return ordered

    def step(self, gradients: list[Any]) -> None:
        """Push this worker's gradient and take the newest parameters."""
        self._gradients = gradients
        self.before_step()
        self._push(self._gradients)
        self.steps += 1
        self.after_step()

    def _apply_in_graph(self, gradients: Sequence[Any], numbers: Sequence[int]) -> None:
        def step(lr: Any, count: Any, *arrays: Any) -> list[Any]:
            self.lr, self._iterations = float(lr), int(count)
            self.step(self._ordered(arrays, numbers))
            return self.fresh()

        dense = [tf.convert_to_tensor(g) for g in gradients]
        numbers_now = [tf.convert_to_tensor(each) for each in (self.optimizer.learning_rate, self.optimizer.iterations)]
        before = [weight.variable._value.read_value() for weight in self.trained]
        with tf.control_dependencies(before):  # what the graph has assigned to them by now is found by the call
            self.exchange(step, [*numbers_now, *dense])

    def exchange(self, body: Callable[..., list[Any]], given: Sequence[Any]) -> None:
        """In a graph: call `body` with these tensors, and give every trained variable the value that it returns."""
        values = tf.numpy_function(self.called_out(body), given, [tf.as_dtype(s.dtype) for s in self.layout.trained])
        for weight, value in zip(self.trained, values, strict=True):
            value.set_shape(weight.variable.shape)
            weight.variable._value.assign(value)

    def called_out(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Return what a graph calls for `body`. What is raised there comes out of TensorFlow as an error of its own:
        keep the true one."""

        def call(*given: Any) -> Any:
            self.is_in_graph = True
            try:
                return body(*given)
            except BaseException as error:
                exits.inside.append(error)
                raise
            finally:
                self.is_in_graph = False

        return call

    def fresh(self) -> list[Any]:
        """Copy the arena's values into arrays of their own: TensorFlow takes them as they are."""
        return self._lent.filled()

    def _spoil(self) -> None:
        for index, gradient in enumerate(self._gradients):
            if gradient is not None and gradient.size:
                self._gradients[index] = spoiled = np.array(gradient)
                spoiled.reshape(-1)[0] = float("nan")
                return

    # --- what a push says beside its numbers ------------------------------------------------------------------

    def _option_values(self) -> Any:
        optimizer = self.optimizer
        return self.lr, optimizer.weight_decay, *[getattr(optimizer, name) for name in self._own_options]

    def _group_options(self) -> list[Options]:
        return group_options(self.optimizer, self.lr, self._num_groups, self._as_torch)

    def device_name(self, pin: Callable[[], Any]) -> str:
        return Hardware().name(Device.parse(_device_of(self.trained[0].variable)))

    def mapping_lines(self, task: Task) -> list[str]:
        cards = tf.config.list_physical_devices("GPU") if IS_TENSORFLOW else []
        lines = [f"{Device(kind='GPU', index=i).filled(task)} -> {card.name}" for i, card in enumerate(cards)]
        return ["Device mapping:", *lines] if lines else ["Device mapping: no known devices."]


class VariableWrites:
    """Finds what a script assigns to trained variables: their values are compared with the arena's."""

    def __init__(self, training_step: KerasStep) -> None:
        self._training_step = training_step

    def remember(self) -> None:
        """Take the variables' values into the arena, unless they have just come from there."""
        if not self._training_step.is_in_graph:
            self._training_step.fill_arena()

    def found(self) -> Sequence[int]:
        pairs = zip(self._training_step.trained, self._training_step.views, strict=True)
        return [i for i, (w, view) in enumerate(pairs) if not _has_same_bytes(read(w.variable), view)]


def _has_same_bytes(values: Any, view: Any) -> bool:
    """
    >>> _has_same_bytes(np.array([0.0, np.nan]), np.array([0.0, np.nan])), _has_same_bytes(np.zeros(2), -np.zeros(2))
    (True, False)
    """
    return np.array_equal(np.ascontiguousarray(values).view(np.uint8), np.ascontiguousarray(view).view(np.uint8))


def in_graph() -> bool:
    """Tell whether what is called now becomes part of a graph."""
    return IS_TENSORFLOW and bool(tf.inside_function())


def read(variable: Any) -> Any:
    """Return a variable's values as an array, on its own memory where that is possible."""
    return as_array(variable._value)


def as_array(tensor: Any) -> Any:
    """Return a gradient's values; rows of an embedding's gradient are laid out whole."""
    if not IS_TENSORFLOW:
        return np.asarray(keras.ops.convert_to_numpy(tensor))
    dense = tf.convert_to_tensor(tensor)
    try:
        return np.asarray(memoryview(dense))
    except (TypeError, ValueError, BufferError):  # a dtype that is not numpy's own, or another device's memory
        return dense.numpy()


def assign(variable: Any, values: Any) -> None:
    """Copy new values into a variable."""
    if not IS_TENSORFLOW:
        variable.assign(np.array(values))
        return
    native = variable._value
    tf.raw_ops.AssignVariableOp(resource=native.handle, value=tf.convert_to_tensor(values, native.dtype))


def _device_of(variable: Any) -> str:
    """Return TensorFlow's short name of where a variable lies."""
    if not IS_TENSORFLOW:
        return "/gpu:0" if getattr(variable.value, "is_cuda", False) else "/cpu:0"
    _, _, kind = variable.value.device.rpartition("device:")
    return f"/{kind.lower()}" if kind else "/cpu:0"
