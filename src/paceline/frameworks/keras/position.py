"""Save and restore what of Keras belongs to a worker's position: seed generators, iterations and a learning rate.

Made by frameworks/keras/preparation, used by worker/positions/position. A schedule is a function of the iterations, so
it goes on with them. The order that a tf.data set was in is TensorFlow's own, and starts anew.
"""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from paceline.wire.messages import Position
from paceline.worker.positions.position import Own

SEED = "seed_generator_state"


class KerasOwn(Own):
    """The seeds and options of one worker."""

    goes_on = True  # what the ps remember is of as many steps as were made, and a schedule of as many iterations

    def __init__(self, model: Any, optimizer: Any, on_load: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._on_load = on_load  # called when the iterations are set
        self._seeds = {f"keras.{n}": v for n, v in enumerate(v for v in model.variables if v.path.endswith(SEED))}

    def capture(self) -> dict[str, bytes]:
        return {name: keras.ops.convert_to_numpy(v.value).tobytes() for name, v in self._seeds.items()}

    def restore(self, states: Mapping[str, bytes]) -> None:
        for name, variable in self._seeds.items():
            if name in states:
                values = np.frombuffer(states[name], keras.ops.convert_to_numpy(variable.value).dtype)
                variable.assign(values.reshape(variable.shape))

    def options(self) -> tuple[list[dict[str, object] | None], list[dict[str, object]]]:
        said: dict[str, object] = {"iterations": int(self._optimizer.iterations.numpy())}
        if isinstance(self._optimizer._learning_rate, keras.Variable):
            said["lr"] = float(self._optimizer.learning_rate)
        return [], [said]

    def load(self, position: Position) -> None:
        said = (position.groups or [{}])[0]
        iterations, lr = said.get("iterations"), said.get("lr")
        if isinstance(iterations, int):
            self._optimizer.iterations.assign(iterations)
            self._on_load()
        if isinstance(lr, float) and isinstance(self._optimizer._learning_rate, keras.Variable):
            self._optimizer.learning_rate = lr
