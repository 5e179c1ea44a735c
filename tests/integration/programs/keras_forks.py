"""Train with Keras, and fork children that end, write into their copy, and ask for what is their parent's."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if sys.argv[1] == "torch":
    os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np

import paceline
from paceline.errors import UsageError

ctx = paceline.init()
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2, name="out")])
optimizer = keras.optimizers.SGD(0.01)
model.compile(optimizer=optimizer, loss="mse", run_eagerly=True)
model, optimizer = ctx.prepare(model, optimizer)
data: Any = (np.ones((8, 4), "float32"), np.ones((8, 2), "float32"))
seen: dict[str, Any] = {}


def fork(name: str, body: Callable[[], object]) -> None:
    """Does not return in the child."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            told = body()
        except UsageError as refused:
            told = refused
        os.write(write, str(told).encode())
        sys.exit()
    os.close(write)
    with open(read) as told_by_child:
        seen[name] = [told_by_child.read(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]


def write() -> list[float]:
    model.set_weights([np.full_like(value, 7) for value in before])
    return [float(value) for value in model.get_weights()[1]]


model.fit(*data, batch_size=4, epochs=2, verbose=0)
before = [value.copy() for value in model.get_weights()]
gradients = [keras.ops.convert_to_tensor(np.ones_like(value)) for value in before]
fork("exit", lambda: sys.exit(3))
fork("write", write)
fork("pull", ctx.pull)
fork("step", lambda: optimizer.apply(gradients, model.trainable_variables))
seen["is_same"] = all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
model.fit(*data, batch_size=4, epochs=2, verbose=0)
seen["global_step"] = ctx.global_step
Path(sys.argv[2]).write_text(json.dumps(seen))
