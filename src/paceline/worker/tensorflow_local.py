"""HOW does a Keras worker train on its own for a while? Mode local: H steps of its own optimizer, then one exchange.

Used by worker/tensorflow_preparation instead of KerasTrainee. The optimizer stays the user's own, whichever it is;
after every H-th of its steps the delta is pushed as a gradient is: where the last exchange left the variables, less
where they are now. The ps applies it with an outer SGD.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from paceline.errors import UsageError
from paceline.modes.spec import outer_momentum
from paceline.wire.frames import Outcome
from paceline.wire.messages import OptimizerSpec, Options
from paceline.worker.tensorflow import KerasTrainee, in_graph, read, tf
from paceline.worker.tensorflow_layout import Names
from paceline.worker.tensorflow_objects import change
from paceline.worker.trainee import outer_spec
from paceline.worker.writes import Unwatched, Writes


class LocalKerasTrainee(KerasTrainee):
    """One model that trains by itself between exchanges."""

    is_local = True

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        num_ps: int,
        placement: str,
        names: Names | None,
        outer: str,
        outer_lr: float,
        momentum: float | None,
    ) -> None:
        self._outer, self._outer_lr, self._momentum = outer, outer_lr, momentum
        self._since_exchange = 0
        self._is_spoiled = False
        self._values: list[Any] | None = None  # of the variables, as a graph has brought them
        super().__init__(model, optimizer, num_ps, placement, names)
        self._start_here()

    def make_spec(self) -> OptimizerSpec:
        return outer_spec(1, self._outer_lr, outer_momentum(self._momentum, self._outer))

    def _option_values(self) -> Any:
        return self._outer

    def _changed_options(self) -> list[Options] | None:
        """The user's options are for the user's optimizer, which runs here; the outer ones change with the dial."""
        outer = self.client.dial.spec.outer
        if outer == self._outer:
            return None
        self._outer = outer
        self.spec = self.make_spec()
        return self.spec.groups

    # --- the optimizer's own step -----------------------------------------------------------------------------

    def follow(self) -> None:
        """Around the optimizer's own apply: before it the last answer is taken, after it this step counts."""
        trainee, base = self, type(self.optimizer)

        def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
            if in_graph():
                factor = tf.numpy_function(trainee.before_in_graph, [], tf.float32)
                factor.set_shape(())
                with tf.control_dependencies([factor]):
                    base.apply(self, trainee.times(factor, grads), trainable_variables)
                trainee.after_in_graph()
                return
            trainee.before_step()
            base.apply(self, trainee.times(trainee.factor(), grads), trainable_variables)
            trainee.stepped()

        change(self.optimizer, {"apply": apply})

    def _spoil(self) -> None:
        self._is_spoiled = True

    def factor(self) -> Any:
        """What --chaos nan makes of the gradient of this step: 1, or none."""
        is_spoiled, self._is_spoiled = self._is_spoiled, False
        return np.float32("nan" if is_spoiled else 1.0)

    def times(self, factor: Any, gradients: Sequence[Any]) -> Sequence[Any]:
        """The gradients, the first of them times the factor where --chaos may strike at all."""
        if self.injection is None:
            return gradients
        made = list(gradients)
        first = next((index for index, each in enumerate(made) if each is not None), None)
        if first is not None:
            dense = keras.ops.convert_to_tensor(made[first])
            made[first] = dense * keras.ops.cast(factor, dense.dtype)
        return made

    def before_in_graph(self) -> Any:
        """Called by a graph, before the optimizer's own update; the factor comes back."""

        def body() -> list[Any]:
            self.before_step()
            return []

        self.called_out(body)
        return self.factor()

    def after_in_graph(self) -> None:
        """After the update: a step counts; every H-th time the values go out, and others come back."""
        before = [weight.variable.value.read_value() for weight in self.trained]

        def exchange(*values: Any) -> list[Any]:
            return self.called_out(lambda: self._stepped_in_graph(list(values)))

        self.take_back(tf.numpy_function(exchange, before, self.graph_types()))

    def _stepped_in_graph(self, values: list[Any]) -> list[Any]:
        self._values = values
        try:
            has_exchanged = self.stepped()
        finally:
            self._values = None
        return self.fresh() if has_exchanged else values

    def stepped(self) -> bool:
        """The optimizer has made a step of its own; every H-th is followed by an exchange. Whether this one was."""
        self._since_exchange += 1
        is_due = self._since_exchange >= self.client.dial.spec.local_steps
        if is_due:
            self._exchange()
        self.steps += 1
        self.after_step()
        return is_due

    def _exchange(self) -> None:
        values = self._values if self._values is not None else [read(w.variable) for w in self.trained]
        self._since_exchange = 0
        self._push([origin - value for origin, value in zip(self._origin, values, strict=True)])

    # --- what an exchange leaves ------------------------------------------------------------------------------

    def _start_here(self) -> None:
        """Deltas count from where the arena is now."""
        self._since_exchange = 0
        self._origin = self.fresh()

    def settle(self) -> None:
        if not self.client.is_pending:
            return
        super().settle()
        if self.last_outcome is Outcome.ADDED:
            self._go_back()  # another delta for the same round, from its start
        else:
            self._start_here()

    def _go_back(self) -> None:
        for view, origin in zip(self.views, self._origin, strict=True):
            np.copyto(view, origin)
        self.mirror()

    def finish(self) -> UsageError | None:
        """Push the steps since the last exchange, too."""
        refused = super().finish()
        if self._since_exchange:
            self.wants_ticket = self.is_budgeted
            self._exchange()
        return refused

    def _send_parameters(self, what: str) -> None:
        super()._send_parameters(what)
        self._start_here()

    def end_first(self) -> None:
        super().end_first()
        self.writes: Writes = Unwatched()  # every step of this worker writes the parameters

    def forget_steps(self) -> None:
        self._go_back()
        self._since_exchange = 0

    def take_newest(self) -> None:
        """Between two exchanges the worker's own steps are kept; only at an exchange there is nothing to lose."""
        if self._since_exchange == 0:
            super().take_newest()
            self._start_here()

    def joined(self, on_load: Any) -> None:
        super().joined(on_load)
        self._start_here()

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        raise AssertionError("in mode local the optimizer runs here")
