"""Keras on torch, by fit and then in a loop, on the ps and beside it; says how far apart the two are."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch

import paceline

STEPS = 5
RNG = np.random.default_rng(0)
X = RNG.normal(size=(STEPS, 8, 4)).astype("float32")
Y = RNG.normal(size=(STEPS, 8, 2)).astype("float32")


def made():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(2)], name="net")
    return model, keras.optimizers.SGD(0.1, momentum=0.9)


def by_fit(model, optimizer):
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(X.reshape(-1, 4), Y.reshape(-1, 2), batch_size=8, shuffle=False, verbose=0)
    return model.get_weights()


def by_loop(model, optimizer):
    for x, y in zip(X, Y, strict=True):
        loss = (model(x, training=True) - torch.from_numpy(y)).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in model.trainable_weights], model.trainable_weights)
    return model.get_weights()


def apart(one, other):
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


ctx = paceline.init()
first = made()[0].get_weights()
ours, plain = ctx.prepare(*made()), made()
said = {"by_fit": apart(by_fit(*ours), by_fit(*plain)), "by_loop": apart(by_loop(*ours), by_loop(*plain))}
ctx.log({**said, "moved": apart(ours[0].get_weights(), first), "steps": ctx.global_step})
