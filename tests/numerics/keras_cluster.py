"""WHAT do the tests of Keras models train? One small model on fixed batches: plain Keras, and a cluster beside it.

Used by the tests in this folder. The cluster runs as threads of this process (paceline.launch), so TensorFlow is
imported once; what a worker process imports is tested with processes.
"""

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import paceline

STEPS = 6
LOCK = threading.Lock()  # names and seeds of Keras are the process's
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2 * STEPS, 8, 37)).astype("float32")
Y = RNG.integers(0, 3, size=(2 * STEPS, 8))
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

Optimizer = Callable[[], Any]
Values = list[Any]


def model_of(seed: int = 3) -> Any:
    """Sizes that are no multiples of anything; a layer with carried state between."""
    with LOCK:
        keras.utils.set_random_seed(seed)
        return keras.Sequential(
            [
                keras.Input((37,)),
                keras.layers.Dense(29, "tanh", name="first"),
                keras.layers.BatchNormalization(name="norm"),
                keras.layers.Dense(3, name="last"),
            ],
            name="net",
        )


def train(model: Any, optimizer: Any, how: str, batches: range = range(STEPS), is_read: bool = True) -> Values:
    """The weights after these batches, if they are to be read; `how` is eager, graph or fit."""

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    if how == "fit":
        model.compile(optimizer=optimizer, loss=LOSS)
        data = tf.data.Dataset.from_tensor_slices((X[batches.start : batches.stop], Y[batches.start : batches.stop]))
        model.fit(data, verbose=0)
    else:
        one = tf.function(step) if how == "graph" else step
        for index in batches:
            one(tf.constant(X[index]), tf.constant(Y[index]))
    return [np.array(w) for w in model.get_weights()] if is_read else []


def plain(optimizer: Optimizer, how: str = "eager") -> Values:
    """What Keras alone makes of it."""
    return train(model_of(), optimizer(), how)


def on_cluster(optimizer: Optimizer, how: str, workers: int = 1, **options: Any) -> tuple[Values, dict[str, Any]]:
    """The chief's weights at the end, and the summary."""
    ended: dict[int, Values] = {}

    def work(ctx: Any) -> None:
        model, own = ctx.prepare(model_of(), optimizer())
        train(model, own, how, range(ctx.worker_index * STEPS, (ctx.worker_index + 1) * STEPS))
        ctx.pull()
        ended[ctx.worker_index] = [np.array(w) for w in model.get_weights()]

    summary = paceline.launch(work, workers=workers, **options)
    return ended[0], summary


def apart(one: Values, other: Values) -> float:
    """The largest difference of any element."""
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))
