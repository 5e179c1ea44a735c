"""WHAT does a Keras process train while the lab looks on? Document 000's recipe, inside tf.function.

Run by lab/measuring/starting, as lab/scripts/worker_script is: `single` as a plain process without paceline in its
loop, `worker` through launchers/entry, three changed lines and all. Must never differ between the two in anything but
those lines, nor import torch.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import paceline
from paceline.lab.scripts.orders import Orders

BATCH = 100
LEARNING_RATE = 0.001


def main(argv: Sequence[str] | None = None) -> None:
    """Load, join if there is a cluster, then obey."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["single", "worker"])
    parser.add_argument("--data", type=Path, required=True, help="folder with x.npy and y.npy")
    args, _ = parser.parse_known_args(argv)
    orders = Orders()
    if importlib.util.find_spec("tensorflow") is None:
        orders.lack("TensorFlow is not installed (the extra tensorflow)")
        return
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.utils.set_random_seed(1)
    model, optimizer = document_000(keras), keras.optimizers.SGD(LEARNING_RATE)
    if args.role == "single":
        orders.obey(trainer(keras, tf, model, optimizer, args.data, seed=0))
        return
    ctx = paceline.init()
    model, optimizer = ctx.prepare(model, optimizer)
    orders.obey(trainer(keras, tf, model, optimizer, args.data, seed=ctx.worker_index))


def document_000(keras: Any) -> Any:
    """784-100-10, sigmoid, weights from N(0, 1)."""
    normal = keras.initializers.RandomNormal(stddev=1.0)
    hidden = keras.layers.Dense(100, "sigmoid", kernel_initializer=normal)
    return keras.Sequential([keras.Input((784,)), hidden, keras.layers.Dense(10, kernel_initializer=normal)])


def trainer(keras: Any, tf: Any, model: Any, optimizer: Any, data: Path, seed: int) -> Callable[[int], None]:
    """The loop that is timed, in every process the same."""
    images, labels = np.load(data / "x.npy"), np.load(data / "y.npy")
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    chance = np.random.default_rng(seed)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def train(steps: int) -> None:
        for _ in range(steps):
            batch = chance.integers(0, len(images), BATCH)
            step(tf.constant(images[batch]), tf.constant(labels[batch]))

    return train


if __name__ == "__main__":
    main(sys.argv[1:])
