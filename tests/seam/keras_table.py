"""What Keras scripts do between `prepare()` and their end: small programs, run plain and on a cluster.

A program gets a `KerasJob` and returns its model. The plain run of two workers averages their gradients, in the order
of the workers, where Keras hands them to the update: after clipping, as the ps get them.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import paceline

BATCHES = 6
LOCK = threading.Lock()  # names and seeds of Keras are the process's
_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(2, BATCHES, 8, 7)).astype("float32")
Y = _RNG.integers(0, 3, size=(2, BATCHES, 8))
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
Values = list[Any]


class KerasJob:
    """What a program gets: its `prepare`, its numbers, its folder, and where it says what it saw."""

    def __init__(self, index: int, folder: Path, ctx: Any = None, together: "Together | None" = None) -> None:
        self.ctx = ctx
        self.index = index
        self.x, self.y = X[index], Y[index]
        self.seen: Values = []
        self.path = str(folder / f"{'plain' if ctx is None else 'cluster'}-{index}")
        self._together = together

    def make(self, build: Callable[[], Any], policy: str = "float32") -> Any:
        with LOCK:
            keras.config.set_dtype_policy(policy)
            try:
                keras.utils.set_random_seed(3)
                return build()
            finally:
                keras.config.set_dtype_policy("float32")

    def prepare(self, model: Any, optimizer: Any) -> Any:
        if self.ctx is not None:
            return self.ctx.prepare(model, optimizer)
        if self._together is not None:
            self._together.average(optimizer, self.index)
        return model, optimizer

    def see(self, *values: Any) -> None:
        self.seen += [np.array(value) for value in values]

    # --- what most programs share ---------------------------------------------------------------------------------

    def step(self, model: Any, optimizer: Any, batch: int) -> None:
        with tf.GradientTape() as tape:
            loss = LOSS(self.y[batch], model(tf.constant(self.x[batch]), training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.see(loss)

    def train(self, model: Any, optimizer: Any, batches: Sequence[int] = range(BATCHES)) -> None:
        for batch in batches:
            self.step(model, optimizer, batch)

    def fit(self, model: Any, **options: Any) -> None:
        data = tf.data.Dataset.from_tensor_slices((self.x, self.y))
        self.see(model.fit(data, verbose=0, **options).history["loss"])


class Together:
    """Two plain trainings in lockstep."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=120)
        self._given: list[Values] = [[], []]

    def average(self, optimizer: Any, index: int) -> None:
        clip, plain = optimizer._clip_gradients, optimizer._backend_apply_gradients

        def mean(*own: Any) -> Values:
            self._given[index] = [np.array(each) for each in own]
            self.barrier.wait()
            means = [((a + b) / 2).astype(a.dtype) for a, b in zip(*self._given, strict=True)]
            self.barrier.wait()
            return means

        def apply(gradients: Any, variables: Any) -> None:
            dense = [tf.convert_to_tensor(each) for each in clip(list(gradients))]
            if tf.inside_function():
                means = tf.numpy_function(mean, dense, [each.dtype for each in dense])
                for each, variable in zip(means, variables, strict=True):
                    each.set_shape(variable.shape)
            else:
                means = [tf.constant(each) for each in mean(*dense)]
            plain(means, list(variables))

        object.__setattr__(optimizer, "_clip_gradients", lambda gradients: gradients)
        object.__setattr__(optimizer, "_backend_apply_gradients", apply)


Program = Callable[[KerasJob], Any]


@dataclass(frozen=True)
class KerasCase:
    """`one` and `two`: how far apart the numbers may be on 1 and on 2 workers (0: the same bits), or with which words a
    run is refused."""

    program: Program
    one: float | str
    two: float | str


CASES: dict[str, KerasCase] = {}


def case(one: float | str = 0, two: float | str = 0, name: str = "") -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        CASES[name or program.__name__] = KerasCase(program, one, two)
        return program

    return add


def values(job: KerasJob, model: Any) -> Values:
    return [np.array(each) for each in model.get_weights()] + job.seen


def run_plain(program: Program, folder: Path, workers: int) -> list[Values]:
    together = Together() if workers > 1 else None
    jobs = [KerasJob(index, folder, together=together) for index in range(workers)]
    ended: list[Values] = [[] for _ in jobs]
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            ended[index] = values(jobs[index], program(jobs[index]))
        except BaseException as error:
            errors.append(error)
            if together is not None:
                together.barrier.abort()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return ended


def run_cluster(program: Program, folder: Path, workers: int) -> list[Values]:
    ended: list[Values] = [[] for _ in range(workers)]

    def work(ctx: Any) -> None:
        job = KerasJob(ctx.worker_index, folder, ctx)
        ended[ctx.worker_index] = values(job, program(job))

    options: dict[str, Any] = {"mode": "sync", "ps": 2, "lane": "tcp"} if workers > 1 else {}
    paceline.launch(work, workers=workers, **options)
    return ended
