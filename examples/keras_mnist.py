"""Document 000's recipe with a Keras model: two layers on MNIST, alone or on a cluster. Three lines are paceline's.

    python keras_mnist.py                                   one plain process, as without paceline
    paceline run --ps 1 --workers 2 keras_mnist.py
    paceline run --workers 2 --mode sync keras_mnist.py --how=fit

`--how` is one of graph (a step inside tf.function), eager, and fit (model.compile and model.fit). A worker imports no
torch: the ps do. Try `--lr=0.01 --batches=55` for the same curve at a tenth of the time.
"""

import argparse
import time

import keras
import tensorflow as tf

import paceline
from paceline.datasets import mnist


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batches", type=int, default=550, help="of 100 images, in an epoch")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=1, help="of the first weights and the order of images")
    parser.add_argument("--how", choices=("graph", "eager", "fit"), default="graph")
    return parser.parse_args()


def document_000() -> keras.Model:
    first = keras.initializers.RandomNormal(stddev=1.0)
    hidden = keras.layers.Dense(100, "sigmoid", kernel_initializer=first, name="hidden")
    out = keras.layers.Dense(10, kernel_initializer=first, name="out")
    return keras.Sequential([keras.Input((784,)), hidden, out], name="mlp")


def main() -> None:
    args = arguments()
    ctx = paceline.init()
    digits = mnist.load().tensorflow_split()
    keras.utils.set_random_seed(args.seed)
    model, optimizer = document_000(), keras.optimizers.SGD(args.lr)
    train = tf.data.Dataset.from_tensor_slices((digits.train_x, digits.train_y))
    train = train.shuffle(len(digits.train_x), seed=args.seed).batch(100).take(args.batches)
    model, optimizer = ctx.prepare(model, optimizer)  # every worker takes the whole set, as in the document
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    if args.how == "graph":
        step = tf.function(step)
    if args.how == "fit":
        model.compile(optimizer=optimizer, loss=loss_of)
    for epoch in ctx.epochs(args.epochs):
        began = time.monotonic()
        if args.how == "fit":
            cost = model.fit(train, epochs=epoch + 1, initial_epoch=epoch, shuffle=False, verbose=0).history["loss"][-1]
        else:
            for x, y in train:
                cost = float(step(x, y)) if args.how == "eager" else step(x, y)
        print(f"Epoch {epoch + 1}: cost {float(cost):.4f}, {time.monotonic() - began:.2f} s", flush=True)

    right = tf.argmax(model(digits.test_x), 1) == digits.test_y
    accuracy = float(tf.reduce_mean(tf.cast(right, tf.float32)))
    ctx.log({"accuracy": accuracy})
    print(f"Test-Accuracy: {accuracy:.2f}", flush=True)


if __name__ == "__main__":
    main()
