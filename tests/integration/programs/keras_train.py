"""A Keras worker that says what it has imported. `--nan`: its gradients are none."""

import argparse
import os
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--nan", action="store_true")
args = parser.parse_args()
os.environ["KERAS_BACKEND"] = "tensorflow"

import keras  # noqa: E402
import numpy as np  # noqa: E402

import paceline  # noqa: E402

ctx = paceline.init()
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="out")], name="net")
x = np.full((args.steps, 4), np.nan if args.nan else 1.0, "float32")
model, optimizer = ctx.prepare(model, keras.optimizers.SGD(0.1))
model.compile(optimizer=optimizer, loss="mse")
model.fit(x, np.zeros((args.steps, 2), "float32"), batch_size=1, shuffle=False, verbose=0)
print(f"torch imported: {'torch' in sys.modules}; global step {ctx.global_step}", flush=True)
ctx.log({"sum": float(np.sum(model.get_weights()[0]))})
