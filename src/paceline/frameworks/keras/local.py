"""Bring Keras's variables and optimizer to mode local (worker/step/local_steps).

Used by frameworks/keras/preparation instead of KerasStep. The optimizer stays the user's own, whichever it is; in a
graph, each of its steps calls out before and after its update.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from paceline.frameworks.keras.objects import change
from paceline.frameworks.keras.training_step import KerasStep, in_graph, read, tf
from paceline.worker.step.local_steps import LocalSteps


class LocalKerasStep(LocalSteps, KerasStep):
    """One Keras model that trains by itself between exchanges."""

    def __init__(self, *args: Any, **bound: Any) -> None:
        self._is_spoiled = False
        self._values: list[Any] | None = None  # of the variables, as a graph has brought them
        super().__init__(*args, **bound)

    def num_groups(self) -> int:
        return 1

    def _option_values(self) -> Any:
        return self._outer

    # --- the optimizer's own step -----------------------------------------------------------------------------

    def follow(self) -> None:
        """Act around the optimizer's own apply: take the last answer before it, count the step after it."""
        training_step, base = self, type(self.optimizer)

        def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
            if in_graph():
                factor = training_step.before_in_graph()
                with tf.control_dependencies([factor]):
                    base.apply(self, training_step.times(factor, grads), trainable_variables)
                training_step.after_in_graph()
                return
            training_step.before_step()
            base.apply(self, training_step.times(training_step.factor(), grads), trainable_variables)
            training_step.stepped()

        change(self.optimizer, {"apply": apply})

    def _spoil(self) -> None:
        self._is_spoiled = True

    def factor(self) -> Any:
        """Return what --chaos nan multiplies the gradient of this step by: 1, or NaN."""
        is_spoiled, self._is_spoiled = self._is_spoiled, False
        return np.float32("nan" if is_spoiled else 1.0)

    def times(self, factor: Any, gradients: Sequence[Any]) -> Sequence[Any]:
        """Multiply the first of the gradients by the factor, where --chaos may strike at all."""
        if self.injection is None:
            return gradients
        made = list(gradients)
        first = next((index for index, each in enumerate(made) if each is not None), None)
        if first is not None:
            dense = keras.ops.convert_to_tensor(made[first])
            made[first] = dense * keras.ops.cast(factor, dense.dtype)
        return made

    def before_in_graph(self) -> Any:
        """In a graph: prepare a step before the optimizer's own update; return the factor of its gradient."""

        def body() -> Any:
            self.before_step()
            return self.factor()

        factor = tf.numpy_function(self.called_out(body), [], tf.float32)
        factor.set_shape(())
        return factor

    def after_in_graph(self) -> None:
        """In a graph: count a step after its update; every H-th time the values go out, and others come back."""

        def body(*values: Any) -> list[Any]:
            self._values = list(values)
            try:
                has_exchanged = self.stepped()
            finally:
                self._values = None
            return self.fresh() if has_exchanged else list(values)

        self.exchange(body, [weight.variable.value.read_value() for weight in self.trained])

    def _delta(self) -> list[Any]:
        values = self._values if self._values is not None else [read(w.variable) for w in self.trained]
        return [origin - value for origin, value in zip(self._origin, values, strict=True)]

    def _note_origin(self) -> None:
        self._origin = self.fresh()

    def _go_back(self) -> None:
        for view, origin in zip(self.views, self._origin, strict=True):
            np.copyto(view, origin)
        self.mirror()

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        raise AssertionError("in mode local the optimizer runs here")
