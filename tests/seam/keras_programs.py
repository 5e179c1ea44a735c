"""The rows of keras_table.py."""

from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras.callbacks import (
    BackupAndRestore,
    Callback,
    EarlyStopping,
    LearningRateScheduler,
    ModelCheckpoint,
    ReduceLROnPlateau,
)
from keras.optimizers import SGD, Adagrad, Adam, AdamW, LossScaleOptimizer, RMSprop
from keras_table import BATCHES, LOSS, KerasJob, X, Y, case

ALONE = "the other workers would not see it"  # what one of several may not write
CLOSE = 1e-6 * BATCHES * 3  # a step is within 1e-6 (docs/keras.md)


def net(**options: Any) -> Any:
    return keras.Sequential([keras.Input((7,)), layers.Dense(9, "tanh", **options), layers.Dense(3)])


def momentum(**options: Any) -> Any:
    return SGD(0.1, momentum=0.9, **options)


def prepared(job: KerasJob, optimizer: Any = None, build: Any = net, policy: str = "float32") -> Any:
    return job.prepare(job.make(build, policy), momentum() if optimizer is None else optimizer)


def compiled(job: KerasJob, optimizer: Any = None, build: Any = net, policy: str = "float32", **options: Any) -> Any:
    model, optimizer = prepared(job, optimizer, build, policy)
    model.compile(optimizer=optimizer, loss=LOSS, **options)
    return model, optimizer


# --- dtypes ---------------------------------------------------------------------------------------------------------


def in_policy(job: KerasJob, policy: str) -> Any:
    model, _ = compiled(job, policy=policy)
    job.fit(model, epochs=2)
    return model


for _policy, _apart in {"mixed_float16": 0.0, "mixed_bfloat16": 0.0, "float64": CLOSE, "float16": 0.01}.items():
    case(_apart, _apart, f"dtype policy {_policy}")(lambda job, policy=_policy: in_policy(job, policy))


@case()
def steps_skipped_by_a_loss_scale(job: KerasJob) -> Any:
    model, optimizer = prepared(job, policy="mixed_float16")
    scaled = LossScaleOptimizer(optimizer, initial_scale=2.0**30, dynamic_growth_steps=2)
    model.compile(optimizer=scaled, loss=LOSS)
    job.fit(model, epochs=3)
    assert 0 < int(optimizer.iterations) < 3 * BATCHES
    job.see(scaled.dynamic_scale, optimizer.iterations)
    return model


@case()
def sample_weights_uneven_batches_and_class_weights(job: KerasJob) -> Any:
    model, _ = compiled(job)
    weights = np.tile(np.linspace(0, 1, 8).astype("float32"), (BATCHES, 1))
    model.fit(tf.data.Dataset.from_tensor_slices((job.x, job.y, weights)), verbose=0)
    flat = job.x.reshape(-1, 7), job.y.reshape(-1)
    model.fit(*flat, batch_size=10, shuffle=False, class_weight={0: 1.0, 1: 2.0, 2: 0.5}, verbose=0)
    return model


# --- writing into variables -----------------------------------------------------------------------------------------


def clipped(layer: Any) -> None:
    layer.kernel.assign(tf.clip_by_value(layer.kernel, -0.2, 0.2))


@case(two=ALONE)
def assigned_between_steps(job: KerasJob) -> Any:
    model, optimizer = prepared(job)
    job.train(model, optimizer, range(3))
    clipped(model.layers[0])
    job.train(model, optimizer, range(3, BATCHES))
    return model


