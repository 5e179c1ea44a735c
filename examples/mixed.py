"""One cluster, two frameworks: worker 0 trains the digits in PyTorch, worker 1 in Keras, and it is one model.

    paceline run --workers 2 mixed.py
    paceline run --workers 2 --mode sync mixed.py

The layout is torch's: `0.weight` is [100, 784] there. NAMES says for every weight of the Keras model what the cluster
calls it, and in which order of axes: a Dense layer has its kernel the other way round. The optimizer on the ps is
torch's SGD, which for plain SGD is Keras's, too. Each worker imports one framework: the imports are in its function.
"""

import argparse
from collections.abc import Iterator

import numpy as np

import paceline
from paceline.datasets import mnist

LR, BATCH = 0.1, 100
NAMES = {
    "mlp/hidden/kernel": ("0.weight", (1, 0)),  # [784, 100] there is [100, 784] here
    "mlp/hidden/bias": "0.bias",
    "mlp/out/kernel": ("2.weight", (1, 0)),
    "mlp/out/bias": "2.bias",
}


def train_torch(ctx: paceline.Context, digits: mnist.Split, steps: int) -> float:
    import torch

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(784, 100), torch.nn.Sigmoid(), torch.nn.Linear(100, 10))
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
    for chosen in batches(ctx, digits, steps):
        optimizer.zero_grad()
        logits = model(torch.from_numpy(digits.train_x[chosen]))
        torch.nn.functional.cross_entropy(logits, torch.from_numpy(digits.train_y[chosen])).backward()
        optimizer.step()
    ctx.pull()
    with torch.no_grad():
        return accuracy(model(torch.from_numpy(digits.test_x)).numpy(), digits)


def train_keras(ctx: paceline.Context, digits: mnist.Split, steps: int) -> float:
    import keras
    import tensorflow as tf

    layers = [keras.layers.Dense(100, "sigmoid", name="hidden"), keras.layers.Dense(10, name="out")]
    model = keras.Sequential([keras.Input((784,)), *layers], name="mlp")
    model, optimizer = ctx.prepare(model, keras.optimizers.SGD(LR), names=NAMES)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for chosen in batches(ctx, digits, steps):
        step(tf.constant(digits.train_x[chosen]), tf.constant(digits.train_y[chosen]))
    ctx.pull()
    return accuracy(model(digits.test_x).numpy(), digits)


def batches(ctx: paceline.Context, digits: mnist.Split, steps: int) -> Iterator[np.ndarray]:
    """Every worker draws its own, until the cluster has made so many updates."""
    rng = np.random.default_rng(ctx.worker_index)
    for _ in ctx.steps(steps):
        yield rng.integers(0, len(digits.train_x), BATCH)


def accuracy(logits: np.ndarray, digits: mnist.Split) -> float:
    return float((logits.argmax(1) == digits.test_y).mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4000, help="updates of the cluster")
    args = parser.parse_args()
    ctx = paceline.init()
    digits = mnist.load().tensorflow_split()
    is_keras = ctx.worker_index % 2 == 1
    reached = (train_keras if is_keras else train_torch)(ctx, digits, args.steps)
    ctx.log({"accuracy": reached})
    name = "Keras" if is_keras else "torch"
    print(f"Worker {ctx.worker_index}, {name}: accuracy {reached:.4f} at global step {ctx.global_step}", flush=True)


if __name__ == "__main__":
    main()