@case(two=ALONE)
def assigned_by_a_callback(job: KerasJob) -> Any:
    class Clip(Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            clipped(model.layers[0])

    model, _ = compiled(job)
    job.fit(model, callbacks=[Clip()])
    return model


class Own(keras.Model):
    """A train_step of its own, which assigns at a place of the graph."""

    place = ""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(9, "tanh"), layers.Dense(3)
        self.build((None, 7))

    def build(self, shape: Any) -> None:
        self.first.build((None, 7))
        self.last.build((None, 9))
        self.built = True

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))

    def train_step(self, data: Any) -> Any:
        x, y = data
        if self.place == "first":
            clipped(self.first)
        with tf.GradientTape() as tape:
            loss = LOSS(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.place == "between":
            clipped(self.first)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        if self.place == "last":
            clipped(self.first)
        return {"loss": loss}


def in_train_step(job: KerasJob, place: str, **options: Any) -> Any:
    def build() -> Any:
        model = Own()
        model.place = place
        return model

    model, _ = compiled(job, build=build, **options)
    job.fit(model, epochs=2)
    return model


case(name="a train_step of its own")(lambda job: in_train_step(job, "", steps_per_execution=3))
for _place in ("first", "between", "last"):
    case(0, ALONE, f"assigned in train_step: {_place}")(lambda job, place=_place: in_train_step(job, place))
case(0, ALONE, "assigned in train_step, 3 steps a graph")(lambda job: in_train_step(job, "last", steps_per_execution=3))


@case(two=ALONE)
def weights_loaded_in_the_middle(job: KerasJob) -> Any:
    model, optimizer = prepared(job)
    job.train(model, optimizer, range(2))
    model.save_weights(job.path + ".weights.h5")
    job.train(model, optimizer, range(2, 4))
    model.load_weights(job.path + ".weights.h5")
    job.train(model, optimizer, range(4, BATCHES))
    return model


@case(two=ALONE)
def weights_of_a_layer_set_in_the_middle(job: KerasJob) -> Any:
    model, optimizer = prepared(job)
    before = model.layers[0].get_weights()
    job.train(model, optimizer, range(3))
    model.layers[0].set_weights(before)
    job.train(model, optimizer, range(3, BATCHES))
    return model


@case(two=ALONE)
def early_stopping_that_restores_the_best(job: KerasJob) -> Any:
    model, _ = compiled(job, SGD(5.0))
    stop = EarlyStopping("loss", patience=1, restore_best_weights=True, min_delta=100.0)
    job.fit(model, epochs=4, callbacks=[stop])
    job.fit(model)
    return model


@case(two=ALONE)
def backup_and_restore(job: KerasJob) -> Any:
    class Stop(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise KeyError("stop")

    model, _ = compiled(job)
    try:
        job.fit(model, epochs=4, callbacks=[BackupAndRestore(job.path), Stop()])
    except KeyError:
        job.fit(model, epochs=4, callbacks=[BackupAndRestore(job.path)])
    return model


# --- constraints, clipping, decay -----------------------------------------------------------------------------------


def constrained(job: KerasJob, constraint: Any) -> Any:
    model, _ = compiled(job, build=lambda: net(kernel_constraint=constraint, bias_constraint="non_neg"))
    job.fit(model)
    return model


case(CLOSE, CLOSE, "MaxNorm")(lambda job: constrained(job, keras.constraints.MaxNorm(0.5)))
case(name="NonNeg")(lambda job: constrained(job, keras.constraints.NonNeg()))


def with_options(job: KerasJob, **options: Any) -> Any:
    model, _ = compiled(job, momentum(**options))
    job.fit(model)
    return model


case(name="clipnorm")(lambda job: with_options(job, clipnorm=0.05))
case(name="clipvalue")(lambda job: with_options(job, clipvalue=0.01))
case(CLOSE, CLOSE, "global_clipnorm")(lambda job: with_options(job, global_clipnorm=0.1))
case(name="loss_scale_factor")(lambda job: with_options(job, loss_scale_factor=8.0))
case("gradient_accumulation_steps", "extra-tokens")(lambda job: with_options(job, gradient_accumulation_steps=2))


@case(CLOSE, CLOSE)
def weight_decay_with_exclusions(job: KerasJob) -> Any:
    optimizer = AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model, optimizer = prepared(job, optimizer)
    job.train(model, optimizer)
    return model


@case("call it before prepare()", "call it before prepare()")
def weight_decay_excluded_after_prepare(job: KerasJob) -> Any:
    model, optimizer = prepared(job, momentum(weight_decay=0.1))
    optimizer.exclude_from_weight_decay(var_names=["kernel"])
    job.train(model, optimizer)
    return model


def set_after(job: KerasJob, **options: Any) -> Any:
    model, optimizer = prepared(job)
    for name, value in options.items():
        setattr(optimizer, name, value)
    job.train(model, optimizer)
    return model


case("--extra-tokens", "--extra-tokens", "gradient_accumulation_steps set after prepare()")(
    lambda job: set_after(job, gradient_accumulation_steps=2)
)
case("--ema", "--ema", "use_ema set after prepare()")(
    lambda job: set_after(job, use_ema=True, ema_overwrite_frequency=2)
)
case(CLOSE, CLOSE, "global_clipnorm set after prepare()")(lambda job: set_after(job, global_clipnorm=0.05))


# --- optimizers -----------------------------------------------------------------------------------------------------


@case()
def learning_rates(job: KerasJob) -> Any:
    model, optimizer = compiled(job)
    job.fit(model)
    optimizer.learning_rate = 0.01
    job.fit(model)
    optimizer.learning_rate.assign(0.2)
    job.fit(model, epochs=2, callbacks=[LearningRateScheduler(lambda epoch, lr: lr * 0.5)])
    job.fit(model, epochs=3, callbacks=[ReduceLROnPlateau(monitor="loss", patience=0, min_delta=10.0)])
    job.see(optimizer.learning_rate)
    return model


@case()
def a_schedule(job: KerasJob) -> Any:
    model, optimizer = prepared(job, SGD(keras.optimizers.schedules.CosineDecay(0.2, 5)))
    job.train(model, optimizer)
    return model


def state(optimizer: Any) -> Any:
    """The optimizer's variables but its iterations and its rate."""
    return optimizer.variables[2:]


@case()
def optimizer_variables_read(job: KerasJob) -> Any:
    model, optimizer = prepared(job)
    for batch in range(BATCHES):
        job.step(model, optimizer, batch)
        job.see(*optimizer.variables)
    return model


@case(two=ALONE)
def momentum_reset(job: KerasJob) -> Any:
    model, optimizer = prepared(job)
    job.train(model, optimizer, range(3))
    for variable in state(optimizer):
        variable.assign(tf.zeros_like(variable))
    job.train(model, optimizer, range(3, BATCHES))
    return model


@case(two=ALONE)
def a_variable_of_a_built_optimizer_kept_and_written(job: KerasJob) -> Any:
    model, optimizer = job.make(net), momentum()
    optimizer.build(model.trainable_variables)
    model, optimizer = job.prepare(model, optimizer)
    kept = state(optimizer)[1]
    job.train(model, optimizer, range(3))
    kept.assign(kept * 0 + 3.0)
    job.train(model, optimizer, range(3, BATCHES))
    return model


@case(CLOSE, CLOSE)
def momentum_reset_inside_assign(job: KerasJob) -> Any:
    model, optimizer = prepared(job, Adam(0.01))
    job.train(model, optimizer, range(3))
    with job.ctx.assign() if job.ctx is not None else nullcontext():
        for variable in state(optimizer):
            variable.assign(tf.zeros_like(variable))
        optimizer.iterations.assign(0)
    job.train(model, optimizer, range(3, BATCHES))
    return model


@case(CLOSE, ALONE)
def iterations_reset(job: KerasJob) -> Any:
    model, optimizer = compiled(job, Adam(0.01))
    job.fit(model)
    optimizer.iterations.assign(0)
    job.fit(model)
    return model


@case(CLOSE, ALONE)
def iterations_set_before_the_first_step(job: KerasJob) -> Any:
    model, optimizer = prepared(job, Adam(0.01))
    optimizer.iterations.assign(50)
    job.train(model, optimizer)
    return model


@case(CLOSE, ALONE)
def model_and_optimizer_put_back(job: KerasJob) -> Any:
    model, optimizer = prepared(job, Adam(0.01, amsgrad=True))
    job.train(model, optimizer, range(3))
    remembered, weights = [np.array(each) for each in optimizer.variables], model.get_weights()
    job.train(model, optimizer, range(3, 5))
    optimizer.set_weights(remembered)
    model.set_weights(weights)
    job.train(model, optimizer, range(3, BATCHES))
    job.see(*optimizer.variables)
    return model


def trained_before(job: KerasJob, optimizer: Any) -> Any:
    """All workers train on one worker's numbers before `prepare()`, as the chief's values count."""
    model = job.make(net)
    own, job.x, job.y = (job.x, job.y), X[0], Y[0]
    job.train(model, optimizer, range(3))
    job.x, job.y = own
    model, optimizer = job.prepare(model, optimizer)
    job.train(model, optimizer, range(3, BATCHES))
    job.see(*optimizer.variables)
    return model


case(name="trained before prepare(): SGD")(lambda job: trained_before(job, momentum()))
case(CLOSE, CLOSE, "trained before prepare(): Adam")(lambda job: trained_before(job, Adam(0.01)))
case(CLOSE, CLOSE, "trained before prepare(): RMSprop")(
    lambda job: trained_before(job, RMSprop(0.01, momentum=0.9, centered=True))
)
case(CLOSE, CLOSE, "trained before prepare(): Adagrad")(lambda job: trained_before(job, Adagrad(0.1)))


@case()
def a_second_compile(job: KerasJob) -> Any:
    model, optimizer = compiled(job)
    job.fit(model)
    model.compile(
        optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    )
    optimizer.learning_rate = 0.01
    job.fit(model)
    return model


@case("another optimizer than prepare()", "another optimizer than prepare()")
def a_second_compile_with_another_optimizer(job: KerasJob) -> Any:
    model, _ = compiled(job)
    job.fit(model)
    model.compile(optimizer=Adam(0.01), loss=LOSS)
    return model


@case(two=ALONE)
def another_optimizer_beside(job: KerasJob) -> Any:
    model, _ = compiled(job)
    job.fit(model)
    model.optimizer = Adam(0.01)
    model.train_function = None
    job.fit(model)
    return model


@case("is given twice to one apply_gradients()", "is given twice to one apply_gradients()")
def a_variable_twice_in_one_update(job: KerasJob) -> Any:
    model, optimizer = prepared(job)
    variable = model.trainable_variables[0]
    gradient = tf.ones(variable.shape)
    optimizer.apply_gradients([(gradient, variable), (gradient, variable)])
    return model


@case()
def parts_updated_one_after_the_other(job: KerasJob) -> Any:
    model, optimizer = prepared(job)
    optimizer.build(model.trainable_variables)
    for batch in range(BATCHES):
        with tf.GradientTape(persistent=True) as tape:
            loss = LOSS(job.y[batch], model(tf.constant(job.x[batch]), training=True))
        for layer in model.layers:
            own = layer.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, own), own, strict=True))
    return model


# --- loops ----------------------------------------------------------------------------------------------------------


@case()
def train_on_batch_evaluate_and_predict(job: KerasJob) -> Any:
    model, _ = compiled(job)
    for batch in range(BATCHES):
        job.see(model.train_on_batch(job.x[batch], job.y[batch]))
        job.see(model.evaluate(job.x[0], job.y[0], verbose=0), model.predict(job.x[0], verbose=0))
    return model


@case()
def several_steps_in_one_graph(job: KerasJob) -> Any:
    model, optimizer = prepared(job)
    inputs, labels = tf.constant(job.x), tf.constant(job.y)

    def step(batch: Any) -> None:
        with tf.GradientTape() as tape:
            loss = LOSS(labels[batch], model(inputs[batch], training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    @tf.function
    def in_a_loop() -> None:
        for batch in tf.range(BATCHES):
            step(batch)

    @tf.function
    def unrolled() -> Any:
        sums = []
        for batch in range(BATCHES):
            step(batch)
            sums.append(tf.reduce_sum(model.layers[0].kernel))
        return sums

    in_a_loop()
    job.see(*unrolled())
    return model


@case()
def a_step_under_a_condition(job: KerasJob) -> Any:
    model, optimizer = prepared(job)

    @tf.function
    def step(x: Any, y: Any, batch: Any) -> None:
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        if batch % 2 == 0:
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for batch in range(BATCHES):
        step(tf.constant(job.x[batch]), tf.constant(job.y[batch]), tf.constant(batch))
    return model


# --- layers ---------------------------------------------------------------------------------------------------------


@case()
def a_layer_frozen_and_unfrozen(job: KerasJob) -> Any:
    model, optimizer = prepared(job)
    for batch in range(BATCHES):
        model.layers[0].trainable = batch not in (2, 3)
        job.step(model, optimizer, batch)
    return model


@case()
def a_layer_frozen_and_unfrozen_by_compile(job: KerasJob) -> Any:
    model, optimizer = compiled(job)
    for is_trained in (True, False, True):
        model.layers[0].trainable = is_trained
        model.compile(optimizer=optimizer, loss=LOSS)
        job.fit(model)
    return model


@case()
def a_frozen_variable_assigned(job: KerasJob) -> Any:
    model = job.make(net)
    model.layers[0].trainable = False
    model, optimizer = job.prepare(model, momentum())
    job.train(model, optimizer, range(3))
    clipped(model.layers[0])
    job.train(model, optimizer, range(3, BATCHES))
    return model


def between(*middle: Any) -> Any:
    return lambda: keras.Sequential([keras.Input((7,)), layers.Dense(9), *[each() for each in middle], layers.Dense(3)])


@case()
def batch_normalization(job: KerasJob) -> Any:
    model, _ = compiled(job, build=between(layers.BatchNormalization))
    job.fit(model, epochs=2)
    job.see(model.evaluate(job.x[0], job.y[0], verbose=0))
    return model


@case()
def dropout_with_a_seed(job: KerasJob) -> Any:
    model, _ = compiled(job, build=between(lambda: layers.Dropout(0.5, seed=4)))
    job.fit(model, epochs=2)
    return model


@case()
def a_stateful_rnn(job: KerasJob) -> Any:
    def build() -> Any:
        return keras.Sequential([keras.Input(batch_shape=(8, 7, 1)), layers.GRU(5, stateful=True), layers.Dense(3)])

    model, optimizer = prepared(job, build=build)
    job.x = job.x[..., None]
    job.train(model, optimizer, range(3))
    model.layers[0].reset_states()
    job.train(model, optimizer, range(3, BATCHES))
    return model


@case(CLOSE, CLOSE)
def rows_of_an_embedding(job: KerasJob) -> Any:
    def build() -> Any:
        return keras.Sequential([keras.Input((7,)), layers.Embedding(20, 5), layers.Flatten(), layers.Dense(3)])

    model, optimizer = prepared(job, momentum(clipnorm=0.1), build)
    job.x = np.abs(job.x * 3).astype("int32")
    job.train(model, optimizer)
    return model


@case()
def checkpoints_of_fit(job: KerasJob) -> Any:
    model, _ = compiled(job)
    job.fit(model, epochs=3, callbacks=[ModelCheckpoint(job.path + ".keras")])
    loaded = keras.models.load_model(job.path + ".keras")
    job.see(*loaded.get_weights(), *loaded.optimizer.variables)
    return model
